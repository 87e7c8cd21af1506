"""The messages between actors, each a record that can cross a process.

An ask names its answer in its docstring. Addresses are those of gyre.actors.remote: `unix:/path` or `tcp:host:port`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.ids import CellId, GroupId, RunId
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


@record("await_empty")
@dataclass(frozen=True)
class AwaitEmpty:
    """To a node's own actor. -> Ok: when no run lives here."""


@record("leave_engine")
@dataclass(frozen=True)
class LeaveEngine:
    """To a node's own cell: the node ends, and its engine takes no request any more.

    -> DrainReport: when what it had goes on elsewhere, with its KV.
    """


@record("leave")
@dataclass(frozen=True)
class Leave:
    """To a node's own actors: it ends soon, and the runs that have not begun here are for others.

    -> Ok: from `member` when the others can know it, from `node` when no run waits here any more.
    """
