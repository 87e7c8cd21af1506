"""Which cells train: the rule, its bounds, and what it makes of a job like the quickstart's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.ids import CellId
from gyre.sched.policy import CellView, ClusterView, PolicyParams, RolePlan, decide
from gyre.store.records import Role

PARAMS = PolicyParams()
CORE = CellId("c0")


def cells(count: int, *, training: int = 0, slots: int = 4) -> tuple[CellView, ...]:
    """Cells c0 (the core), c1, …, of which the first `training` train."""
    roles = [Role.TRAIN if n < training else Role.ROLLOUT for n in range(count)]
    return tuple(CellView(CellId(f"c{n}"), n == 0, role, role, slots) for n, role in enumerate(roles))


VIEW = ClusterView(
    cells=cells(2),
    queued=0,
    live=0,
    ready_runs=0,
    ready_tokens=0,
    later_tokens=0,
    batch_complete=False,
    step_waits=False,
    batch_runs=64,
    staleness=0,
)
MEASURED = replace(
    VIEW, train_tokens_s=4000, rollout_tokens_s=400, run_train_tokens=150, run_sampled_tokens=60, switch_s=0.5
)


def trainers(plan: RolePlan) -> set[CellId]:
    return {cell for cell, role in plan.desired.items() if role is Role.TRAIN}


def ready(view: ClusterView, runs: int) -> ClusterView:
    return replace(view, ready_runs=runs, ready_tokens=150 * runs)


# ---------------------------------------------------------------------------------------------- the rule, by example


@pytest.mark.parametrize("view", [VIEW, MEASURED], ids=["nothing measured yet", "measured"])
class TestTwoCellsOfFourSlots:
    def test_all_serve_while_nothing_is_ready(self, view: ClusterView) -> None:
        assert trainers(decide(replace(view, queued=56, live=8), PARAMS)) == set()
        assert trainers(decide(replace(view, queued=0, live=3), PARAMS)) == set()
        assert trainers(decide(view, PARAMS)) == set()

    def test_a_little_that_is_ready_early_does_not_take_a_cell_from_the_queue(self, view: ClusterView) -> None:
        assert trainers(decide(ready(replace(view, queued=40, live=8), 8), PARAMS)) == set()

    def test_the_core_trains_when_one_cell_carries_the_water_level(self, view: ClusterView) -> None:
        assert trainers(decide(ready(replace(view, live=4), 32), PARAMS)) == {CORE}

    def test_it_stays_while_the_tail_still_settles_groups(self, view: ClusterView) -> None:
        there = replace(view, cells=cells(2, training=1), live=2)
        assert trainers(decide(ready(there, 8), PARAMS)) == {CORE}

    def test_the_satellite_serves_as_long_as_one_run_lives(self, view: ClusterView) -> None:
        assert trainers(decide(ready(replace(view, live=1), 63), PARAMS)) == {CORE}

    def test_only_the_core_waits_for_the_optimizer_step(self, view: ClusterView) -> None:
        there = replace(view, cells=cells(2, training=2), batch_complete=True, step_waits=True)
        assert trainers(decide(there, PARAMS)) == {CORE}

    def test_the_core_is_called_for_a_step_that_waits(self, view: ClusterView) -> None:
        there = replace(view, batch_complete=True, step_waits=True, queued=40, live=8)
        assert trainers(decide(there, PARAMS)) == {CORE}

    def test_all_serve_again_when_the_next_batch_is_queued(self, view: ClusterView) -> None:
        there = replace(view, cells=cells(2, training=1), queued=64)
        assert trainers(decide(there, PARAMS)) == set()


def test_both_cells_train_when_nothing_is_left_to_serve_and_the_work_is_worth_it() -> None:
    rich = replace(ready(MEASURED, 64), train_tokens_s=1000, batch_complete=True)
    assert trainers(decide(rich, PARAMS)) == {CORE, CellId("c1")}
    poor = replace(rich, ready_runs=4, ready_tokens=600)
    assert trainers(decide(poor, PARAMS)) == {CORE}


def test_heavy_load_gives_training_its_share_of_the_cells() -> None:
    # Sampling costs three times what training does: a quarter of the cells, and more when training is behind.
    view = ClusterView(
        cells=cells(16, slots=37),
        queued=1000,
        live=600,
        ready_runs=400,
        ready_tokens=400 * 70_000,
        later_tokens=0,
        batch_complete=False,
        step_waits=False,
        batch_runs=1536,
        staleness=1,
        train_tokens_s=4320,
        rollout_tokens_s=1440,
        run_train_tokens=70_000,
        run_sampled_tokens=70_000,
        switch_s=12,
    )
    assert len(trainers(decide(view, PARAMS))) == 4
    behind = replace(view, ready_runs=1536, ready_tokens=1536 * 70_000)
    assert len(trainers(decide(behind, PARAMS))) == 6


def test_the_core_joins_before_cells_that_serve_fewer_runs_and_leaves_after_all_others() -> None:
    busy_core = tuple(replace(cell, live=4 if cell.core else 0) for cell in cells(4))
    view = ready(replace(VIEW, cells=busy_core, live=4), 10)
    assert trainers(decide(view, PARAMS)) == {CORE}
    leaving = replace(MEASURED, cells=cells(4, training=4), queued=100, step_waits=True)
    assert trainers(decide(leaving, PARAMS)) == {CORE}


def test_of_the_satellites_an_idle_one_leaves_and_one_that_serves_least_joins() -> None:
    four = cells(4, training=3)
    four = (four[0], replace(four[1], busy=False), replace(four[2], busy=True), four[3])
    view = replace(MEASURED, cells=four, queued=4, live=4, ready_runs=9, ready_tokens=1_000_000)
    assert trainers(decide(view, PARAMS)) == {CORE, CellId("c2")}
    serving = tuple(replace(cell, live=live) for cell, live in zip(cells(4), (0, 3, 1, 2), strict=True))
    view = replace(view, cells=serving, queued=0, live=6)
    assert trainers(decide(view, PARAMS)) == {CORE, CellId("c2")}


def test_a_cell_on_its_way_out_is_called_back_first() -> None:
    four = cells(4, training=1)
    leaving = replace(four[3], role=Role.TRAIN, desired=Role.ROLLOUT)
    view = replace(MEASURED, cells=(*four[:3], leaving), live=8, ready_runs=9, ready_tokens=1_000_000)
    assert trainers(decide(view, PARAMS)) == {CORE, CellId("c3")}


def test_a_failed_cell_keeps_its_order_and_is_counted_nowhere() -> None:
    two = cells(2)
    view = ready(replace(VIEW, cells=(two[0], replace(two[1], role=Role.FAILED)), live=4), 32)
    assert decide(view, PARAMS).desired == {CORE: Role.ROLLOUT, CellId("c1"): Role.ROLLOUT}
    view = replace(view, live=0)
    assert trainers(decide(view, PARAMS)) == {CORE}


def test_without_its_core_nothing_trains() -> None:
    two = cells(2, training=2)
    view = ready(replace(VIEW, cells=(replace(two[0], role=Role.FAILED), two[1])), 32)
    plan = decide(view, PARAMS)
    assert plan.desired[CellId("c1")] is Role.ROLLOUT
    assert "core" in plan.reason


def test_a_single_cell_trains_when_its_runs_have_ended() -> None:
    one = replace(ready(VIEW, 32), cells=cells(1))
    assert trainers(decide(replace(one, live=1), PARAMS)) == set()
    assert trainers(decide(one, PARAMS)) == {CORE}


# ---------------------------------------------------------------------------------------------- whatever the view

ROLES = st.sampled_from(list(Role))
RATE = st.one_of(st.just(0.0), st.floats(0.1, 1e5))


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    count = draw(st.integers(1, 12))
    some = tuple(
        CellView(
            cell=CellId(f"c{n}"),
            core=n == 0,
            role=draw(ROLES),
            desired=draw(st.sampled_from([Role.ROLLOUT, Role.TRAIN])),
            slots=draw(st.integers(1, 48)),
            live=draw(st.integers(0, 60)),
            busy=draw(st.booleans()),
        )
        for n in range(count)
    )
    ready_runs = draw(st.integers(0, 500))
    complete = draw(st.booleans())
    return ClusterView(
        cells=some,
        queued=draw(st.integers(0, 500)),
        live=draw(st.integers(0, 500)),
        ready_runs=ready_runs,
        ready_tokens=ready_runs * draw(st.integers(1, 100_000)),
        later_tokens=draw(st.integers(0, 10**7)),
        batch_complete=complete,
        step_waits=complete and ready_runs == 0 and draw(st.booleans()),
        batch_runs=draw(st.integers(1, 600)),
        staleness=draw(st.integers(0, 4)),
        train_tokens_s=draw(RATE),
        rollout_tokens_s=draw(RATE),
        run_train_tokens=draw(RATE),
        run_sampled_tokens=draw(RATE),
        switch_s=draw(RATE),
    )


PARAMETERS = st.builds(
    PolicyParams,
    hysteresis=st.floats(0, 0.49),
    share_weight=st.floats(0, 2),
    backlog_gain=st.floats(0, 2),
    min_work_switches=st.floats(0, 10),
)


def obeyed(view: ClusterView, plan: RolePlan) -> ClusterView:
    return replace(view, cells=tuple(replace(cell, desired=plan.desired[cell.cell]) for cell in view.cells))


@settings(max_examples=100, deadline=None)
@given(views(), PARAMETERS)
def test_a_cell_serves_while_runs_wait_or_live_and_the_core_is_first_to_train(
    view: ClusterView, params: PolicyParams
) -> None:
    plan = decide(view, params)
    assert set(plan.desired) == {cell.cell for cell in view.cells}
    usable = [cell for cell in view.cells if cell.role is not Role.FAILED]
    wanted = {cell.cell for cell in usable} & trainers(plan)
    if view.water_level and usable:
        assert len(wanted) < len(usable)
    core_is_there = view.cells[0].role is not Role.FAILED
    if wanted:
        assert core_is_there
        assert CORE in wanted
    if core_is_there and view.step_waits and (len(usable) > 1 or not view.water_level):
        assert CORE in wanted
    if view.ready_runs and not view.water_level and core_is_there:
        assert CORE in wanted


@settings(max_examples=100, deadline=None)
@given(views(), PARAMETERS)
def test_no_cell_joins_without_work_to_train_on(view: ClusterView, params: PolicyParams) -> None:
    view = replace(view, ready_runs=0, ready_tokens=0, step_waits=False)
    usable = [cell for cell in view.cells if cell.role is not Role.FAILED]
    before = sum(cell.desired is Role.TRAIN for cell in usable)
    wanted = {cell.cell for cell in usable} & trainers(decide(view, params))
    assert len(wanted) <= before


@settings(max_examples=100, deadline=None)
@given(views(), PARAMETERS)
def test_a_plan_that_is_followed_stands_as_long_as_nothing_happens(view: ClusterView, params: PolicyParams) -> None:
    plan = decide(view, params)
    assert decide(obeyed(view, plan), params).desired == plan.desired


# ---------------------------------------------------------------------------------------------- pins


@st.composite
def pinned_views(draw: st.DrawFn) -> ClusterView:
    view = draw(views())
    pins = st.sampled_from([None, Role.ROLLOUT, Role.TRAIN])
    return replace(view, cells=tuple(replace(cell, pinned=draw(pins)) for cell in view.cells))


def test_a_pin_is_kept_against_the_rule_and_the_rule_decides_about_the_rest() -> None:
    three = cells(3)
    view = replace(VIEW, cells=(*three[:2], replace(three[2], pinned=Role.TRAIN)), queued=50, live=8)
    assert trainers(decide(view, PARAMS)) == {CellId("c2")}
    view = replace(VIEW, cells=(*three[:2], replace(three[2], pinned=Role.ROLLOUT)), ready_runs=64, ready_tokens=10_000)
    assert trainers(decide(replace(view, train_tokens_s=1000.0, switch_s=0.5), PARAMS)) == {CORE, CellId("c1")}


def test_the_core_trains_beside_a_cell_that_is_pinned_to_training_but_not_as_the_last_one_that_serves() -> None:
    two = cells(2)
    view = replace(VIEW, cells=(two[0], replace(two[1], pinned=Role.TRAIN)), batch_complete=True, step_waits=True)
    assert trainers(decide(view, PARAMS)) == {CORE, CellId("c1")}
    assert trainers(decide(replace(view, live=3), PARAMS)) == {CellId("c1")}


def test_nothing_joins_a_training_whose_core_is_pinned_to_rollout() -> None:
    three = cells(3)
    view = ready(replace(VIEW, cells=(replace(three[0], pinned=Role.ROLLOUT), *three[1:])), 64)
    plan = decide(view, PARAMS)
    assert trainers(plan) == set()
    assert "the core cell is pinned to rollout" in plan.reason


@settings(max_examples=200, deadline=None)
@given(pinned_views(), PARAMETERS)
def test_whatever_the_view_pins_are_kept_and_while_runs_wait_or_live_a_cell_serves_where_the_pins_let_one(
    view: ClusterView, params: PolicyParams
) -> None:
    plan = decide(view, params)
    usable = [cell for cell in view.cells if cell.role is not Role.FAILED]
    for cell in view.cells:
        if cell not in usable:
            assert plan.desired[cell.cell] is cell.desired
        elif cell.pinned is not None:
            assert plan.desired[cell.cell] is cell.pinned
    if view.water_level and any(cell.pinned is not Role.TRAIN for cell in usable):
        assert any(plan.desired[cell.cell] is Role.ROLLOUT for cell in usable)
    core = view.cells[0]
    if view.step_waits and not view.water_level and core in usable and core.pinned is not Role.ROLLOUT:
        assert plan.desired[CORE] is Role.TRAIN
    assert decide(obeyed(view, plan), params).desired == plan.desired


# ---------------------------------------------------------------------------------------------- a whole job


@dataclass
class Job:
    """A small job by the second: cells that sample and train at fixed speeds, and switch in no time worth a name."""

    eta: int
    run_seconds: int
    batch: int = 64
    group: int = 8
    cells: tuple[CellView, ...] = field(default_factory=lambda: cells(2))
    steps: int = 0
    launched: int = 0
    live: list[int] = field(default_factory=list)
    settled: int = 0
    trained: int = 0
    switches: int = 0
    seconds: int = 0

    def second(self) -> None:
        self.seconds += 1
        while self.launched < (self.steps + self.eta + 1) * self.batch and len(self.live) < self.slots:
            # Run lengths vary: a batch has a tail.
            self.live.append(self.run_seconds * (1 + self.launched * 7 % 4))
            self.launched += 1
        self.live = [left - 1 for left in self.live[: self.slots]] + self.live[self.slots :]
        self.settled += sum(left <= 0 for left in self.live)
        self.live = [left for left in self.live if left > 0]
        for cell in self.cells:
            if cell.desired is Role.TRAIN and self.untrained:
                self.trained += min(8, self.untrained)
            elif cell.core and cell.desired is Role.TRAIN and self.step_waits:
                self.steps += 1
        plan = decide(self.view, PARAMS)
        self.switches += sum(cell.desired is not plan.desired[cell.cell] for cell in self.cells)
        self.cells = tuple(
            replace(cell, role=plan.desired[cell.cell], desired=plan.desired[cell.cell]) for cell in self.cells
        )

    @property
    def slots(self) -> int:
        return 4 * sum(cell.desired is Role.ROLLOUT for cell in self.cells)

    @property
    def ready(self) -> int:
        """Runs of the current batch whose groups have settled; groups settle in launch order here."""
        return min(self.settled // self.group * self.group, (self.steps + 1) * self.batch)

    @property
    def untrained(self) -> int:
        return self.ready - self.trained

    @property
    def step_waits(self) -> bool:
        return self.trained == (self.steps + 1) * self.batch

    @property
    def view(self) -> ClusterView:
        allowed = (self.steps + self.eta + 1) * self.batch
        return ClusterView(
            cells=self.cells,
            queued=allowed - self.launched,
            live=len(self.live),
            ready_runs=self.untrained,
            ready_tokens=150 * self.untrained,
            later_tokens=150 * max(0, self.settled - (self.steps + 1) * self.batch),
            batch_complete=self.ready == (self.steps + 1) * self.batch,
            step_waits=self.step_waits,
            batch_runs=self.batch,
            staleness=self.eta,
            train_tokens_s=1200,
            rollout_tokens_s=4 * 60 / (2.5 * self.run_seconds),
            run_train_tokens=150,
            run_sampled_tokens=60,
            switch_s=1,
        )


@pytest.mark.parametrize("eta", [0, 1, 2])
@pytest.mark.parametrize("run_seconds", [1, 3, 10])
def test_a_job_on_two_cells_goes_on_step_by_step_without_flapping(eta: int, run_seconds: int) -> None:
    job = Job(eta, run_seconds)
    while job.steps < 20:
        job.second()
        assert job.seconds < 20 * 64 * run_seconds, "no step comes any more"
    assert job.switches / job.steps <= 6
