"""The messages of a batch: between the core actor, the cells that work on its micro-steps, and the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from gyre.actors.messages_replica import MicroStep
from gyre.ids import CellId, MicroStepId, NodeId
from gyre.wire import record


@record("lead")
@dataclass(frozen=True)
class Lead:
    """Scheduler to core actor: writes are fenced by `token` from now on, unless a later leader's was heard of."""

    token: int


@record("who_leads")
@dataclass(frozen=True)
class WhoLeads:
    """A core actor that has just begun, to the scheduler, which tells it Lead."""


@record("claim_micro_step")
@dataclass(frozen=True)
class ClaimMicroStep:
    """-> Claim."""

    cell: CellId
    version: int
    """The version whose parameters the cell's replica holds."""


@record("claim")
@dataclass(frozen=True)
class Claim:
    work: MicroStep | None
    homes: dict[str, NodeId]
    """By run, the node whose gateway has its lineages."""


@record("sums_staged")
@dataclass(frozen=True)
class SumsStaged:
    """The core's replica holds transfer `transfer` whole; may it be merged? -> Merged."""

    cell: CellId
    transfer: str
    micro_steps: tuple[MicroStepId, ...]
    version: int
    metrics: dict[str, float]


@record("merged")
@dataclass(frozen=True)
class Merged:
    accepted: bool


@record("give_back")
@dataclass(frozen=True)
class GiveBack:
    """The cell lost what it had claimed (its replica died): let others have it. -> Ok."""

    cell: CellId


@record("core_leaving")
@dataclass(frozen=True)
class CoreLeaving:
    """The core cell is about to leave train. -> Ok, once no optimizer step is under way."""


@record("core_lost")
@dataclass(frozen=True)
class CoreLost:
    """Between the core and its cell: the core's replica died, or is to; with it go the sums merged so far."""


@record("get_progress")
@dataclass(frozen=True)
class GetProgress:
    """-> Progress."""


@record("progress")
@dataclass(frozen=True)
class Progress:
    """How far the batch is."""

    step: int
    """The step being prepared."""
    planned_groups: int
    untrained_runs: int
    """Runs with a micro-step that is not merged yet."""
    untrained_tokens: int
    """Tokens of those micro-steps."""
    merged_micro_steps: int
    micro_steps: int
    step_due: bool
    """Only the optimizer step is left."""
    train_tokens_s: float
    """Measured training speed of one cell; 0 before the first."""


@record("progressed")
@dataclass(frozen=True)
class Progressed:
    """Something happened that the scheduler may want to act on."""
