"""A node's copies stay with one peer while it can have them; a copy stays as long as somebody may need it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre.ids import GroupId, NodeId, RunId, TaskId
from gyre.sched.copies import choose_peer, is_of_use, is_untrained
from gyre.store.records import GroupRecord, GroupState, Purpose, RunRecord, RunState

NODES = [NodeId(name) for name in "abcdef"]
SOME = st.sets(st.sampled_from(NODES))


@given(me=st.sampled_from(NODES), held=st.none() | st.sampled_from(NODES), there=SOME, draining=SOME)
def test_the_peer_is_another_node_that_is_there_and_stays_while_it_can(
    me: NodeId, held: NodeId | None, there: set[NodeId], draining: set[NodeId]
) -> None:
    peer = choose_peer(me, held, there, draining)
    others = there - {me}
    able = others - draining
    assert (peer is None) == (not others)
    assert peer is None or peer in (able or others)
    assert peer == choose_peer(me, held, there, draining)
    if held in able:
        assert peer == held
    if peer is not None:
        assert choose_peer(me, peer, there | {NodeId("g")}, draining) == peer or peer in draining


@given(there=st.sets(st.sampled_from(NODES), min_size=2))
def test_each_node_has_one_others_copies_where_none_was_chosen_before(there: set[NodeId]) -> None:
    assert {choose_peer(me, None, there, ()) for me in there} == there


def run(state: RunState, node: str = "a", attempt: int = 2) -> RunRecord:
    return RunRecord(RunId("r"), GroupId("g"), state, attempt, NodeId(node), None, None, "", None, 0.0, 0.0)


def group(state: GroupState, purpose: Purpose = Purpose.TRAIN) -> GroupRecord:
    return GroupRecord(GroupId("g"), TaskId("t"), purpose, 0, (RunId("r"),), state, 0, 0)


def test_a_copy_is_of_use_until_its_run_is_trained_or_another_attempt_or_node_has_it() -> None:
    a = NodeId("a")
    for state in (RunState.LIVE, RunState.SETTLED):
        assert is_of_use(a, 2, run(state), group(GroupState.OPEN))
        assert not is_of_use(a, 1, run(state), group(GroupState.OPEN)), "a later attempt has begun"
        assert not is_of_use(a, 2, run(state, node="b"), group(GroupState.OPEN)), "another node has it now"
    assert is_of_use(a, 2, run(RunState.SETTLED), group(GroupState.SETTLED))
    assert not is_of_use(a, 2, run(RunState.SETTLED), group(GroupState.CONSUMED)), "it is trained"
    assert not is_of_use(a, 2, run(RunState.SETTLED), group(GroupState.SETTLED, Purpose.HELDOUT_AFTER))
    assert is_of_use(a, 2, run(RunState.LIVE), group(GroupState.OPEN, Purpose.HELDOUT_AFTER))
    assert not is_of_use(a, 2, None, None), "nobody knows it"


def test_what_is_not_known_to_be_trained_counts_as_untrained() -> None:
    assert is_untrained(run(RunState.SETTLED), None)
    assert not is_untrained(run(RunState.LIVE), None)
