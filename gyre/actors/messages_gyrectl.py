"""What gyrectl asks a node, and what it is shown: the status of a job, and traces.

Records as in gyre.actors.messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.ids import CellId, NodeId, RunId
from gyre.store.records import Role
from gyre.wire import record

GYRECTL = "gyrectl"
"""Who gives an order, as far as nobody has shown a person's certificate: what `by` of each order says in the log."""


@record("get_status")
@dataclass(frozen=True)
class GetStatus:
    """-> Status."""


@record("cell_status")
@dataclass(frozen=True)
class CellStatus:
    cell: CellId
    core: bool
    role: Role
    version: int
    in_flight: int
    engine_pid: int
    replica_pid: int
    kv_carrier: str
    """Over which transport the engine's KV moves, and why that one; empty while there is none, or it moves none."""


@record("status")
@dataclass(frozen=True)
class Status:
    """What the live view and `gyrectl status` show."""

    job: str
    state: str
    phase: str
    """`starting`, `held-out before`, `training`, `held-out after`, `finished`, `stopping`, `failed`."""
    reason: str
    step: int
    steps: int
    version: int
    mean_reward: float | None
    """Of the last step."""
    rewards: tuple[float, ...]
    """Of every step so far."""
    heldout_before: float | None
    heldout_after: float | None
    heldout_done: int
    heldout_total: int
    queued: int
    live: int
    settled: int
    groups_ready: int
    micro_steps_done: int
    micro_steps: int
    cells: tuple[CellStatus, ...]
    rollout_to_train: int | None
    """None while that is not known, for the state store does not answer."""
    train_to_rollout: int | None
    calls: int
    sampled_tokens: int
    max_silence_s: float
    pids: dict[str, int]
    """Every child process by name."""
    base_url: str
    active_s: float
    events: tuple[str, ...]
    """The last lines of what happened, newest last."""
    store_answers: bool
    """Else all of this is as last heard: `step` is the last version that was, `rewards` may be empty."""


@record("stop_job")
@dataclass(frozen=True)
class StopJob:
    """End all runs and children cleanly; gyred exits when done. -> Ok at once."""

    reason: str


@record("switch_cell")
@dataclass(frozen=True)
class SwitchCell:
    """Order a cell to `rollout` or `train`, once; when it has come to rest the policy decides again. -> Ok, or Refused."""

    cell: CellId
    role: Role
    by: str = GYRECTL


@record("pin_cell")
@dataclass(frozen=True)
class PinCell:
    """Keep a cell in one role; None takes its pin away. -> Ok when it is written, or Refused."""

    cell: CellId
    role: Role | None
    by: str = GYRECTL


@record("drain_node")
@dataclass(frozen=True)
class DrainNode:
    """Give a node no new run, those to others that have not begun there, and its cells to training; or let it serve again.

    `within_s` is the drain's (DrainRecord); of a node that drains already it is changed, and counts anew.

    -> Ok when it is written, or Refused.
    """

    node: NodeId
    draining: bool
    within_s: float | None = None
    by: str = GYRECTL


@record("resign_leader")
@dataclass(frozen=True)
class ResignLeader:
    """Give the lease up, so that another scheduler, or this one again, is elected. -> Ok at once."""

    by: str = GYRECTL


@record("pause_job")
@dataclass(frozen=True)
class PauseJob:
    """Launch no new run, or again launch some. -> Ok when it is written, or Refused."""

    paused: bool
    by: str = GYRECTL


@record("end_job")
@dataclass(frozen=True)
class EndJob:
    """End the job on every node, for good: it has failed, stopped by who says so. -> Ok when it is written, or Refused."""

    by: str = GYRECTL


@record("cancel_run")
@dataclass(frozen=True)
class CancelRun:
    """End a run that is queued or live: it settles as infra_failed, "cancelled". -> Ok at once, or Refused."""

    run: RunId
    by: str = GYRECTL


@record("restart_run")
@dataclass(frozen=True)
class RestartRun:
    """End what a live run does, and have it begin again as its next attempt, on a node that takes runs. -> Ok, or Refused."""

    run: RunId
    by: str = GYRECTL


ORDERS = (SwitchCell, PinCell, DrainNode, ResignLeader, PauseJob, EndJob, CancelRun, RestartRun)


@record("get_version")
@dataclass(frozen=True)
class GetVersion:
    """-> Version."""


@record("version")
@dataclass(frozen=True)
class Version:
    """What gyred is made of, and what its clock says: for `gyrectl doctor`."""

    gyre: str
    python: str
    unix_s: float


@record("get_trace")
@dataclass(frozen=True)
class GetTrace:
    """-> Trace. `switch` is a switch id, or a trace id, or empty for the last one."""

    switch: str


@record("span_record")
@dataclass(frozen=True)
class SpanRecord:
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_unix_ns: int
    end_unix_ns: int
    attributes: dict[str, str]
    error: str


@record("trace")
@dataclass(frozen=True)
class Trace:
    spans: tuple[SpanRecord, ...]
