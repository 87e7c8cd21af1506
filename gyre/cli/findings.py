"""What `gyrectl doctor` makes of what it measured: pure, each one finding with the mend where one is needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

from gyre.actors.messages_journals import Copies
from gyre.ids import NodeId
from gyre.store.records import JobState


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


def shared_memory(place: Path, free_bytes: int, wanted_bytes: int) -> Finding:
    """Whether a node's snapshots of other nodes have the room that its file gives them."""
    found = f"{_size(free_bytes)} free at {place}; node.snapshot_memory_mib gives snapshots {_size(wanted_bytes)}"
    if free_bytes < wanted_bytes:
        mend = "what does not fit goes to the disk: make it larger (mount -o remount,size=…, --shm-size), or set less"
        return Finding("shm", State.WARNING, found, mend)
    return Finding("shm", State.OK, found)


def silent(node: NodeId) -> Finding:
    """Of a node of a cluster where nobody listens."""
    mend = f"systemctl start gyred@{node}, or gyred --config with this file; {_journal(node)}, has why it ended"
    return Finding("gyred", State.WARNING, f"{node}'s does not run", mend)


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


def troubles(whys: Mapping[str, str]) -> list[Finding]:
    """`whys`: why each node that is there takes no runs, empty where it does."""
    return [
        Finding("node", State.WARNING, f"{node} gets no runs: {why}", "mend that; it takes runs again by itself")
        for node, why in sorted(whys.items())
        if why
    ]


def absent(job: str, joined: Collection[str], there: Collection[str]) -> list[Finding]:
    """Of a cluster's `job` that has not ended: which nodes had joined, and which of its nodes are there now."""
    if not there:
        mend = "start gyred on its nodes, and see their logs; they go on where they were"
        return [Finding("job", State.FAULT, f"no node works on {job}", mend)]
    mend = "start its gyred, or mend the machine; where it has left for good there is nothing to do"
    return [
        Finding("node", State.WARNING, f"{node} had joined {job} and is not there", mend)
        for node in sorted(set(joined) - set(there))
    ]


def nodes(me: str, whys: Mapping[str, str], *, running: bool) -> list[Finding]:
    """The nodes' troubles, as above. `me` should be there if it is running."""
    found = troubles(whys)
    if running and me not in whys:
        mend = "its log says why; a node that has just begun needs some seconds"
        found.append(Finding("node", State.FAULT, f"{me} runs and is not in the cluster", mend))
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


def gyred_silent(error: str, node: NodeId | None, logs: Path) -> Finding:
    """`node`: of a cluster, the one that it is gyred of; None: of a job that has one node."""
    mend = f"its log says what it is at ({logs / 'gyred.log'}); gyrectl up JOB --resume starts a new one"
    if node is not None:
        mend = f"its log says what it is at ({_journal(node)}); {_kill(node)}, and the next one adopts its children"
    return Finding("gyred", State.FAULT, f"it lives and does not answer: {error}", mend)


def gyred_gone(state: JobState | None, node: NodeId | None, *, fell: bool) -> Finding | None:
    """Of a gyred that does not run: whether it should. `state` is the job's, None where that is not known; `fell`: it was
    not told to end. A lone job that was stopped waits until somebody resumes it."""
    if state in (JobState.FINISHED, JobState.FAILED) or not (fell or (node is not None and state is not None)):
        return None
    if node is None:
        return Finding("gyred", State.FAULT, "it has died, and the job has not ended", "gyrectl up JOB --resume")
    mend = f"systemctl start gyred@{node}, or gyred --config with this node's file; {_journal(node)}, has why it ended"
    return Finding("gyred", State.FAULT, f"{node}'s does not run, and the job has not ended", mend)


def _journal(node: NodeId) -> str:
    return f"journalctl -u gyred@{node}, or where its standard error goes"


def _kill(node: NodeId) -> str:
    return f"systemctl kill -s KILL --kill-who=main gyred@{node} starts another"


def versions(ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]], node: NodeId | None = None) -> Finding:
    """(name, version) of gyrectl's and of gyred's; `node` as in `gyred_silent`."""
    if other := _others(ours, theirs):
        how = "gyrectl stop, gyrectl up JOB --resume" if node is None else f"systemctl restart gyred@{node}"
        return Finding("versions", State.FAULT, f"gyred has {other}", f"start it again from this installation ({how})")
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
