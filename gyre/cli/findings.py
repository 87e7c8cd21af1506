"""What `gyrectl doctor` makes of what it measured: pure, each one finding with the mend where one is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

from gyre.actors.messages_journals import Copies


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


def peers(ours: Sequence[tuple[str, str]], theirs: Mapping[str, Sequence[tuple[str, str]] | str]) -> list[Finding]:
    """`theirs`: by node, the (name, version) that it tells, or why it did not answer. `ours` are gyrectl's."""
    found: list[Finding] = []
    for node, told in sorted(theirs.items()):
        if isinstance(told, str):
            mend = "see that its gyred runs, that its port is open to this node, and gyrectl pki show on both"
            found.append(Finding("peer", State.FAULT, f"{node}: {told}", mend))
        elif other := _others(ours, told):
            mend = "nodes of one cluster run one version: install it there, and start its gyred again"
            found.append(Finding("peer", State.FAULT, f"{node} has {other}", mend))
        else:
            found.append(Finding("peer", State.OK, f"{node} is reached, and has this version"))
    return found


def quota(endpoint: str, alarms: Sequence[str]) -> Finding | None:
    """What etcd raised an alarm for; None where there is none."""
    if not alarms:
        return None
    mend = "compact, defragment, then disarm it (docs/operations.md)"
    return Finding("store", State.FAULT, f"{endpoint}: etcd's alarm {', '.join(alarms)}; it takes no writes", mend)


def checkpoints(folder: Path | None, nodes: int, *, there: bool) -> Finding | None:
    """Whether another node could go on from the core's checkpoints. `folder` is what the job names."""
    if folder is None:
        if nodes < 2:
            return None
        mend = "name a folder that all nodes reach (checkpoint.dir)"
        return Finding("checkpoints", State.WARNING, "if the core's node dies, AdamW's state begins anew", mend)
    if not there:
        return Finding("checkpoints", State.FAULT, f"{folder} is not there", "mount it on this node")
    return Finding("checkpoints", State.OK, f"are kept in {folder}")


def copies(stand: Copies, nodes: int) -> Finding | None:
    """Whether this node's journals have a copy, which its death does not take along. Nothing where it is alone."""
    if nodes < 2 or not (stand.peer or stand.why):
        return None
    if not stand.why:
        but = f", but for {_size(stand.behind_bytes)} on the way" if stand.behind_bytes else ""
        return Finding("copies", State.OK, f"{stand.peer} has this node's journals{but}")
    lacks = f"{stand.peer or 'every other node'} lacks {_size(stand.behind_bytes)} of this node's journals"
    mend = "mend that node or the network: until then this node's death loses them"
    return Finding("copies", State.WARNING, f"{lacks}: {stand.why}", mend)


def versions(ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]) -> Finding:
    """(name, version) of gyrectl's and of gyred's."""
    if other := _others(ours, theirs):
        mend = "start it again from this installation (gyrectl stop, gyrectl up JOB --resume)"
        return Finding("versions", State.FAULT, f"gyred has {other}", mend)
    return Finding(
        "versions", State.OK, "gyred and gyrectl: " + ", ".join(f"{name} {version}" for name, version in ours)
    )


def _others(ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]) -> str:
    return ", ".join(
        f"{name} {theirs_}, here {ours_}"
        for (name, ours_), (_, theirs_) in zip(ours, theirs, strict=True)
        if ours_ != theirs_
    )


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
