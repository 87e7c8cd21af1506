"""Which cells sample and which train: the scheduler's policy, pure.

The leader builds a `ClusterView` from the store and its own measurements, asks `decide` at every event, and writes the
desired roles that differ. The rule has five terms (measured over several hundred simulated workloads):

    share       the part of all work that is training, so that both end together
    backlog     work that is ready and untrained lifts it
    free cells  what the water level cannot use trains, as the tail of a batch begins
    hysteresis  no change while the wish is within 0.5 + h cells of what is: time slicing instead of flapping
    useful      a cell joins only for work that is worth its switch; a busy one stays

and two of its own: the core is the first to train and the last to leave, and it is there when only the optimizer step
is left. While runs are queued or live, at least one cell serves.

A cell that a person pinned has its pin's role and no other; the rule decides about the rest. Where everything that works is
pinned to training, nothing serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

from gyre.ids import CellId
from gyre.store.records import Role

_UNMEASURED_SHARE = 0.2
"""Training's share of all work until both rates are measured. Too little is mended by the backlog, too much is not."""

_NEARNESS = {Role.TRAIN: 0, Role.UNLOADING: 1, Role.LOADING: 1, Role.RELEASING: 2, Role.DRAINING: 3}
"""How near a cell is to training, by its observed role; all others are far."""


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """As the job file has them (gyre.config.SchedulerSection)."""

    hysteresis: float = 0.15
    share_weight: float = 0.75
    backlog_gain: float = 0.35
    min_work_switches: float = 2.0


@dataclass(frozen=True, slots=True)
class CellView:
    cell: CellId
    core: bool
    role: Role
    """Observed."""
    desired: Role
    slots: int
    """Runs that its engine serves at a time without slowing."""
    live: int = 0
    """Runs or requests that it serves now."""
    busy: bool = False
    """A micro-step is in progress."""
    pinned: Role | None = None
    """The role that it must have, by a person's word; None: the rule decides."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster in numbers. A rate, a mean or a cost that is not measured yet is 0."""

    cells: tuple[CellView, ...]
    queued: int
    live: int
    """Runs; with `queued` the water level."""
    ready_runs: int
    """Runs of the current batch that are ready and not trained yet, those in a claimed micro-step included."""
    ready_tokens: int
    """Tokens that their micro-steps hold."""
    later_tokens: int
    """Tokens of later batches that are ready."""
    batch_complete: bool
    """Every group of the current batch has settled."""
    step_waits: bool
    """Everything of the batch is trained: only the optimizer step is left."""
    batch_runs: int
    """Runs of one batch (groups * group size)."""
    staleness: int
    train_tokens_s: float = 0.0
    """Tokens of micro-steps that a training cell gets through in a second."""
    rollout_tokens_s: float = 0.0
    """Tokens that a serving cell samples in a second."""
    run_train_tokens: float = 0.0
    """Mean tokens of a run's micro-steps."""
    run_sampled_tokens: float = 0.0
    """Mean tokens sampled in a run."""
    switch_s: float = 0.0
    """Seconds that a cell loses going to training and back."""

    @property
    def water_level(self) -> int:
        return self.queued + self.live


@dataclass(frozen=True, slots=True)
class RolePlan:
    desired: dict[CellId, Role]
    reason: str
    """One line for people."""


def decide(view: ClusterView, params: PolicyParams) -> RolePlan:
    """The role that every cell should have now. A cell that failed keeps the one it was ordered."""
    usable = [cell for cell in view.cells if cell.role is not Role.FAILED]
    core = next((cell for cell in usable if cell.core), None)
    if core is not None and core.pinned is not Role.ROLLOUT:
        training = sum(cell.desired is Role.TRAIN for cell in usable)
        wanted, reason = _wanted(view, params, len(usable), training)
    elif core is not None:
        wanted, reason = 0, "the core cell is pinned to rollout, so no step can be taken"
    else:
        wanted, reason = 0, "the core cell is not there, so nothing can be trained"
    trainers = _trainers(view, usable, wanted)
    desired = {cell.cell: cell.desired for cell in view.cells}
    desired |= {cell.cell: Role.TRAIN if cell.cell in trainers else Role.ROLLOUT for cell in usable}
    return RolePlan(desired, reason)


def _trainers(view: ClusterView, usable: Sequence[CellView], wanted: int) -> set[CellId]:
    """Who trains when `wanted` cells should: those pinned to it, and as many of the free ones as are missing."""
    pinned = {cell.cell for cell in usable if cell.pinned is Role.TRAIN}
    free = sorted((cell for cell in usable if cell.pinned is None), key=_preference)
    joining = max(0, wanted - len(pinned))
    if wanted and free and free[0].core:
        joining = max(1, joining)  # nothing that the pinned ones train is of use without the core's step
    serving = 1 if view.water_level > 0 else 0
    return pinned | {cell.cell for cell in free[: max(0, min(joining, len(usable) - len(pinned) - serving))]}


def _wanted(view: ClusterView, params: PolicyParams, cells: int, training: int) -> tuple[int, str]:
    """How many of `cells` should train, where `training` do, and why."""
    saturating = sum(cell.slots for cell in view.cells) / len(view.cells)
    free = max(0.0, cells - view.water_level / saturating)
    share = params.share_weight * _share(view) * cells
    backlog = params.backlog_gain * _backlog(view) * cells
    wish = max(share + backlog, free)
    target = _rounded(wish, training, params.hysteresis)

    useful = _useful(view, params)
    cap = max(useful, min(training, view.ready_runs, target))
    if view.batch_complete and view.later_tokens > 0:
        cap = max(cap, min(training, target))  # the step ends soon, and its work is followed by more
    target = min(target, cap)
    reason = f"water level {view.water_level}, {free:.1f} cells free, share {share:.1f} + backlog {backlog:.1f}, "
    reason += f"{view.ready_runs} runs to train on"
    if view.ready_runs > 0 and view.live == 0:
        target = max(target, 1)
    if view.step_waits:
        target = max(target, 1)
        reason = "only the optimizer step is left"
    serving = 1 if view.water_level > 0 else 0
    return max(0, min(target, cells - serving)), reason


def _share(view: ClusterView) -> float:
    """Training's part of all work, in cell-seconds."""
    if not (view.train_tokens_s and view.rollout_tokens_s and view.run_train_tokens and view.run_sampled_tokens):
        return _UNMEASURED_SHARE
    train_s = view.run_train_tokens / view.train_tokens_s
    rollout_s = view.run_sampled_tokens / view.rollout_tokens_s
    return train_s / (train_s + rollout_s)


def _backlog(view: ClusterView) -> float:
    """What is ready and untrained, as a part of all that the staleness bound lets be outstanding; at most 1."""
    run_tokens = view.run_train_tokens or (view.ready_tokens / view.ready_runs if view.ready_runs else 0.0)
    outstanding = (view.staleness + 1) * view.batch_runs * run_tokens
    return min(1.0, (view.ready_tokens + view.later_tokens) / outstanding) if outstanding else 0.0


def _rounded(wish: float, training: int, hysteresis: float) -> int:
    """The whole number nearest to `wish`, drawn by `hysteresis` to what there is."""
    if abs(wish - training) <= 0.5 + hysteresis:
        return training
    return floor(wish + 0.5 - hysteresis) if wish > training else ceil(wish - 0.5 + hysteresis)


def _useful(view: ClusterView, params: PolicyParams) -> int:
    """Cells that the ready work is worth a switch for; one at least when there is any."""
    if view.ready_runs == 0:
        return 0
    worth_s = params.min_work_switches * view.switch_s
    if not view.train_tokens_s or not worth_s:
        return 1
    return max(1, ceil(min(view.ready_runs, view.ready_tokens / view.train_tokens_s / worth_s)))


def _preference(cell: CellView) -> tuple[object, ...]:
    """Cells in the order in which they should train: the core, who trains or nearly does, then who serves fewest."""
    joined = cell.desired is Role.TRAIN
    return (not cell.core, not joined, not cell.busy, _NEARNESS.get(cell.role, 4), cell.live, cell.cell)
