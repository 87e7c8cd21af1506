"""The messages between actors, each a record that can cross a process.

An ask names its answer in its docstring. Addresses are those of gyre.actors.remote: `unix:/path` or `tcp:host:port`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.ids import CellId, GroupId, MicroStepId, NodeId, RunId
from gyre.trajectory.records import Lineage
from gyre.wire import record

# ---------------------------------------------------------------------------------------------- any actor


@record("ok")
@dataclass(frozen=True)
class Ok:
    """Done; nothing more to say."""


@record("ping")
@dataclass(frozen=True)
class Ping:
    """-> Ok."""


@record("place")
@dataclass(frozen=True)
class Place:
    """Where a child process is reached by another one."""

    process: str
    """`node/child` for one of another node; empty for one of the same node."""
    address: str


# ---------------------------------------------------------------------------------------------- gateway


@record("engine_route")
@dataclass(frozen=True)
class EngineRoute:
    """One cell's engine as the gateway may use it."""

    cell: CellId
    url: str
    version: int
    """The version it last reported."""
    accepting: bool
    slots: int
    """Requests that it samples for at a time."""


@record("set_routes")
@dataclass(frozen=True)
class SetRoutes:
    """The engines, whole, at the authoritative `version`. A call is sent only where accepting and version equal. -> Ok."""

    version: int
    engines: tuple[EngineRoute, ...]


@record("drain_engine")
@dataclass(frozen=True)
class DrainEngine:
    """Stop every request in flight on `cell` at a token boundary, and carry it on elsewhere with its KV. -> DrainReport.

    The cell takes no new request from the moment this arrives until a SetRoutes says `accepting`. With `move`
    runs that are between calls take their KV along too; without it theirs is left behind (its version dies). When no
    other engine is open the calls wait in the gateway's queue.
    """

    cell: CellId
    move: bool


@record("drain_report")
@dataclass(frozen=True)
class DrainReport:
    requests: int
    moved_blocks: int
    moved_bytes: int
    stop_s: float
    """Until the last request had stopped."""
    move_s: float
    """Until the last block had moved."""


@record("open_run")
@dataclass(frozen=True)
class OpenRun:
    """Let `run` in under `/run/<run>/<key>/…`. Opening a higher attempt discards what the lower one did. -> Ok."""

    run: RunId
    group: GroupId
    attempt: int
    key: str
    profile: str
    temperature: float
    max_tokens: int


@record("close_run")
@dataclass(frozen=True)
class CloseRun:
    """End the run's calls, write its selected lineages durably. May be repeated. -> RunTrace."""

    run: RunId
    attempt: int


@record("get_lineages")
@dataclass(frozen=True)
class GetLineages:
    """-> Lineages. The selected lineages of a closed run, by index."""

    run: RunId
    attempt: int
    indices: tuple[int, ...]


@record("lineages")
@dataclass(frozen=True)
class Lineages:
    lineages: tuple[Lineage, ...]


@record("get_gateway_status")
@dataclass(frozen=True)
class GetGatewayStatus:
    """-> GatewayStatus. A node answers for its gateway as it was last heard."""


@record("gateway_status")
@dataclass(frozen=True)
class GatewayStatus:
    base_url: str
    """`http://127.0.0.1:<port>`."""
    open_runs: int
    calls_in_flight: int
    calls_waiting: int
    in_flight: dict[str, int]
    """Requests in flight by cell."""
    calls: int
    sampled_tokens: int
    max_silence_s: float
    prefix_tokens_recomputed: int
    failed_runs: dict[str, str]
    """Runs that the gateway had to stop, and why (a full disk under the journal)."""


# ---------------------------------------------------------------------------------------------- replica


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


# ---------------------------------------------------------------------------------------------- among a node's actors


@record("authority")
@dataclass(frozen=True)
class Authority:
    """The version of the authoritative snapshot. Each node tells its cells and its gateway when it sees it grow."""

    version: int


@record("cluster_changed")
@dataclass(frozen=True)
class ClusterChanged:
    """Within a node: look into the directory again, for a node, a cell or an office has changed."""


@record("route_changed")
@dataclass(frozen=True)
class RouteChanged:
    """Cell to gateway actor: this is how my engine may be used from now on. -> Ok, once the proxy goes by it."""

    route: EngineRoute


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


@record("run_ended")
@dataclass(frozen=True)
class RunEnded:
    """Run actor to node: the run has settled or is another node's; its place is free."""

    run: RunId
    revision: int
    """Of its record, when that was so."""


@record("job_failed")
@dataclass(frozen=True)
class JobFailed:
    """To the scheduler: the job cannot go on. It says so in the job's record, and the nodes end it. May be repeated."""

    reason: str


@record("get_cell_status")
@dataclass(frozen=True)
class GetCellStatus:
    """-> CellStatus."""


@record("run_failed")
@dataclass(frozen=True)
class RunFailed:
    """Node to run actor: the gateway had to stop this run."""

    reason: str


@record("run_moved")
@dataclass(frozen=True)
class RunMoved:
    """Node to run actor: the run is another node's by now; end what is left of it here."""


@record("end_node")
@dataclass(frozen=True)
class EndNode:
    """To the node itself: end runs, actors and children, and leave."""

    reason: str


@record("leave")
@dataclass(frozen=True)
class Leave:
    """To a node's own actors: it ends soon, and the runs that have not begun here are for others.

    -> Ok: from `member` when the others can know it, from `node` when no run waits here any more.
    """
