"""Who is served next and where: what the gateway promises of its queue and its routing, over any course of events."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre.actors.messages import EngineRoute, SetRoutes
from gyre.ids import CellId, GroupId, RunId
from gyre.proxy.prefix_index import MARK_TOKENS, MARKS_PER_CELL, PrefixIndex, marks_of
from gyre.proxy.routing import OVERBOOKING, UNEVEN, choose, open_engines
from gyre.proxy.sampling import Cached
from gyre.proxy.seating import Seating
from gyre.proxy.turns import next_up

A, B, C = CellId("a"), CellId("b"), CellId("c")
SLOTS = 8
RUN = RunId("r")


def route(cell: CellId, version: int = 3, accepting: bool = True, slots: int = SLOTS) -> EngineRoute:
    return EngineRoute(cell, f"http://{cell}", version, accepting, slots)


def engines(*cells: CellId) -> dict[CellId, EngineRoute]:
    return {cell: route(cell) for cell in cells}


# ------------------------------------------------------------------------------------------ where to


def test_an_engine_is_open_only_if_it_accepts_at_the_authoritative_version_and_is_not_closed() -> None:
    routes = [route(A), route(B, version=2), route(C, accepting=False), route(CellId("d"))]
    assert set(open_engines(routes, 3, {CellId("d")})) == {A}
    assert open_engines(routes, 4, ()) == {}


def test_a_run_stays_where_its_prefix_is_while_that_has_a_slot_for_it() -> None:
    assert choose(engines(A, B), {}, B, {}) == B
    assert choose(engines(A, B), {B: SLOTS - 1}, B, {}) == B


def test_without_a_slot_it_goes_to_an_engine_that_is_emptier_by_more_than_a_quarter_of_its_slots() -> None:
    assert choose(engines(A, B), {A: SLOTS - 2, B: SLOTS}, B, {}) == B
    assert choose(engines(A, B), {A: SLOTS - 3, B: SLOTS}, B, {}) == A


def test_a_new_run_goes_to_the_emptiest_engine_or_to_one_about_as_empty_that_has_its_beginning() -> None:
    assert choose(engines(A, B), {A: 1}, None, {}) == B
    assert choose(engines(A, B), {A: 2}, None, {A: 640}) == A
    assert choose(engines(A, B), {A: 3}, None, {A: 640}) == B
    assert choose(engines(A, B, C), {}, None, {B: 64, C: 640}) == C


def test_an_engine_takes_no_more_than_twice_its_slots() -> None:
    full = {A: SLOTS * OVERBOOKING, B: SLOTS * OVERBOOKING}
    assert choose(engines(A, B), full, A, {A: 640}) is None
    assert choose(engines(A, B), {**full, B: SLOTS * OVERBOOKING - 1}, A, {}) == B
    assert choose({}, {}, A, {}) is None


loads = st.fixed_dictionaries({cell: st.integers(0, 2 * SLOTS) for cell in (A, B, C)})


@given(loads, st.sampled_from([A, B, C]))
def test_an_engine_that_joins_draws_no_run_from_one_that_has_a_slot_for_it(
    load: dict[CellId, int], home: CellId
) -> None:
    before = choose(engines(A, B, C), load, home, {})
    after = choose({**engines(A, B, C), CellId("new"): route(CellId("new"))}, load, home, {})
    if after != before:
        assert after == "new"
        assert load[home] >= SLOTS


@given(loads, st.sampled_from([A, B, C]), st.sampled_from([A, B, C]))
def test_an_engine_that_leaves_moves_no_run_of_another_that_has_a_slot_for_it(
    load: dict[CellId, int], home: CellId, leaving: CellId
) -> None:
    there = engines(A, B, C)
    if home != leaving and load[home] < SLOTS:
        assert choose(there, load, home, {}) == home
        del there[leaving]
        assert choose(there, load, home, {}) == home


# ------------------------------------------------------------------------------------------ which prefixes are where


def test_the_longest_beginning_that_a_cell_has_is_found() -> None:
    index = PrefixIndex()
    one, other = array("i", range(400)), array("i", [*range(200), *range(900, 1100)])
    index.add(A, marks_of(one))
    assert index.held(marks_of(one), [A, B]) == {A: 400 // MARK_TOKENS * MARK_TOKENS}
    assert index.held(marks_of(other), [A, B]) == {A: 200 // MARK_TOKENS * MARK_TOKENS}
    assert index.held((), [A]) == {}
    index.forget(A)
    assert index.held(marks_of(one), [A]) == {}


def test_what_is_known_of_a_cell_is_bounded_and_what_was_used_last_stays() -> None:
    index = PrefixIndex()
    index.add(A, [b"kept"])
    for number in range(MARKS_PER_CELL):
        index.add(A, [b"%d" % number])
        index.add(A, [b"kept"])
    assert index.held([b"kept"], [A]) == {A: MARK_TOKENS}
    assert index.held([b"0"], [A]) == {}


# ------------------------------------------------------------------------------------------ whose turn


@dataclass(eq=False)
class Caller:
    asked: int
    group: GroupId
    run: RunId = RUN
    cached: Cached | None = None
    marks: tuple[bytes, ...] = ()


callers = st.lists(st.sampled_from("xyz"), max_size=30).map(
    lambda groups: [Caller(asked, GroupId(group)) for asked, group in enumerate(groups)]
)


def order_of(waiting: list[Caller]) -> list[Caller]:
    served: dict[GroupId, int] = {}
    order: list[Caller] = []
    waiting = list(waiting)
    while (caller := next_up(waiting, served)) is not None:
        waiting.remove(caller)
        order.append(caller)
        served[caller.group] = len(order)
    return order


@given(callers)
def test_in_a_group_whoever_waited_longest_is_served_first(waiting: list[Caller]) -> None:
    order = order_of(waiting)
    assert len(order) == len(waiting)
    for group in "xyz":
        mine = [caller.asked for caller in order if caller.group == group]
        assert mine == sorted(mine)


@given(callers)
def test_groups_share_in_turn(waiting: list[Caller]) -> None:
    order = order_of(waiting)
    left = Counter(caller.group for caller in waiting)
    since: Counter[GroupId] = Counter()
    for caller in order:
        # Nobody is served twice while another group waits that was not served meanwhile.
        for group in left:
            if left[group] and group != caller.group:
                since[group] += 1
                assert since[group] <= len({caller.group for caller in waiting}) - 1
        since[caller.group] = 0
        left[caller.group] -= 1


def test_without_anybody_waiting_nobody_is_next() -> None:
    assert next_up([], {}) is None


# ------------------------------------------------------------------------------------------ any course of events


class Course(RuleBasedStateMachine):
    """Cells join, leave, change their weights, fail; calls ask, leave, give up."""

    CELLS = (A, B, C)

    def __init__(self) -> None:
        super().__init__()
        self.seating = Seating()
        self.version = 0
        self.there: dict[CellId, EngineRoute] = {}
        self.closed: set[CellId] = set()
        self.waiting: list[Caller] = []
        self.sitting: dict[Caller, CellId] = {}
        self.homes: dict[RunId, CellId] = {}
        self.count = 0

    def told(self) -> None:
        self.closed -= {cell for cell, route in self.there.items() if route.accepting}
        self.closed &= set(self.there)
        self.seating.set_routes(SetRoutes(self.version, tuple(self.there.values())))
        self.seat()

    def seat(self) -> None:
        while (found := self.seating.seat_next()) is not None:
            caller, cell = found
            assert isinstance(caller, Caller)
            route = self.there[cell]
            assert route.accepting
            assert route.version == self.version
            assert cell not in self.closed
            assert caller in self.waiting
            assert caller not in self.sitting
            in_flight = Counter(self.sitting.values())
            home = self.homes.get(caller.run)
            if home in self.seating.open() and in_flight[home] < self.there[home].slots:
                assert cell == home
            self.waiting.remove(caller)
            self.sitting[caller] = cell
            self.homes[caller.run] = cell

    @rule(cell=st.sampled_from(CELLS), slots=st.integers(1, 3), behind=st.booleans(), accepting=st.booleans())
    def a_cell_joins(self, cell: CellId, slots: int, behind: bool, accepting: bool) -> None:
        self.there[cell] = route(cell, self.version - behind, accepting, slots)
        self.told()

    @rule(cell=st.sampled_from(CELLS))
    def a_cell_leaves(self, cell: CellId) -> None:
        self.seating.close(cell)
        self.closed.add(cell)

    @rule(cell=st.sampled_from(CELLS))
    def a_cell_is_gone(self, cell: CellId) -> None:
        self.there.pop(cell, None)
        self.told()

    @rule()
    def the_weights_change(self) -> None:
        self.version += 1
        self.told()

    @rule(cell=st.sampled_from(CELLS))
    def an_engine_fails_a_call(self, cell: CellId) -> None:
        self.seating.suspect(cell)
        self.seat()
        self.seating.forgive(cell)
        self.seat()

    @rule(run=st.integers(0, 5))
    def a_call_asks(self, run: int) -> None:
        self.count += 1
        caller = Caller(self.count, GroupId(f"g{run % 2}"), RunId(f"r{run}"))
        self.waiting.append(caller)
        self.seating.ask(caller)
        self.seat()

    @precondition(lambda self: self.sitting)
    @rule(place=st.integers(0))
    def a_call_leaves(self, place: int) -> None:
        caller = list(self.sitting)[place % len(self.sitting)]
        del self.sitting[caller]
        self.seating.leave(caller)
        self.seating.leave(caller)
        self.seat()

    @precondition(lambda self: self.waiting)
    @rule(place=st.integers(0))
    def a_call_gives_up(self, place: int) -> None:
        self.seating.withdraw(self.waiting.pop(place % len(self.waiting)))
        self.seat()

    @invariant()
    def the_books_are_right(self) -> None:
        in_flight = Counter(self.sitting.values())
        assert {cell: count for cell, count in self.seating.in_flight().items() if count} == dict(in_flight)
        assert self.seating.waiting == len(self.waiting)

    @invariant()
    def nobody_waits_while_an_open_engine_has_room(self) -> None:
        in_flight = Counter(self.sitting.values())
        for cell, open_ in self.seating.open().items():
            assert not self.waiting or in_flight[cell] >= open_.slots * OVERBOOKING


Course.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCourse = Course.TestCase


def test_a_prefix_that_must_be_kept_goes_where_the_run_will_go_and_runs_are_spread() -> None:
    seating = Seating()
    seating.set_routes(SetRoutes(3, (route(A), route(B), route(C))))
    seating.close(A)
    kept = [seating.rest(RunId(f"r{number}"), A) for number in range(4)]
    assert Counter(kept) == {B: 2, C: 2}
    assert [seating.rest(RunId(f"r{number}"), A) for number in range(4)] == kept
    caller = Caller(1, GroupId("g"), RunId("r0"))
    seating.ask(caller)
    assert seating.seat_next() == (caller, kept[0])
    seating.forget(RunId("r1"))
    assert seating.rest(RunId("r1"), A) in (B, C)


def test_a_call_goes_where_its_own_prefix_is_rather_than_where_its_run_was_last() -> None:
    seating = Seating()
    seating.set_routes(SetRoutes(3, (route(A), route(B))))
    for asked, cached, expected in ((1, None, A), (2, Cached(B, 3, 100), B), (3, None, B), (4, Cached(A, 2, 100), B)):
        caller = Caller(asked, GroupId("g"), cached=cached)
        seating.ask(caller)
        assert seating.seat_next() == (caller, expected)
        seating.leave(caller)


def test_what_a_cell_computed_is_forgotten_with_its_weights() -> None:
    seating = Seating()
    seating.set_routes(SetRoutes(3, (route(A), route(B))))
    marks = (b"one", b"two")
    first = Caller(1, GroupId("g"), RunId("first"), marks=marks)
    seating.ask(first)
    assert seating.seat_next() == (first, A)
    seating.computed(first, A, 3)
    second = Caller(2, GroupId("g"), RunId("second"), marks=marks)
    seating.ask(second)
    assert seating.seat_next() == (second, A)
    seating.set_routes(SetRoutes(4, (route(A, version=4), route(B, version=4))))
    third = Caller(3, GroupId("g"), RunId("third"), marks=marks)
    seating.ask(third)
    assert seating.seat_next() == (third, B)


def test_a_call_that_sits_cannot_ask_for_another_seat() -> None:
    seating = Seating()
    seating.set_routes(SetRoutes(3, (route(A), route(B))))
    caller = Caller(1, GroupId("g"))
    seating.ask(caller)
    assert seating.seat_next() is not None
    with pytest.raises(AssertionError):
        seating.ask(caller)


def test_how_uneven_engines_may_be_is_a_share_of_their_slots() -> None:
    wide = {cell: route(cell, slots=100) for cell in (A, B)}
    assert choose(wide, {B: 100 // UNEVEN}, None, {B: 64}) == B
    assert choose(wide, {B: 100 // UNEVEN + 1}, None, {B: 64}) == A
