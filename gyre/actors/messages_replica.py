"""The messages to a cell's replica: what it loads, the micro-steps it runs, its sums, and the core's step.

Addresses are those of gyre.actors.remote.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.actors.messages import Place
from gyre.ids import MicroStepId, RunId
from gyre.wire import record


@record("lineage_work")
@dataclass(frozen=True)
class LineageWork:
    """One lineage of a micro-step, with what turns its token losses into its share of the batch's loss."""

    run: RunId
    attempt: int
    index: int
    advantage: float
    run_counted_tokens: int
    """T_i, over all lineages of the run."""


@record("micro_step")
@dataclass(frozen=True)
class MicroStep:
    """The unit of training work that a cell claims: whole lineages, and the version whose weights it is for."""

    micro_step: MicroStepId
    step: int
    version: int
    lineages: tuple[LineageWork, ...]
    tokens: int


@record("load_snapshot")
@dataclass(frozen=True)
class LoadSnapshot:
    """Take the parameters of the snapshot folder at `path` into memory; drop any gradient sums. -> Ready."""

    path: str
    version: int


@record("ready")
@dataclass(frozen=True)
class Ready:
    version: int
    layout_hash: str


@record("run_micro_step")
@dataclass(frozen=True)
class RunMicroStep:
    """Forward-backward of one micro-step; its gradient is added to the replica's sums. -> MicroStepDone.

    `gateways` has, by run, where the lineages are to be had.
    """

    work: MicroStep
    gateways: dict[str, Place]


@record("micro_step_done")
@dataclass(frozen=True)
class MicroStepDone:
    micro_step: MicroStepId
    seconds: float
    metrics: dict[str, float]
    """Sums over counted tokens or lineages (names end in `_sum` or `_count`), so that they add up over cells."""


@record("ship_sums")
@dataclass(frozen=True)
class ShipSums:
    """Send the gradient sums to the core's replica at `core` as transfer `transfer`, then zero them. -> SumsShipped.

    When this replica is the core's own (no `core`) the sums stay where they are.
    """

    core: Place | None
    transfer: str


@record("sums_shipped")
@dataclass(frozen=True)
class SumsShipped:
    transfer: str
    micro_steps: tuple[MicroStepId, ...]
    bytes: int
    error: float = 0.0
    """What rounding on the way took away, relative to the norm of the sums."""


@record("stage_sums")
@dataclass(frozen=True)
class StageSums:
    """Replica to core replica: pull this whole set of sums from `source`, and keep it aside until MergeSums names it.

    -> Ok, or Refused.
    """

    transfer: str
    layout_hash: str
    version: int
    micro_steps: tuple[MicroStepId, ...]
    dtype: str
    """On the way: `float32` or `bfloat16`. They are summed in float32."""
    numbers: int
    source: str
    """Where the sender's transport (gyre.kv_migrate) serves them."""
    epoch: int


@record("merge_sums")
@dataclass(frozen=True)
class MergeSums:
    """Add staged transfer `transfer` into the batch's sums, once. Only after the ledger accepted its ids. -> Ok."""

    transfer: str


@record("drop_sums")
@dataclass(frozen=True)
class DropSums:
    """Forget all sums, own and staged: a new batch begins, or this one begins again. -> Ok."""


@record("drop_own_sums")
@dataclass(frozen=True)
class DropOwnSums:
    """Forget the sums that were not shipped; what is staged or merged stays. -> Ok."""


@record("optimizer_step")
@dataclass(frozen=True)
class OptimizerStep:
    """Divide the batch's sums by `scored_runs`, clip, step, and write snapshot `version` whole at `path`. -> StepDone."""

    step: int
    version: int
    scored_runs: int
    lr: float
    path: str


@record("step_done")
@dataclass(frozen=True)
class StepDone:
    version: int
    digest: str
    metrics: dict[str, float]


@record("offload")
@dataclass(frozen=True)
class Offload:
    """Give the memory of parameters and sums back; the process and its groups stay. -> Ok."""
