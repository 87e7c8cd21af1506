"""The role machine of a cell: its way from role to role as DESIGN §5 has it, and what holds whatever happens (C12)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.sched.cell import (
    AbandonClaims,
    Action,
    AllowClaims,
    AuthoritativeVersion,
    CellState,
    DesiredRole,
    Drain,
    Drained,
    EngineDied,
    EngineUp,
    Event,
    Loaded,
    LoadReplica,
    LoadWeights,
    MicroStepBegan,
    MicroStepEnded,
    OffloadReplica,
    OpenRouting,
    Refuse,
    Released,
    ReleaseEngine,
    ReplicaDied,
    ReplicaUp,
    Report,
    RestartEngine,
    RestartReplica,
    Resumed,
    ResumeEngine,
    ShipSums,
    Stage,
    StageFailed,
    StageTimedOut,
    StopClaims,
    StopEngine,
    StopReplica,
    StopRouting,
    SumsShipped,
    Unloaded,
    WeightsLoaded,
)
from gyre.sched.role import START_TRIES, step
from gyre.store.records import Role


def play(state: CellState, *events: Event) -> tuple[CellState, list[Action]]:
    """The state after `events`, and the actions of the last one."""
    actions: tuple[Action, ...] = ()
    for event in events:
        state, actions = step(state, event)
    return state, list(actions)


def serving(version: int = 7) -> CellState:
    state, _ = play(CellState(), AuthoritativeVersion(version), EngineUp(version), ReplicaUp())
    assert state.role is Role.ROLLOUT
    return state


TO_TRAIN = DesiredRole(Role.TRAIN, 1, 10)
TO_ROLLOUT = DesiredRole(Role.ROLLOUT, 2, 10)


def training(version: int = 7) -> CellState:
    state, _ = play(serving(version), TO_TRAIN, Drained(), Released(), Loaded(version))
    assert state.role is Role.TRAIN
    return state


# ---------------------------------------------------------------------------------------------- the two switches


def test_from_rollout_to_train() -> None:
    state, actions = play(serving(), TO_TRAIN)
    assert actions == [Report(Role.DRAINING), StopRouting(), Drain(move=True)]
    state, actions = play(state, Drained())
    assert actions == [Report(Role.RELEASING), ReleaseEngine()]
    state, actions = play(state, Released())
    assert actions == [Report(Role.LOADING), LoadReplica(7)]
    state, actions = play(state, Loaded(7))
    assert actions == [Report(Role.TRAIN), AllowClaims()]
    assert state.settled


def test_from_train_to_rollout_with_a_micro_step_in_progress() -> None:
    state, actions = play(training(), MicroStepBegan(), TO_ROLLOUT)
    assert (state.role, actions) == (Role.TRAIN, [StopClaims()])
    state, actions = play(state, MicroStepEnded())
    assert (state.role, actions) == (Role.TRAIN, [ShipSums()])
    state, actions = play(state, SumsShipped())
    assert actions == [Report(Role.UNLOADING), OffloadReplica()]
    state, actions = play(state, Unloaded())
    assert actions == [Report(Role.RESUMING), ResumeEngine()]
    state, actions = play(state, Resumed())
    assert actions == [Report(Role.PENDING_WEIGHTS), LoadWeights(7)]
    state, actions = play(state, WeightsLoaded(7))
    assert actions == [OpenRouting(), Report(Role.ROLLOUT)]
    assert state.settled


def test_from_train_to_rollout_with_nothing_in_progress_ships_at_once() -> None:
    _, actions = play(training(), TO_ROLLOUT)
    assert actions == [StopClaims(), ShipSums()]


# ---------------------------------------------------------------------------------------------- versions


def test_c12_a_cell_that_joins_with_version_0_gets_no_request_until_it_reports_7() -> None:
    state, actions = play(CellState(), AuthoritativeVersion(7), ReplicaUp(), EngineUp(0))
    assert OpenRouting() not in actions
    state, actions = play(state, Drained())
    assert actions == [Report(Role.PENDING_WEIGHTS), LoadWeights(7)]
    state, actions = play(state, WeightsLoaded(0))
    assert actions == [LoadWeights(7)]
    assert not state.routing
    state, actions = play(state, WeightsLoaded(7))
    assert actions == [OpenRouting(), Report(Role.ROLLOUT)]


def test_a_serving_cell_changes_to_a_new_version_without_moving_kv() -> None:
    state, actions = play(serving(), AuthoritativeVersion(8))
    assert actions == [Report(Role.DRAINING), StopRouting(), Drain(move=False)]
    state, actions = play(state, Drained())
    assert actions == [Report(Role.PENDING_WEIGHTS), LoadWeights(8)]
    state, actions = play(state, WeightsLoaded(8))
    assert actions == [OpenRouting(), Report(Role.ROLLOUT)]


def test_a_version_that_comes_while_another_is_loaded_is_loaded_before_routing_opens() -> None:
    state, actions = play(serving(), AuthoritativeVersion(8), Drained(), AuthoritativeVersion(9), WeightsLoaded(8))
    assert actions == [LoadWeights(9)]
    assert state.role is Role.PENDING_WEIGHTS


def test_a_training_cell_loads_a_new_version_before_it_claims_more() -> None:
    state, actions = play(training(), AuthoritativeVersion(8))
    assert actions == [Report(Role.LOADING), AbandonClaims(), LoadReplica(8)]
    state, actions = play(state, Loaded(8))
    assert actions == [Report(Role.TRAIN), AllowClaims()]


def test_a_training_cell_in_a_micro_step_of_the_old_version_finishes_it_for_nothing_first() -> None:
    state, actions = play(training(), MicroStepBegan(), AuthoritativeVersion(8))
    assert actions == [AbandonClaims()]
    state, actions = play(state, MicroStepEnded())
    assert actions == [Report(Role.LOADING), LoadReplica(8)]


def test_the_core_that_made_the_version_itself_waits_for_its_publication_and_loads_nothing() -> None:
    state, actions = play(training(), Loaded(8))
    assert actions == [StopClaims()]
    state, actions = play(state, AuthoritativeVersion(8))
    assert actions == [Report(Role.TRAIN), AllowClaims()]


def test_versions_only_grow() -> None:
    assert play(serving(), AuthoritativeVersion(6)) == (serving(), [])


# ---------------------------------------------------------------------------------------------- orders


def test_a_newer_order_in_the_middle_of_a_switch_is_followed_when_the_stage_ends() -> None:
    state, actions = play(serving(), TO_TRAIN, TO_ROLLOUT)
    assert actions == []
    assert play(state, Drained())[1] == [OpenRouting(), Report(Role.ROLLOUT)]

    state, actions = play(serving(), TO_TRAIN, Drained(), TO_ROLLOUT, Released())
    assert actions == [Report(Role.RESUMING), ResumeEngine()]

    state, actions = play(training(), TO_ROLLOUT, DesiredRole(Role.TRAIN, 3, 10), SumsShipped())
    assert actions == [Report(Role.TRAIN), AllowClaims()]


@pytest.mark.parametrize(
    "order",
    [
        DesiredRole(Role.ROLLOUT, 9, 9),
        DesiredRole(Role.ROLLOUT, 0, 10),
        DesiredRole(Role.ROLLOUT, 1, 10),
        DesiredRole(Role.FAILED, 9, 10),
        DesiredRole(Role.LOADING, 9, 10),
    ],
    ids=["older token", "older epoch", "same epoch, another role", "no role to order", "a stage"],
)
def test_orders_that_are_refused_change_nothing(order: DesiredRole) -> None:
    before = training()
    state, actions = play(before, order)
    assert state == before
    assert [type(action) for action in actions] == [Refuse]


def test_the_same_order_again_does_nothing_and_a_new_leaders_token_is_kept() -> None:
    state, actions = play(training(), TO_TRAIN, replace(TO_TRAIN, token=12))
    assert actions == []
    assert state.token == 12
    assert [type(action) for action in play(state, DesiredRole(Role.ROLLOUT, 5, 11))[1]] == [Refuse]


def test_an_order_for_the_role_it_has_is_answered_by_a_report() -> None:
    assert play(serving(), DesiredRole(Role.ROLLOUT, 1, 10))[1] == [Report(Role.ROLLOUT)]


# ---------------------------------------------------------------------------------------------- deaths


def test_an_engine_that_dies_while_serving_is_started_again_and_loads_before_routing_opens() -> None:
    state, actions = play(serving(), EngineDied("killed"))
    assert actions == [StopRouting(), Report(Role.RESUMING, "killed"), RestartEngine()]
    state, actions = play(state, EngineUp(3))
    assert actions == [Report(Role.PENDING_WEIGHTS), LoadWeights(7)]
    assert play(state, WeightsLoaded(7))[1] == [OpenRouting(), Report(Role.ROLLOUT)]


def test_an_engine_that_comes_up_with_the_authoritative_version_serves_at_once() -> None:
    assert play(serving(), EngineDied(), EngineUp(7))[1] == [OpenRouting(), Report(Role.ROLLOUT)]


def test_an_engine_that_dies_while_the_cell_trains_is_started_when_the_cell_returns() -> None:
    state, actions = play(training(), EngineDied("killed"))
    assert actions == [Report(Role.TRAIN, "killed")]
    assert state.claiming
    state, actions = play(state, TO_ROLLOUT, SumsShipped(), Unloaded())
    assert actions == [Report(Role.RESUMING), RestartEngine()]


def test_an_engine_that_dies_while_it_drains_for_training_is_no_hindrance() -> None:
    assert play(serving(), TO_TRAIN, EngineDied())[1][-2:] == [Report(Role.LOADING), LoadReplica(7)]


def test_a_replica_that_dies_while_training_gives_its_claims_back_and_loads_again() -> None:
    state, actions = play(training(), MicroStepBegan(), ReplicaDied("killed"))
    assert actions == [AbandonClaims(), RestartReplica(), Report(Role.TRAIN, "killed"), Report(Role.LOADING)]
    state, actions = play(state, ReplicaUp())
    assert actions == [LoadReplica(7)]
    assert play(state, Loaded(7))[1] == [Report(Role.TRAIN), AllowClaims()]


def test_a_replica_that_dies_while_the_cell_serves_is_started_again_and_no_request_notices() -> None:
    state, actions = play(serving(), ReplicaDied("killed"))
    assert actions == [RestartReplica(), Report(Role.ROLLOUT, "killed")]
    state, actions = play(state, TO_TRAIN)
    assert (state.role, actions) == (Role.ROLLOUT, [])
    assert play(state, ReplicaUp())[1] == [Report(Role.DRAINING), StopRouting(), Drain(move=True)]


def test_a_replica_that_dies_on_the_way_back_does_not_hold_the_cell_up() -> None:
    actions = play(training(), TO_ROLLOUT, ReplicaDied("killed"))[1]
    assert actions[-2:] == [Report(Role.RESUMING), ResumeEngine()]
    assert actions[0] == AbandonClaims()


# ---------------------------------------------------------------------------------------------- failed stages


def test_a_drain_that_times_out_leaves_the_cell_serving() -> None:
    state, actions = play(serving(), TO_TRAIN, StageTimedOut(Stage.DRAIN))
    assert actions == [Report(Role.DRAINING, "drain timed out"), OpenRouting(), Report(Role.ROLLOUT)]
    assert (state.desired, state.goal) == (Role.TRAIN, Role.ROLLOUT)
    assert play(state, DesiredRole(Role.TRAIN, 2, 10))[1][1] == StopRouting()


def test_a_replica_that_cannot_load_is_started_again_and_the_cell_returns_to_rollout() -> None:
    state, actions = play(serving(), TO_TRAIN, Drained(), Released(), StageFailed(Stage.LOAD, "bad file"))
    assert actions == [RestartReplica(), Report(Role.LOADING, "bad file"), Report(Role.UNLOADING)]
    state, actions = play(state, ReplicaUp())
    assert actions == [Report(Role.RESUMING), ResumeEngine()]


def test_a_replica_that_does_not_come_up_leaves_the_cell_serving_until_it_is_ordered_to_train_again() -> None:
    state, _ = play(training(), ReplicaDied("killed"))
    for _ in range(START_TRIES - 1):
        state, actions = play(state, StageFailed(Stage.REPLICA, "no memory"))
        assert actions == [RestartReplica(), Report(Role.LOADING, "no memory")]
    state, actions = play(state, StageFailed(Stage.REPLICA, "no memory"))
    assert actions == [
        *(StopReplica(), Report(Role.LOADING, "no memory")),
        *(Report(Role.RESUMING), ResumeEngine()),
    ]
    state, actions = play(state, Resumed(), WeightsLoaded(7), DesiredRole(Role.TRAIN, 2, 10))
    assert (state.role, actions) == (Role.ROLLOUT, [RestartReplica()])


def test_sums_that_cannot_be_shipped_are_given_back_to_the_ledger() -> None:
    actions = play(training(), TO_ROLLOUT, StageFailed(Stage.SHIP, "the core is gone"))[1]
    assert actions[:2] == [AbandonClaims(), Report(Role.TRAIN, "the core is gone")]
    assert OffloadReplica() in actions


def test_an_engine_that_does_not_come_up_fails_the_cell_until_the_next_order() -> None:
    state, _ = play(serving(), EngineDied())
    for _ in range(START_TRIES - 1):
        state, actions = play(state, StageFailed(Stage.ENGINE, "no port"))
        assert actions[0] == RestartEngine()
    state, actions = play(state, StageFailed(Stage.ENGINE, "no port"))
    assert (state.role, actions[0]) == (Role.FAILED, StopEngine())
    assert isinstance(actions[-1], Report)
    assert "no port" in actions[-1].reason
    assert play(state, AuthoritativeVersion(8))[1] == []
    state, actions = play(state, DesiredRole(Role.ROLLOUT, 5, 10))
    assert actions == [Report(Role.RESUMING), RestartEngine()]


def test_the_outcome_of_a_stage_that_is_over_is_ignored() -> None:
    state, _ = play(serving(), TO_TRAIN, Drained())
    assert play(state, StageFailed(Stage.DRAIN, "late")) == (state, [])
    assert play(state, Drained()) == (state, [])


# ---------------------------------------------------------------------------------------------- whatever happens

STAGE_OF: dict[type[Action], Stage] = {
    Drain: Stage.DRAIN,
    ReleaseEngine: Stage.RELEASE,
    LoadReplica: Stage.LOAD,
    ShipSums: Stage.SHIP,
    OffloadReplica: Stage.UNLOAD,
    ResumeEngine: Stage.RESUME,
    LoadWeights: Stage.WEIGHTS,
    RestartEngine: Stage.ENGINE,
}


@dataclass
class Cell:
    """A cell as it really is, which carries out the machine's actions and finds fault with those that are wrong.

    It begins where gyred is about to tell what became of the engine and the replica.
    """

    state: CellState = field(default_factory=CellState)
    authoritative: int = 0
    routing: bool = False
    claiming: bool = False
    engine_alive: bool = True
    engine_memory: bool = True
    engine_version: int = 0
    replica_alive: bool = True
    replica_memory: bool = False
    replica_starting: bool = True
    replica_version: int = -1
    micro_step: bool = False
    unshipped: bool = False
    stage: Stage | None = Stage.ENGINE
    stage_serial: int = 0
    reported: Role = Role.RESUMING

    def feed(self, event: Event) -> None:
        self.state, actions = step(self.state, event)
        for action in actions:
            self.carry_out(action)
            if type(action) in STAGE_OF:
                self.stage, self.stage_serial = STAGE_OF[type(action)], self.state.serial
        state = self.state
        assert self.reported is state.role
        assert self.routing == state.routing
        assert self.claiming == state.claiming
        assert not self.routing or self.engine_version == self.authoritative
        assert not self.claiming or (state.role is Role.TRAIN and self.replica_version == self.authoritative)
        assert not (self.routing and self.replica_memory)
        if state.stage in STAGE_OF.values():
            assert (self.stage, self.stage_serial) == (state.stage, state.serial), "a stage that nobody carries out"
        if state.stage is Stage.REPLICA:
            assert self.replica_starting, "nobody starts the replica"
        if state.stage is Stage.FINISH:
            assert self.micro_step, "there is no micro-step to wait for"

    def carry_out(self, action: Action) -> None:
        match action:
            case Report(role):
                self.reported = role
            case StopRouting():
                self.routing = False
            case OpenRouting():
                assert self.engine_alive
                assert self.engine_memory
                assert self.engine_version == self.authoritative
                self.routing = True
            case Drain() | ReleaseEngine():
                assert self.engine_alive
                assert not self.routing
            case LoadWeights(version):
                assert self.engine_alive
                assert self.engine_memory
                assert not self.routing
                assert version == self.authoritative
            case ResumeEngine():
                assert self.engine_alive
                assert not self.replica_memory
                self.engine_memory = True
            case RestartEngine():
                assert not self.routing
                assert not self.replica_memory
                self.engine_alive, self.engine_memory, self.engine_version = False, True, -1
            case StopEngine():
                assert not self.routing
                self.engine_alive, self.engine_memory, self.engine_version = False, False, -1
            case LoadReplica(version):
                assert self.replica_alive
                assert not self.engine_memory
                assert not self.micro_step
                assert not self.unshipped
                assert version == self.authoritative
                self.replica_memory = True
            case OffloadReplica():
                assert self.replica_alive
                assert not self.micro_step
                assert not self.unshipped
            case RestartReplica():
                assert not self.claiming
                self.replica_alive, self.replica_memory, self.replica_version = False, False, -1
                self.micro_step = self.unshipped = False
                self.replica_starting = True
            case StopReplica():
                assert not self.claiming
                self.replica_alive = self.replica_memory = self.micro_step = self.unshipped = False
                self.replica_starting, self.replica_version = False, -1
            case AllowClaims():
                assert not self.engine_memory
                assert self.replica_version == self.authoritative
                self.claiming = True
            case StopClaims():
                self.claiming = False
            case AbandonClaims():
                self.claiming = self.unshipped = False
            case ShipSums():
                assert not self.micro_step
                assert not self.claiming
            case Refuse(reason):
                raise AssertionError(reason)

    @property
    def in_stage(self) -> Stage | None:
        """The stage that somebody carries out, and whose outcome still counts."""
        return self.stage if self.state.serial == self.stage_serial and self.state.stage is self.stage else None

    def succeed(self) -> None:
        stage, self.stage = self.in_stage, None
        match stage:
            case Stage.DRAIN:
                self.feed(Drained())
            case Stage.RELEASE:
                self.engine_memory, self.engine_version = False, -1
                self.feed(Released())
            case Stage.LOAD:
                self.replica_version = self.authoritative
                self.feed(Loaded(self.replica_version))
            case Stage.SHIP:
                self.unshipped = False
                self.feed(SumsShipped())
            case Stage.UNLOAD:
                self.replica_memory, self.replica_version = False, -1
                self.feed(Unloaded())
            case Stage.RESUME:
                self.feed(Resumed())
            case Stage.WEIGHTS:
                self.engine_version = self.authoritative
                self.feed(WeightsLoaded(self.engine_version))
            case Stage.ENGINE:
                self.engine_alive, self.engine_version = True, self.authoritative
                self.feed(EngineUp(self.engine_version))
            case _:
                pass

    def fail(self, kind: type[StageFailed] | type[StageTimedOut]) -> None:
        if (stage := self.in_stage) is not None:
            self.stage = None
            self.feed(StageFailed(stage, "it broke") if kind is StageFailed else StageTimedOut(stage))

    def engine_dies(self) -> None:
        if self.engine_alive or self.in_stage is Stage.ENGINE:
            self.engine_alive, self.engine_memory, self.engine_version = False, False, -1
            self.feed(EngineDied())

    def replica_dies(self) -> None:
        if self.replica_alive or self.replica_starting:
            self.replica_alive = self.replica_memory = self.replica_starting = False
            self.replica_version, self.micro_step = -1, False
            self.feed(ReplicaDied())

    def replica_starts(self) -> None:
        if self.replica_starting:
            self.replica_alive, self.replica_starting = True, False
            self.feed(ReplicaUp())

    def replica_does_not_start(self) -> None:
        if self.replica_starting:
            self.replica_starting = False
            self.feed(StageFailed(Stage.REPLICA, "no memory"))

    def micro_step_hangs(self) -> None:
        if self.state.stage is Stage.FINISH:
            self.feed(StageTimedOut(Stage.FINISH))

    def micro_step_goes_on(self) -> None:
        if self.micro_step:
            self.micro_step = False
            self.feed(MicroStepEnded())
        elif self.claiming:
            self.micro_step = self.unshipped = True
            self.feed(MicroStepBegan())

    def optimizer_steps(self) -> None:
        if self.claiming and not self.micro_step:
            self.unshipped = False
            self.replica_version += 1
            self.feed(Loaded(self.replica_version))

    def version_is_published(self) -> None:
        # The core's own, when it has made one; else another cell's.
        self.authoritative += 1
        self.feed(AuthoritativeVersion(self.authoritative))

    def order(self, role: Role) -> None:
        state = self.state
        self.feed(DesiredRole(role, state.epoch + 1, max(1, state.token)))

    def go_on_without_faults(self) -> None:
        for _ in range(100):
            if self.state.stage is None and self.replica_version > self.authoritative:
                self.version_is_published()
            elif self.replica_starting:
                self.replica_starts()
            elif self.state.stage is Stage.FINISH:
                self.micro_step_goes_on()
            elif self.in_stage is not None:
                self.succeed()
            else:
                break
        assert self.state.stage is None


WHAT: dict[str, Any] = {
    "succeed": Cell.succeed,
    "succeed again": Cell.succeed,
    "succeed once more": Cell.succeed,
    "fail": lambda cell: cell.fail(StageFailed),
    "time out": lambda cell: cell.fail(StageTimedOut),
    "to train": lambda cell: cell.order(Role.TRAIN),
    "to rollout": lambda cell: cell.order(Role.ROLLOUT),
    "engine dies": Cell.engine_dies,
    "replica dies": Cell.replica_dies,
    "replica starts": Cell.replica_starts,
    "replica does not start": Cell.replica_does_not_start,
    "micro-step": Cell.micro_step_goes_on,
    "micro-step hangs": Cell.micro_step_hangs,
    "optimizer step": Cell.optimizer_steps,
    "published": Cell.version_is_published,
    "all goes well": Cell.go_on_without_faults,
}


def begin(engine: str, replica: str, desired: Role) -> Cell:
    """A cell whose gyred has just started, and found its children or not."""
    cell = Cell(CellState(desired=desired, goal=desired))
    cell.feed(AuthoritativeVersion(0))
    if engine == "gone":
        cell.engine_alive = cell.engine_memory = False
        cell.feed(EngineDied())
    else:
        released = engine == "released"
        cell.engine_memory = not released
        cell.engine_version = 0 if engine == "current" else -1
        cell.feed(EngineUp(cell.engine_version, released))
    cell.replica_alive, cell.replica_starting = replica == "there", False
    cell.feed(ReplicaUp() if cell.replica_alive else ReplicaDied())
    return cell


BEGIN = st.builds(
    begin,
    st.sampled_from(["current", "unknown version", "released", "gone"]),
    st.sampled_from(["there", "gone"]),
    st.sampled_from([Role.ROLLOUT, Role.TRAIN]),
)
SCRIPT = st.lists(st.sampled_from(list(WHAT)), max_size=40)


@settings(max_examples=400, deadline=None)
@given(BEGIN, SCRIPT, st.sampled_from([Role.ROLLOUT, Role.TRAIN]))
def test_nothing_unsafe_is_ordered_and_every_order_is_followed_once_stages_succeed(
    cell: Cell, script: list[str], last: Role
) -> None:
    for what in script:
        WHAT[what](cell)  # every feed checks what must hold
    cell.order(last)
    cell.go_on_without_faults()
    assert cell.state.role is last
    assert cell.state.settled


@settings(max_examples=150, deadline=None)
@given(BEGIN, SCRIPT)
def test_without_faults_a_cell_comes_to_rest_where_it_was_heading(cell: Cell, script: list[str]) -> None:
    for what in script:
        WHAT[what](cell)
    cell.go_on_without_faults()
    state = cell.state
    assert state.role in (Role.ROLLOUT, Role.TRAIN, Role.FAILED)
    # A goal that is not reached now is one whose replica nobody can start.
    assert state.settled or (state.goal is Role.TRAIN and not state.replica_up)
