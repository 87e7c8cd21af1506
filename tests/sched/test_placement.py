"""Runs go where there is room, once; what a node that is gone had is done again; the core's office changes hands only then."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gyre.ids import CellId, GroupId, NodeId, RunId, TaskId
from gyre.sched.placement import (
    NOWHERE,
    Absence,
    Notice,
    Room,
    anyone_takes,
    choose_core,
    left_by,
    placed,
    taken_up,
)
from gyre.store.records import (
    CellSpecRecord,
    DrainRecord,
    GroupRecord,
    GroupState,
    Purpose,
    Role,
    RunRecord,
    RunState,
)
from gyre.store.typed import Versioned
from gyre.trajectory.records import LineageInfo, LineageRole, Outcome, RunTrace

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
NODES = (A, B, C)


def run(number: int, state: RunState, node: NodeId, attempt: int = 1, failed_on: tuple[NodeId, ...] = ()) -> RunRecord:
    return RunRecord(RunId(f"r{number}"), GroupId("g"), state, attempt, node, None, None, "", None, 0.0, 0.0, failed_on)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[RunRecord], list[Room], set[NodeId], set[NodeId]]:
    """Runs, nodes, those that are gone, and those that drain and are to be empty."""
    there = draw(st.sets(st.sampled_from(NODES)))
    rooms = [Room(node, draw(st.integers(1, 4)), draw(st.booleans())) for node in sorted(there)]
    due = {room.node for room in rooms if room.draining and draw(st.booleans())}
    runs: list[RunRecord] = []
    for number in range(draw(st.integers(0, 12))):
        state = draw(st.sampled_from(RunState))
        where = NODES if state is not RunState.QUEUED else (*NODES, NOWHERE)
        failed_on = tuple(sorted(draw(st.sets(st.sampled_from(NODES)))))
        runs.append(run(number, state, draw(st.sampled_from(where)), failed_on=failed_on))
    gone = draw(st.sets(st.sampled_from([node for node in NODES if node not in there] or [NodeId("d")])))
    return runs, rooms, gone, due


@given(clusters())
def test_what_is_placed_stays_within_the_places_and_nothing_else_moves(
    cluster: tuple[list[RunRecord], list[Room], set[NodeId], set[NodeId]],
) -> None:
    runs, rooms, gone, due = cluster
    before = {each.run: each for each in runs}
    changed = placed(runs, rooms, gone, due)
    assert len({each.run for each in changed}) == len(changed)
    after = {**before, **{each.run: each for each in changed}}
    takers = {room.node: room for room in rooms if not room.draining}
    draining = {room.node for room in rooms if room.draining}
    open_ = [each for each in after.values() if each.state is not RunState.SETTLED]
    given_now = Counter(each.node for each in changed)
    for each in changed:
        was = before[each.run]
        assert was.state is not RunState.SETTLED
        assert each.state is RunState.QUEUED
        assert each.node == NOWHERE or each.node in takers
        assert each.node not in each.failed_on or not takers.keys() - set(each.failed_on)
        if was.state is RunState.LIVE:
            assert was.node in gone or was.node in due, "a live run leaves no node but one that is gone or due"
            assert each.attempt == was.attempt + 1
        else:
            assert each.attempt == was.attempt
    for node in gone:
        assert all(each.node != node for each in open_)
    for node in due:
        stay = [each for each in open_ if each.node == node]
        assert not takers or not stay, "what is due begins again where runs are taken"
        assert takers or stay == [each for each in runs if each.node == node and each.state is RunState.LIVE]
    for node in draining:
        assert all(each.node != node for each in open_ if each.state is RunState.QUEUED)
    if len(takers) > 1:
        held = Counter(each.node for each in open_)
        for node, room in takers.items():
            assert held[node] <= room.max_live or not given_now[node]
        for each in open_:
            able = takers.keys() - set(each.failed_on) or takers.keys()
            assert each.node != NOWHERE or all(held[node] >= takers[node].max_live for node in able)
    elif takers:
        assert all(each.node != NOWHERE for each in open_)
    again = placed([after[each.run] for each in runs], rooms, gone, due)
    assert again == [], "what is placed stays where it is"


def test_what_waits_on_a_lone_node_is_shared_with_one_that_joins() -> None:
    runs = [run(0, RunState.LIVE, A), *(run(number, RunState.QUEUED, A) for number in range(1, 5))]
    assert placed(runs, [Room(A, 2, draining=False)], ()) == []
    changed = placed(runs, [Room(A, 2, draining=False), Room(B, 2, draining=False)], ())
    assert {each.run: each.node for each in changed} == {"r2": B, "r3": B, "r4": NOWHERE}


def test_a_run_begins_again_on_a_node_that_it_has_not_failed_on_while_one_takes_runs() -> None:
    def given_to(failed_on: tuple[NodeId, ...], *rooms: Room) -> list[NodeId]:
        return [each.node for each in placed([run(0, RunState.QUEUED, NOWHERE, 2, failed_on)], rooms, ())]

    wide, narrow = Room(A, 8, draining=False), Room(B, 1, draining=False)
    assert given_to((), wide, narrow) == [A]
    assert given_to((A,), wide, narrow) == [B]
    assert given_to((A, B), wide, narrow) == [A], "it has failed on all of them"
    assert given_to((A,), wide) == [A]
    assert given_to((A,), wide, replace(narrow, draining=True)) == [A]
    assert given_to((A,), wide, Room(B, 0, draining=False)) == [A], "the other takes no runs"
    full = [run(1, RunState.LIVE, B), run(2, RunState.QUEUED, NOWHERE, 2, (A,))]
    assert placed(full, [wide, narrow], ()) == [], "it waits for room there"


def test_a_node_is_gone_when_it_was_away_for_the_grace() -> None:
    absence = Absence(5.0)
    assert absence.look(0.0, {A, B, NOWHERE}, {A}) == frozenset()
    assert absence.look(4.9, {A, B}, {A}) == frozenset()
    assert absence.look(5.0, {A, B}, {A}) == {B}
    assert absence.look(6.0, {A, B}, {A, B}) == frozenset(), "it is back"
    assert absence.look(7.0, {A, B}, {A}) == frozenset(), "and its time away begins anew"
    absence.begin()
    assert absence.look(100.0, {A, B}, {A}) == frozenset(), "another term has seen nothing yet"


def test_a_drain_is_due_when_its_time_is_over_as_this_leader_has_seen_it() -> None:
    def drain(node: NodeId, within_s: float | None, revision: int = 5) -> Versioned[DrainRecord]:
        return Versioned(f"drains/{node}", DrainRecord(node, within_s), revision, revision, 0)

    notice = Notice()
    drains = [drain(A, 600.0), drain(B, None), drain(C, 0.0)]
    assert notice.look(100.0, drains) == {C}, "no time is over at once"
    assert notice.look(699.9, drains) == {C}
    assert notice.look(700.0, drains) == {A, C}
    assert notice.look(701.0, [drain(A, 600.0, revision=9)]) == frozenset(), "ordered anew, it counts anew"
    assert notice.look(1301.0, [drain(A, 600.0, revision=9)]) == {A}
    assert notice.look(9e9, [drain(B, None)]) == frozenset(), "without a time it may take for ever"
    assert notice.look(9e9, [drain(A, 600.0, revision=9)]) == frozenset(), "it was taken away meanwhile"
    assert notice.look(9e9 + 600.0, [drain(A, 600.0, revision=9)]) == {A}
    notice.begin()
    assert notice.look(9e9 + 601.0, [drain(A, 600.0, revision=9)]) == frozenset(), "another term has seen nothing yet"


def test_what_is_due_waits_for_room_elsewhere_and_stays_where_nobody_takes_runs() -> None:
    runs = [run(0, RunState.LIVE, A), run(1, RunState.LIVE, B), run(2, RunState.LIVE, A, attempt=2)]
    due = Room(A, 2, draining=True)
    assert placed(runs, [due, Room(B, 2, draining=False), Room(C, 2, draining=True)], ()) == []
    lone = placed(runs, [due, Room(B, 2, draining=False)], (), {A})
    assert [(each.run, each.node, each.attempt) for each in lone] == [("r0", B, 2), ("r2", B, 3)]
    full = placed(runs, [due, Room(B, 1, draining=False), Room(C, 1, draining=False)], (), {A})
    assert [(each.run, each.node) for each in full] == [("r0", C), ("r2", NOWHERE)]
    for others in ([], [Room(B, 2, draining=True)], [Room(B, 0, draining=False)]):
        assert not anyone_takes([due, *others])
        assert placed(runs, [due, *others], (), {A}) == []


def test_tokens_that_are_gone_with_their_node_are_sampled_again() -> None:
    info = LineageInfo(0, LineageRole.MAIN, 40, 10, 0)
    trace = RunTrace(RunId("r0"), 1, 3, 30, 30, 0, (info,), 0, 0, 0, 0.0, "")
    settled = RunRecord(RunId("r0"), GroupId("g"), RunState.SETTLED, 1, A, Outcome.FINISHED, 1.0, "", trace, 1.0, 2.0)
    elsewhere = RunRecord(RunId("r1"), GroupId("g"), RunState.SETTLED, 1, B, Outcome.FINISHED, 0.5, "", trace, 1.0, 2.0)
    runs = {settled.run: settled, elsewhere.run: elsewhere}
    group = GroupRecord(GroupId("g"), TaskId("t"), Purpose.TRAIN, 0, tuple(runs), GroupState.SETTLED, 0, 0)
    assert left_by({A}, [group], runs) == [(group, [settled])]
    reopened, (again,) = taken_up(group, [settled], {})
    assert reopened.state is GroupState.OPEN
    assert (again.run, again.attempt, again.state, again.reward) == ("r0", 2, RunState.QUEUED, None)
    assert left_by(set(), [group], runs) == []
    for over in (
        GroupRecord(GroupId("g"), TaskId("t"), Purpose.TRAIN, 0, tuple(runs), GroupState.CONSUMED, 0, 1),
        GroupRecord(GroupId("g"), TaskId("t"), Purpose.HELDOUT_AFTER, 0, tuple(runs), GroupState.SETTLED, 0, 0),
    ):
        assert left_by({A}, [over], runs) == []


def test_tokens_that_another_node_has_kept_are_as_they_were_and_are_that_nodes() -> None:
    settled = [run(number, RunState.SETTLED, A) for number in range(2)]
    group = GroupRecord(GroupId("g"), TaskId("t"), Purpose.TRAIN, 0, (), GroupState.SETTLED, 0, 0)
    kept = {each.run: B for each in settled}
    assert taken_up(group, settled, kept) == (group, [replace(each, node=B) for each in settled])
    reopened, (mine, again) = taken_up(group, settled, {RunId("r0"): B})
    assert (reopened.state, mine.node, again.state, again.attempt) == (GroupState.OPEN, B, RunState.QUEUED, 2)


def test_the_core_stays_where_it_is_unless_its_node_is_gone() -> None:
    specs = [CellSpecRecord(CellId(f"{node}-c0"), node, 4) for node in NODES]
    roles = {CellId("b-c0"): Role.ROLLOUT, CellId("c-c0"): Role.TRAIN}
    assert choose_core(CellId("a-c0"), specs[1:], (), A, roles) is None, "it may come back"
    assert choose_core(CellId("a-c0"), specs[1:], {A}, A, roles) == specs[2], "the one that trains"
    assert choose_core(None, specs, (), None, {}) == specs[0]
    assert choose_core(CellId("a-c0"), specs[1:2], {A}, A, {CellId("b-c0"): Role.FAILED}) is None
    assert choose_core(None, [], (), None, {}) is None
