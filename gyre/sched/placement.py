"""Which node a run is given to, and what becomes of the runs of a node that is gone: pure, from the job's records.

A node is given as many runs as it has live at a time; the rest waits without a node, so that no run waits for hours behind
others while a node is free. A lone node is given all of them: it need not ask for its next, and what waits there is
taken back when another node joins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gyre.ids import CellId, NodeId, RunId
from gyre.store.records import CellSpecRecord, DrainRecord, GroupRecord, GroupState, Purpose, Role, RunRecord, RunState
from gyre.store.typed import Versioned

NOWHERE = NodeId("")


@dataclass(frozen=True)
class Room:
    """A node that is there."""

    node: NodeId
    max_live: int
    draining: bool


class Absence:
    """Nodes that are gone for good: those that have been away for `grace_s`, as far as this leader has seen."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since_s: dict[NodeId, float] = {}

    def look(self, now_s: float, known: Collection[NodeId], there: Collection[NodeId]) -> frozenset[NodeId]:
        away = {node for node in known if node not in there and node != NOWHERE}
        self._since_s = {node: self._since_s.get(node, now_s) for node in away}
        return frozenset(node for node, since_s in self._since_s.items() if now_s - since_s >= self._grace_s)

    def begin(self) -> None:
        """A new term of the leader: what was seen before it says nothing."""
        self._since_s.clear()


class Notice:
    """Nodes that were to be empty by now: those that drain, with a time that is over as far as this leader has seen."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[NodeId, int], float] = {}
        """By the drain's revision too: one that is ordered anew counts anew."""

    def look(self, now_s: float, drains: Iterable[Versioned[DrainRecord]]) -> frozenset[NodeId]:
        timed = {
            (drain.record.node, drain.mod_revision): within_s
            for drain in drains
            if (within_s := drain.record.within_s) is not None
        }
        self._since_s = {drain: self._since_s.get(drain, now_s) for drain in timed}
        return frozenset(drain[0] for drain, since_s in self._since_s.items() if now_s - since_s >= timed[drain])

    def begin(self) -> None:
        """A new term of the leader: it cannot know how long others have waited, and waits as long again."""
        self._since_s.clear()


def placed(
    runs: Sequence[RunRecord], rooms: Sequence[Room], gone: Collection[NodeId], due: Collection[NodeId] = ()
) -> list[RunRecord]:
    """The runs that change, as they are then: given to a node, or to none for now. `runs` are in launch order.

    A run that was live on a node that is gone begins its next attempt. One that lives on a draining node ends there,
    unless the node is `due` to be empty and there is one that takes runs: then it begins its next attempt too.
    A run is given to no node that it has failed on, as long as one takes runs that it has not.
    """
    open_ = [run for run in runs if run.state is not RunState.SETTLED]
    takers = [room for room in rooms if not room.draining]
    draining = {room.node for room in rooms if room.draining}
    had = Counter(run.node for run in open_)
    lone = len(takers) == 1
    free = {room.node: len(open_) if lone else room.max_live - had[room.node] for room in takers}
    surplus = Counter({node: -left for node, left in free.items() if left < 0})
    taking = {room.node for room in takers if room.max_live}
    behind: set[RunId] = set()
    for run in reversed(open_):
        if run.state is RunState.QUEUED and surplus[run.node] > 0:
            surplus[run.node] -= 1
            behind.add(run.run)
    changed: list[RunRecord] = []
    for run in open_:
        left = run.node in gone or (run.state is RunState.LIVE and run.node in due and anyone_takes(rooms))
        leaves = run.state is RunState.QUEUED and (run.node in draining or run.run in behind)
        if not (left or leaves or run.node == NOWHERE):
            continue
        able = sorted(taking.difference(run.failed_on)) or sorted(free)
        node = max(able, key=lambda name: free[name], default=NOWHERE)
        if node != NOWHERE and free[node] > 0:
            free[node] -= 1
        else:
            node = NOWHERE
        if node != run.node:
            attempt = run.attempt + 1 if left and run.state is RunState.LIVE else run.attempt
            changed.append(replace(run, node=node, state=RunState.QUEUED, attempt=attempt))
    return changed


def anyone_takes(rooms: Iterable[Room]) -> bool:
    """Whether a run that leaves its node has anywhere to go, at once or when there is room."""
    return any(room.max_live and not room.draining for room in rooms)


def left_by(
    gone: Collection[NodeId], groups: Sequence[GroupRecord], runs: Mapping[RunId, RunRecord]
) -> list[tuple[GroupRecord, list[RunRecord]]]:
    """Training groups that are not trained yet, with the settled runs whose tokens lay on a node that is gone."""
    found: list[tuple[GroupRecord, list[RunRecord]]] = []
    for group in groups:
        if group.purpose is not Purpose.TRAIN or group.state is GroupState.CONSUMED:
            continue
        left = [
            run
            for name in group.runs
            if (run := runs.get(name)) is not None
            and run.state is RunState.SETTLED
            and run.node in gone
            and run.trace is not None
            and run.trace.lineages
        ]
        if left:
            found.append((group, left))
    return found


def taken_up(
    group: GroupRecord, left: Sequence[RunRecord], kept: Mapping[RunId, NodeId]
) -> tuple[GroupRecord, list[RunRecord]]:
    """The group and those runs as they are then. A run that a node has kept is that node's, and else as it was; the
    others are queued for their next attempt, and their group is open."""
    runs = [
        replace(run, node=kept[run.run])
        if run.run in kept
        else replace(
            run,
            state=RunState.QUEUED,
            attempt=run.attempt + 1,
            node=NOWHERE,
            outcome=None,
            reward=None,
            reason="",
            trace=None,
        )
        for run in left
    ]
    again = any(run.state is RunState.QUEUED for run in runs)
    return replace(group, state=GroupState.OPEN if again else group.state), runs


def choose_core(
    held: CellId | None,
    there: Sequence[CellSpecRecord],
    gone: Collection[NodeId],
    node_of_held: NodeId | None,
    roles: Mapping[CellId, Role],
) -> CellSpecRecord | None:
    """The cell that is to become the core; None: the one that is stays, or there is none to take over.

    The office is only taken from a cell whose node is gone. One that trains takes over before one that serves, for its
    replica holds the parameters already.
    """
    if held is not None and node_of_held not in gone:
        return None
    able = [spec for spec in there if roles.get(spec.cell) is not Role.FAILED and spec.node not in gone]
    return min(able, key=lambda spec: (roles.get(spec.cell) is not Role.TRAIN, spec.cell), default=None)


def in_batches(runs: Sequence[RunRecord], most: int = 60) -> list[Sequence[RunRecord]]:
    """As many as one transaction of the store takes."""
    return [runs[start : start + most] for start in range(0, len(runs), most)]
