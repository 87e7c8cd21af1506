"""Which node has the copies of another's journals, and when a copy is of no more use: pure."""

from __future__ import annotations

from collections.abc import Collection

from gyre.ids import NodeId
from gyre.store.records import GroupRecord, GroupState, Purpose, RunRecord, RunState


def choose_peer(
    me: NodeId, held: NodeId | None, there: Collection[NodeId], draining: Collection[NodeId]
) -> NodeId | None:
    """The node that has the copies of `me`; None where there is no other.

    `held`, which has them now, keeps them as long as it is there and does not drain. Else it is the next after `me` by
    name, and the first after the last: so each node has about one other's. Nodes that drain are better than none.
    """
    others = sorted(set(there) - {me})
    able = [node for node in others if node not in draining] or others
    if held in able:
        return held
    return next((node for node in able if node > me), able[0] if able else None)


def is_untrained(run: RunRecord, group: GroupRecord | None) -> bool:
    """Whether what a settled run left may still be trained, as far as is known."""
    if run.state is not RunState.SETTLED:
        return False
    return group is None or (group.purpose is Purpose.TRAIN and group.state is not GroupState.CONSUMED)


def is_of_use(writer: NodeId, attempt: int, run: RunRecord | None, group: GroupRecord | None) -> bool:
    """Whether the copy of an attempt may still be needed: it is the run's last, on the node that writes the copy, and it
    lives or is untrained. A run that is not known any more needs none."""
    if run is None or run.attempt != attempt or run.node != writer:
        return False
    return run.state is not RunState.SETTLED or is_untrained(run, group)
