"""What `gyrectl doctor` makes of what it measured: pure, each one finding with the mend where one is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, and will not for ever."""
    FAULT = "fault"


_COLOURS = {State.OK: "", State.WARNING: "yellow", State.FAULT: "red"}

CLOCK_OFF_S = 2.0
EXPIRES_SOON = timedelta(days=30)
LOW_BYTES = 2 << 30
LOW_PART = 0.05
SNAPSHOTS_AHEAD = 3
"""Snapshots for which there should be room: keeping some means writing the next before the oldest goes."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `mend` is empty where all is well."""

    what: str
    state: State
    found: str
    mend: str = ""

    @property
    def colour(self) -> str:
        return _COLOURS[self.state]

    def line(self) -> str:
        return f"{self.state.value:<8} {self.what:<12} {self.found}" + (f"; {self.mend}" if self.mend else "")

    def to_json(self) -> dict[str, str]:
        return {"what": self.what, "state": self.state.value, "found": self.found, "mend": self.mend}


def disk(place: Path, free_bytes: int, total_bytes: int, snapshot_bytes: int) -> Finding:
    """Whether journal and snapshots have room. `snapshot_bytes` is the size of one, 0 where there is none yet."""
    found = f"{_size(free_bytes)} free of {_size(total_bytes)} at {place}"
    needed = SNAPSHOTS_AHEAD * snapshot_bytes
    if free_bytes <= snapshot_bytes:
        return Finding("disk", State.FAULT, found, f"one snapshot needs {_size(snapshot_bytes)}: free some space")
    if free_bytes < needed:
        mend = f"{SNAPSHOTS_AHEAD} snapshots need {_size(needed)}: free some space, or keep fewer"
        return Finding("disk", State.WARNING, found, mend)
    if free_bytes < min(LOW_BYTES, LOW_PART * total_bytes):
        return Finding("disk", State.WARNING, found, "free some space: a journal that cannot be written stops the job")
    return Finding("disk", State.OK, found)


def clock(ahead_s: float, whose: str) -> Finding:
    """`ahead_s`: how far `whose` clock is before this one's."""
    if abs(ahead_s) <= CLOCK_OFF_S:
        return Finding("clock", State.OK, f"agrees with that of {whose}")
    way = "ahead of" if ahead_s > 0 else "behind"
    mend = "nothing is decided by it, but times in reports are wrong: set it (timedatectl set-ntp true)"
    return Finding("clock", State.WARNING, f"{whose} is {abs(ahead_s):.0f} s {way} this clock", mend)


def certificate(path: Path, name: str, left: timedelta, *, ca: bool) -> Finding:
    again = "make a new authority (gyrectl pki init) and issue all again" if ca else f"gyrectl pki issue {name} --renew"
    if left <= timedelta(0):
        return Finding("certificate", State.FAULT, f"{path} has expired", again)
    if left < EXPIRES_SOON:
        return Finding("certificate", State.WARNING, f"{path} expires in {left.days} days", again)
    return Finding("certificate", State.OK, f"{path} is valid for {left.days} days")


def versions(ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]) -> Finding:
    """(name, version) of gyrectl's and of gyred's."""
    other = [
        f"{name} {theirs_}, here {ours_}"
        for (name, ours_), (_, theirs_) in zip(ours, theirs, strict=True)
        if ours_ != theirs_
    ]
    if other:
        mend = "start it again from this installation (gyrectl stop, gyrectl up JOB --resume)"
        return Finding("versions", State.FAULT, f"gyred has {', '.join(other)}", mend)
    return Finding(
        "versions", State.OK, "gyred and gyrectl: " + ", ".join(f"{name} {version}" for name, version in ours)
    )


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
