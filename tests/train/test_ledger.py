"""The ledger: every micro-step's sums enter the batch exactly once, whatever the cells do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gyre.actors.messages_replica import MicroStep
from gyre.errors import BadInput
from gyre.ids import CellId, MicroStepId
from gyre.train.ledger import Ledger

A, B = CellId("a"), CellId("b")
VERSION = 7


def micro_step(name: str, version: int = VERSION, step: int = 8, tokens: int = 100) -> MicroStep:
    return MicroStep(MicroStepId(name), step, version, (), tokens)


def ledger(*names: str) -> Ledger:
    made = Ledger(step=8, version=VERSION)
    made.add(micro_step(name) for name in names)
    return made


def ids(*names: str) -> tuple[MicroStepId, ...]:
    return tuple(MicroStepId(name) for name in names)


def claimed(made: Ledger, cell: CellId, now_s: float = 0.0, deadline_s: float = 60.0) -> str | None:
    work = made.claim(cell, now_s, deadline_s)
    return None if work is None else work.micro_step


def test_micro_steps_are_claimed_in_the_order_they_came_and_once_each() -> None:
    made = ledger("1", "2")
    assert [claimed(made, A), claimed(made, B), claimed(made, A)] == ["1", "2", None]


def test_a_batch_is_complete_when_it_is_closed_and_all_is_merged() -> None:
    made = ledger("1")
    claimed(made, A)
    assert made.shipped("t1", A, ids("1"), VERSION)
    assert not made.complete, "more groups may still settle"
    made.add([micro_step("2")])
    made.close()
    assert not made.complete
    claimed(made, B)
    assert made.shipped("t2", B, ids("2"), VERSION)
    assert made.complete
    assert made.cells == (A, B)


def test_an_empty_batch_is_complete_once_closed() -> None:
    made = ledger()
    assert not made.complete
    made.close()
    assert made.complete


def test_a_transfer_is_accepted_once() -> None:
    made = ledger("1")
    claimed(made, A)
    assert made.shipped("t", A, ids("1"), VERSION)
    assert not made.shipped("t", A, ids("1"), VERSION)
    assert made.merged == 1


def test_sums_of_another_version_are_refused_and_their_work_waits_again() -> None:
    made = ledger("1")
    claimed(made, A)
    assert not made.shipped("t", A, ids("1"), VERSION - 1)
    assert claimed(made, B) == "1"


def test_a_shipment_with_one_lost_claim_is_refused_whole_and_the_rest_of_it_waits_again() -> None:
    made = ledger("1", "2")
    claimed(made, A, now_s=0, deadline_s=10)
    assert made.expire(now_s=10) == ids("1")
    claimed(made, B, now_s=10)
    claimed(made, A, now_s=10)
    assert made.held(A) == ids("2")
    assert "1" in made.refusal("t", A, ids("1", "2"), VERSION)
    assert not made.shipped("t", A, ids("1", "2"), VERSION)
    assert made.held(A) == ()
    assert made.held(B) == ids("1"), "the claim of another cell is not touched"
    assert claimed(made, B, now_s=11) == "2"


def test_a_cell_that_dies_gives_its_unmerged_work_back_in_its_old_place() -> None:
    made = ledger("1", "2", "3")
    claimed(made, A)
    claimed(made, A)
    assert made.shipped("t", A, ids("1"), VERSION)
    assert made.forfeit(A) == ids("2")
    assert [claimed(made, B), claimed(made, B)] == ["2", "3"]


def test_a_late_shipment_of_a_cell_thought_dead_is_refused() -> None:
    made = ledger("1")
    claimed(made, A)
    made.forfeit(A)
    claimed(made, B)
    assert not made.shipped("t", A, ids("1"), VERSION)
    assert made.shipped("u", B, ids("1"), VERSION)


def test_claiming_more_renews_what_the_cell_already_holds() -> None:
    made = ledger("1", "2")
    claimed(made, A, now_s=0, deadline_s=10)
    claimed(made, A, now_s=9, deadline_s=10)
    assert made.expire(now_s=18) == ()
    assert made.expire(now_s=19) == ids("1", "2")


def test_when_the_core_lost_its_sums_all_merged_work_waits_again_and_other_cells_keep_theirs() -> None:
    made = ledger("1", "2")
    claimed(made, A)
    claimed(made, B)
    assert made.shipped("t", A, ids("1"), VERSION)
    assert made.restart() == ids("1")
    assert made.merged == 0
    assert made.held(B) == ids("2")
    assert not made.shipped("t", A, ids("1"), VERSION), "the sums of an old transfer are gone"
    assert claimed(made, A) == "1"


@pytest.mark.parametrize(
    "refused",
    [micro_step("1"), micro_step("2", version=VERSION + 1), micro_step("2", step=9)],
    ids=["known", "another version", "another step"],
)
def test_a_micro_step_that_does_not_belong_is_refused(refused: MicroStep) -> None:
    with pytest.raises(BadInput):
        ledger("1").add([refused])


def test_nothing_is_added_to_a_closed_batch() -> None:
    made = ledger("1")
    made.close()
    with pytest.raises(BadInput, match="closed"):
        made.add([micro_step("2")])


@pytest.mark.parametrize("shipment", [(), ("1", "1"), ("unknown",)])
def test_a_shipment_that_names_nothing_something_twice_or_something_unknown_is_refused(
    shipment: tuple[str, ...],
) -> None:
    made = ledger("1")
    claimed(made, A)
    assert not made.shipped("t", A, ids(*shipment), VERSION)


def test_the_work_that_waits_is_measured_in_tokens() -> None:
    made = Ledger(8, VERSION)
    made.add([micro_step("1", tokens=30), micro_step("2", tokens=12)])
    claimed(made, A)
    assert (made.total, made.waiting, made.waiting_tokens) == (2, 1, 12)


class Faults(RuleBasedStateMachine):
    """Cells that claim, ship (also late, twice, or what they no longer hold), hang and die; the core too.

    `sums` is what the core's replica would have merged, as counts of each micro-step.
    """

    @initialize(count=st.integers(0, 6))
    def start(self, count: int) -> None:
        self.ledger = Ledger(8, VERSION)
        self.ledger.add(micro_step(str(place)) for place in range(count))
        self.now_s = 0.0
        self.own: dict[str, list[MicroStepId]] = {name: [] for name in "abc"}
        self.sums: Counter[MicroStepId] = Counter()
        self.transfers = 0

    cells = st.sampled_from("abc")

    @rule(cell=cells)
    def claim(self, cell: str) -> None:
        work = self.ledger.claim(CellId(cell), self.now_s, 10.0)
        if work is not None:
            self.own[cell].append(work.micro_step)

    @rule(cell=cells, transfer=st.integers(0, 3), again=st.booleans())
    def ship(self, cell: str, transfer: int, again: bool) -> None:
        name = f"{cell}{transfer}" if again else f"new{self.transfers}"
        self.transfers += 1
        shipment = tuple(self.own[cell])
        if self.ledger.shipped(name, CellId(cell), shipment, VERSION):
            self.sums.update(shipment)
        self.own[cell].clear()

    @rule(cell=cells)
    def ship_and_be_heard_twice(self, cell: str) -> None:
        shipment, name = tuple(self.own[cell]), f"twice{self.transfers}"
        self.transfers += 1
        for _ in range(2):
            if self.ledger.shipped(name, CellId(cell), shipment, VERSION):
                self.sums.update(shipment)
        self.own[cell].clear()

    @rule(cell=cells, known=st.booleans())
    def die(self, cell: str, known: bool) -> None:
        self.own[cell].clear()
        if known:
            self.ledger.forfeit(CellId(cell))

    @rule(cell=cells)
    def be_given_up_and_go_on(self, cell: str) -> None:
        self.ledger.forfeit(CellId(cell))

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.expire(self.now_s)

    @rule()
    def lose_the_cores_sums(self) -> None:
        self.sums.clear()
        self.ledger.restart()

    @invariant()
    def nothing_is_merged_twice_and_the_count_is_right(self) -> None:
        if hasattr(self, "ledger"):
            assert all(times == 1 for times in self.sums.values())
            assert self.ledger.merged == len(self.sums)

    def teardown(self) -> None:
        """Whatever happened, one good cell can finish the batch."""
        if not hasattr(self, "ledger"):
            return
        self.now_s += 100.0
        self.own = {name: [] for name in "abc"}
        while (work := self.ledger.claim(CellId("good"), self.now_s, 10.0)) is not None:
            self.own["a"].append(work.micro_step)
        shipment = tuple(self.own["a"])
        if shipment:
            assert self.ledger.shipped("last", CellId("good"), shipment, VERSION)
            self.sums.update(shipment)
        self.ledger.close()
        assert self.ledger.complete
        assert sorted(self.sums.elements()) == sorted(str(place) for place in range(self.ledger.total))


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(5)), st.lists(st.sampled_from("ab"), min_size=5, max_size=5))
def test_any_order_of_shipping_completes_the_batch(order: list[int], cells: list[str]) -> None:
    made = ledger(*"01234")
    for cell in cells:
        claimed(made, CellId(cell))
    for place in order:
        assert made.shipped(f"t{place}", CellId(cells[place]), ids(str(place)), VERSION)
    made.close()
    assert made.complete
