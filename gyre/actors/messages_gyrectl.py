"""What gyrectl asks a node, and what it is shown: the status of a job, and traces.

Records as in gyre.actors.messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.ids import CellId, NodeId, RunId
from gyre.store.records import Role
from gyre.wire import record


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
    rollout_to_train: int
    train_to_rollout: int
    calls: int
    sampled_tokens: int
    max_silence_s: float
    pids: dict[str, int]
    """Every child process by name."""
    base_url: str
    active_s: float
    events: tuple[str, ...]
    """The last lines of what happened, newest last."""


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


@record("pin_cell")
@dataclass(frozen=True)
class PinCell:
    """Keep a cell in one role; None takes its pin away. -> Ok when it is written, or Refused."""

    cell: CellId
    role: Role | None


@record("drain_node")
@dataclass(frozen=True)
class DrainNode:
    """Give a node no new run, those to others that have not begun there, and its cells to training; or let it serve again.

    -> Ok when it is written, or Refused.
    """

    node: NodeId
    draining: bool


@record("resign_leader")
@dataclass(frozen=True)
class ResignLeader:
    """Give the lease up, so that another scheduler, or this one again, is elected. -> Ok at once."""


@record("pause_job")
@dataclass(frozen=True)
class PauseJob:
    """Launch no new run, or again launch some. -> Ok when it is written, or Refused."""

    paused: bool


@record("end_job")
@dataclass(frozen=True)
class EndJob:
    """End the job on every node, for good: it has failed, for this reason. -> Ok when it is written, or Refused."""

    reason: str


@record("cancel_run")
@dataclass(frozen=True)
class CancelRun:
    """End a run that is queued or live: it settles as infra_failed, "cancelled". -> Ok at once, or Refused."""

    run: RunId


@record("restart_run")
@dataclass(frozen=True)
class RestartRun:
    """End what a live run does, and have it begin again as its next attempt, on a node that takes runs. -> Ok, or Refused."""

    run: RunId


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
