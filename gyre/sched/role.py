"""A cell's role machine (DESIGN §5): pure, `step(state, event) -> (state, actions)`.

The cell's actor feeds it events and carries out the actions it returns, in their order. It promises, whatever comes
when:

- `OpenRouting` only when the engine holds the authoritative version; the role is `rollout` exactly while routing is
  open. `AllowClaims` only in role `train`, with the authoritative version in the replica.
- Engine and replica never hold memory together: one has given it back, or is dead, before the other takes it.
- One stage at a time. An order that comes during a stage is honoured when the stage has ended; an older epoch or token
  is refused.
- A stage that fails leads back to `rollout`, or to `failed` when not even that can be had, and `Report` says why.

An actor carries a stage out as a task and remembers `state.serial`: when the task is done, its event counts only if
`serial` is still the same (a death, a failure or a time-out may have ended the stage before).

A new gyred begins with `CellState(desired=…, goal=…, epoch=…, token=…)` of the store, tells the authoritative version,
and then what became of the two children: `EngineUp` / `ReplicaUp` for one that it adopted, `EngineDied` /
`ReplicaDied` for one that is not there, which the machine then starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

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
    Turn,
    Unloaded,
    WeightsLoaded,
)
from gyre.store.records import Role

START_TRIES = 3
"""Starts of an engine or a replica on the way to one role, before the cell gives that up."""


def step(state: CellState, event: Event) -> Turn:
    """What the cell becomes by `event`, and what is to be done."""
    return cast(Callable[[CellState, Any], Turn], _ON[type(event)])(state, event)


# ---------------------------------------------------------------------------------------------- the way to a role


def _onward(state: CellState, actions: tuple[Action, ...] = ()) -> Turn:
    """The next step towards the goal, unless a stage is in progress."""
    if state.stage is not None or state.role is Role.FAILED or state.authoritative < 0:
        return state, actions
    after, more = _towards_train(state) if state.goal is Role.TRAIN else _towards_rollout(state)
    return after, (*actions, *more)


def _towards_train(state: CellState) -> Turn:
    current = state.engine_version == state.authoritative
    if state.routing and current and not state.replica_up:
        return state, ()  # it goes on serving until the replica is there
    if state.engine_up and not state.drained:
        return _begin(state, Role.DRAINING, Stage.DRAIN, StopRouting(), Drain(move=current))
    if state.engine_up and not state.released:
        return _begin(state, Role.RELEASING, Stage.RELEASE, ReleaseEngine())
    if not state.replica_up:
        return _begin(state, Role.LOADING, Stage.REPLICA)
    if state.replica_version < state.authoritative:
        state, abandoned = _abandon(state)
        if state.busy:
            return _begin(state, state.role, Stage.FINISH, *abandoned)
        return _begin(state, Role.LOADING, Stage.LOAD, *abandoned, LoadReplica(state.authoritative))
    if state.replica_version > state.authoritative:
        # The core has made a version that is not published yet: it waits for the publication.
        return replace(state, claiming=False), ((StopClaims(),) if state.claiming else ())
    if state.claiming:
        return state, ()
    arrived = replace(state, role=Role.TRAIN, claiming=True, holding=True, engine_tries=0, replica_tries=0)
    return arrived, (Report(Role.TRAIN), AllowClaims())


def _towards_rollout(state: CellState) -> Turn:
    if state.holding:
        stop = (StopClaims(),) if state.claiming else ()
        state = replace(state, claiming=False)
        if state.busy:
            return _begin(state, state.role, Stage.FINISH, *stop)
        return _begin(state, state.role, Stage.SHIP, *stop, ShipSums())
    if state.replica_version >= 0:
        return _begin(state, Role.UNLOADING, Stage.UNLOAD, OffloadReplica())
    if not state.engine_up:
        return _start_engine(state, "it died again")
    if state.released:
        return _begin(state, Role.RESUMING, Stage.RESUME, ResumeEngine())
    if state.engine_version < state.authoritative:
        if not state.drained:
            return _begin(state, Role.DRAINING, Stage.DRAIN, StopRouting(), Drain(move=False))
        return _begin(state, Role.PENDING_WEIGHTS, Stage.WEIGHTS, LoadWeights(state.authoritative))
    if state.routing or state.engine_version > state.authoritative:
        return state, ()
    arrived = replace(state, role=Role.ROLLOUT, drained=False, engine_tries=0)
    return arrived, (OpenRouting(), Report(Role.ROLLOUT))


def _begin(state: CellState, role: Role, stage: Stage, *actions: Action) -> Turn:
    """The role is told first: a new gyred must never find an engine in another state than the role told last says."""
    report = (Report(role),) if role is not state.role else ()
    return replace(state, role=role, stage=stage, serial=state.serial + 1), (*report, *actions)


def _end(state: CellState) -> CellState:
    return replace(state, stage=None, serial=state.serial + 1)


def _abandon(state: CellState) -> tuple[CellState, tuple[Action, ...]]:
    """Give up what is claimed and not shipped."""
    return replace(state, claiming=False, holding=False), ((AbandonClaims(),) if state.holding else ())


# ---------------------------------------------------------------------------------------------- orders and versions


def _desired_role(state: CellState, order: DesiredRole) -> Turn:
    if order.role not in (Role.ROLLOUT, Role.TRAIN):
        return state, (Refuse(f"role {order.role} cannot be ordered; rollout or train can"),)
    if order.token < state.token:
        return state, (Refuse(f"token {order.token} is older than {state.token}, which was seen already"),)
    if order.epoch < state.epoch or (order.epoch == state.epoch and order.role is not state.desired):
        return state, (Refuse(f"epoch {order.epoch} is over; {state.epoch} ordered {state.desired}"),)
    state = replace(state, token=order.token)
    if order.epoch == state.epoch:
        return state, ()
    state = replace(state, desired=order.role, goal=order.role, epoch=order.epoch, traceparent=order.traceparent)
    actions: tuple[Action, ...] = ()
    if state.role is Role.FAILED:
        state, actions = replace(state, role=Role.RESUMING), (Report(Role.RESUMING),)
    elif state.role is order.role and state.stage is None:
        actions = (Report(state.role),)
    state = replace(state, engine_tries=1 if state.stage is Stage.ENGINE else 0)
    if state.replica_up:
        state = replace(state, replica_tries=0)
    elif order.role is Role.TRAIN and state.replica_tries > START_TRIES:
        state, actions = replace(state, replica_tries=1), (*actions, RestartReplica())
    return _onward(state, actions)


def _authoritative_version(state: CellState, event: AuthoritativeVersion) -> Turn:
    return _onward(replace(state, authoritative=max(state.authoritative, event.version)))


# ---------------------------------------------------------------------------------------------- stages that ended


def _drained(state: CellState, _: Drained) -> Turn:
    return _onward(_end(replace(state, drained=True))) if state.stage is Stage.DRAIN else (state, ())


def _released(state: CellState, _: Released) -> Turn:
    if state.stage is not Stage.RELEASE:
        return state, ()
    return _onward(_end(replace(state, released=True, engine_version=-1)))


def _loaded(state: CellState, event: Loaded) -> Turn:
    if state.stage is Stage.LOAD:
        return _onward(_end(replace(state, replica_version=event.version)))
    if state.replica_version < 0:
        return state, ()
    return _onward(replace(state, replica_version=event.version))


def _micro_step_began(state: CellState, _: MicroStepBegan) -> Turn:
    return replace(state, busy=state.claiming), ()


def _micro_step_ended(state: CellState, _: MicroStepEnded) -> Turn:
    state = replace(state, busy=False)
    return _onward(_end(state) if state.stage is Stage.FINISH else state)


def _sums_shipped(state: CellState, _: SumsShipped) -> Turn:
    return _onward(_end(replace(state, holding=False))) if state.stage is Stage.SHIP else (state, ())


def _unloaded(state: CellState, _: Unloaded) -> Turn:
    return _onward(_end(replace(state, replica_version=-1))) if state.stage is Stage.UNLOAD else (state, ())


def _resumed(state: CellState, _: Resumed) -> Turn:
    return _onward(_end(replace(state, released=False))) if state.stage is Stage.RESUME else (state, ())


def _weights_loaded(state: CellState, event: WeightsLoaded) -> Turn:
    if state.stage is not Stage.WEIGHTS:
        return state, ()
    return _onward(_end(replace(state, engine_version=event.version)))


def _engine_up(state: CellState, event: EngineUp) -> Turn:
    if state.engine_up or state.role is Role.FAILED:
        return state, ()
    version = -1 if event.released else event.version
    drained = state.drained or event.released
    state = replace(state, engine_up=True, engine_version=version, released=event.released, drained=drained)
    return _onward(_end(state) if state.stage is Stage.ENGINE else state)


def _replica_up(state: CellState, _: ReplicaUp) -> Turn:
    if state.replica_up:
        return state, ()
    state = replace(state, replica_up=True, replica_version=-1)
    return _onward(_end(state) if state.stage is Stage.REPLICA else state)


# ---------------------------------------------------------------------------------------------- what goes wrong


def _engine_died(state: CellState, event: EngineDied) -> Turn:
    stop = (StopRouting(),) if state.routing else ()
    state = replace(state, engine_up=False, engine_version=-1, released=False, drained=True)
    if state.role is Role.FAILED:
        return state, ()
    if state.stage in (Stage.DRAIN, Stage.RELEASE, Stage.RESUME, Stage.WEIGHTS):
        state = _end(state)
    if state.stage is Stage.ENGINE:
        return _stage_failed(state, StageFailed(Stage.ENGINE, event.reason))
    if stop:
        # The role is no longer `rollout` even where nothing else can be done yet.
        state = replace(state, role=Role.RESUMING)
    return _onward(state, (*stop, Report(state.role, event.reason)))


def _replica_died(state: CellState, event: ReplicaDied) -> Turn:
    if not state.replica_up:
        return _stage_failed(state, StageFailed(Stage.REPLICA, event.reason))
    state, abandoned = _lost_replica(state)
    if state.stage in (Stage.LOAD, Stage.FINISH, Stage.SHIP, Stage.UNLOAD):
        state = _end(state)
    state, started = _start_replica(state, event.reason)
    return _onward(state, (*abandoned, *started))


def _stage_timed_out(state: CellState, event: StageTimedOut) -> Turn:
    return _stage_failed(state, StageFailed(event.stage, f"{event.stage} timed out"))


def _stage_failed(state: CellState, event: StageFailed) -> Turn:
    stage, reason = event.stage, event.reason
    if stage is Stage.REPLICA:
        return (state, ()) if state.replica_up else _replica_start_failed(state, reason)
    if stage is not state.stage:
        return state, ()
    state = _end(state)
    match stage:
        case Stage.DRAIN if state.engine_version >= state.authoritative:
            return _onward(replace(state, goal=Role.ROLLOUT), (Report(state.role, reason),))
        case Stage.DRAIN | Stage.RELEASE:
            return _suspect_engine(replace(state, goal=Role.ROLLOUT), reason)
        case Stage.RESUME | Stage.WEIGHTS | Stage.ENGINE:
            return _suspect_engine(state, reason)
        case Stage.SHIP:
            state, abandoned = _abandon(state)
            return _onward(state, (*abandoned, Report(state.role, reason)))
        case _:  # LOAD, FINISH, UNLOAD: the replica hangs or cannot do it; its memory is free when it is dead
            goal = Role.ROLLOUT if stage is Stage.LOAD else state.goal
            state, abandoned = _lost_replica(replace(state, goal=goal))
            state, started = _start_replica(state, reason)
            if state.replica_tries > START_TRIES:
                return _onward(state, (*abandoned, *started))
            role = Role.LOADING if state.goal is Role.TRAIN else Role.UNLOADING
            state, begun = _begin(state, role, Stage.REPLICA)
            return state, (*abandoned, *started, *begun)


def _suspect_engine(state: CellState, reason: str) -> Turn:
    """What the engine holds is not known any more: a dead one is sure, and a new one where it is wanted."""
    state = replace(state, engine_up=False, engine_version=-1, released=False, drained=True)
    if state.goal is Role.TRAIN:
        return _onward(state, (StopEngine(), Report(state.role, reason)))
    return _start_engine(state, reason)


def _start_engine(state: CellState, reason: str) -> Turn:
    """Start the engine, or give the cell up when that was tried often enough."""
    if state.engine_tries >= START_TRIES:
        state, abandoned = _abandon(state)
        failed = Report(Role.FAILED, f"the engine was started {START_TRIES} times and does not serve: {reason}")
        return replace(state, role=Role.FAILED), (*abandoned, StopEngine(), failed)
    state, begun = _begin(replace(state, engine_tries=state.engine_tries + 1), Role.RESUMING, Stage.ENGINE)
    return state, (*begun, RestartEngine())


def _lost_replica(state: CellState) -> tuple[CellState, tuple[Action, ...]]:
    state, abandoned = _abandon(state)
    return replace(state, replica_up=False, replica_version=-1, busy=False), abandoned


def _start_replica(state: CellState, reason: str) -> tuple[CellState, tuple[Action, ...]]:
    """Start the replica; or leave it dead, and training to later orders, when that was tried often enough."""
    told = Report(state.role, reason)
    if state.replica_tries >= START_TRIES:
        return replace(state, replica_tries=START_TRIES + 1, goal=Role.ROLLOUT), (StopReplica(), told)
    return replace(state, replica_tries=state.replica_tries + 1), (RestartReplica(), told)


def _replica_start_failed(state: CellState, reason: str) -> Turn:
    state, started = _start_replica(state, reason)
    if state.replica_tries > START_TRIES and state.stage is Stage.REPLICA:
        state = _end(state)
    return _onward(state, started)


_ON: dict[type[Event], Any] = {
    DesiredRole: _desired_role,
    AuthoritativeVersion: _authoritative_version,
    Drained: _drained,
    Released: _released,
    Loaded: _loaded,
    MicroStepBegan: _micro_step_began,
    MicroStepEnded: _micro_step_ended,
    SumsShipped: _sums_shipped,
    Unloaded: _unloaded,
    Resumed: _resumed,
    WeightsLoaded: _weights_loaded,
    EngineUp: _engine_up,
    EngineDied: _engine_died,
    ReplicaUp: _replica_up,
    ReplicaDied: _replica_died,
    StageFailed: _stage_failed,
    StageTimedOut: _stage_timed_out,
}
