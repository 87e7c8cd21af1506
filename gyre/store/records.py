"""The records of the state store (DESIGN §4) and their keys. Tokens, weights and KV never enter the store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gyre.ids import CellId, GroupId, NodeId, RunId, SwitchId, TaskId
from gyre.trajectory.records import Outcome, RunTrace
from gyre.wire import record


class Role(StrEnum):
    """What a cell does. `draining` … `resuming` are the stages of a switch; `failed` is out of routing."""

    ROLLOUT = "rollout"
    DRAINING = "draining"
    RELEASING = "releasing"
    LOADING = "loading"
    TRAIN = "train"
    UNLOADING = "unloading"
    RESUMING = "resuming"
    PENDING_WEIGHTS = "pending_weights"
    FAILED = "failed"


class Purpose(StrEnum):
    """Why a group runs: to train the policy, or to measure it on held-out tasks before / after."""

    TRAIN = "train"
    HELDOUT_BEFORE = "heldout_before"
    HELDOUT_AFTER = "heldout_after"


class GroupState(StrEnum):
    OPEN = "open"
    SETTLED = "settled"
    CONSUMED = "consumed"


class RunState(StrEnum):
    QUEUED = "queued"
    LIVE = "live"
    SETTLED = "settled"


class JobState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"


@record("leader")
@dataclass(frozen=True)
class LeaderRecord:
    node: NodeId
    address: str


@record("node")
@dataclass(frozen=True)
class NodeRecord:
    """A node that is there: the record hangs on the lease of its gyred."""

    node: NodeId
    address: str
    """Where its actors are reached by other nodes (gyre.actors.peers); empty where there are none."""
    incarnation: str
    """Which life of its gyred."""
    max_live: int
    """Runs live at a time; 0 when the node ends soon or has a `trouble`, and its queued runs are for others."""
    home: str = ""
    """Which folder of which machine its gyred runs from: only the same home takes the record of a node that is there."""
    trouble: str = ""
    """Why no run begins there until that has changed; empty where runs do."""


@record("child")
@dataclass(frozen=True)
class ChildRecord:
    """Where other nodes' processes reach a child process of a node. It hangs on the node's lease."""

    node: NodeId
    name: str
    address: str


@record("drain")
@dataclass(frozen=True)
class DrainRecord:
    """A person's word that a node gets no new run, and gives those away that have not begun."""

    node: NodeId
    within_s: float | None
    """So long the runs that live there may go on; then they begin again elsewhere. None: until they end."""


@record("core")
@dataclass(frozen=True)
class CoreRecord:
    """Which cell owns weights and optimizer. Written by the leader; a publication compares it."""

    cell: CellId
    node: NodeId


@record("cell_spec")
@dataclass(frozen=True)
class CellSpecRecord:
    cell: CellId
    node: NodeId
    slots: int
    """Runs that the cell's engine serves at a time without slowing."""


@record("cell_role")
@dataclass(frozen=True)
class CellRoleRecord:
    """Desired and observed role. `epoch` grows by one with each desired role; `token` is the leader's that wrote it."""

    desired: Role
    observed: Role
    epoch: int
    token: int
    traceparent: str
    version: int
    """The weight version the cell last reported; -1 before the first."""
    rested: int = 0
    """The last epoch in which the cell came to rest, wherever that was."""

    @property
    def came_back(self) -> bool:
        """The cell could not do what was ordered last, and serves or trains as before."""
        return self.rested == self.epoch and self.observed not in (self.desired, Role.FAILED)


@record("pin")
@dataclass(frozen=True)
class PinRecord:
    """A person's word that a cell keeps one role, `rollout` or `train`, whatever the policy would do."""

    cell: CellId
    role: Role


@record("snapshot")
@dataclass(frozen=True)
class SnapshotRecord:
    """The authoritative weights. `version` only grows; `digest` is the manifest's; `node` is the first that held them."""

    version: int
    digest: str
    node: NodeId


@record("job")
@dataclass(frozen=True)
class JobRecord:
    name: str
    spec: str
    """The job file as JSON (gyre.config.JobSpec)."""
    state: JobState
    reason: str
    launched_groups: int
    """Training groups launched since the job began; survives restarts."""
    consumed_groups: int
    """Training groups whose batch was stepped on (or that trained nothing), since the job began."""
    heldout_before: float | None
    heldout_after: float | None
    started_unix_s: float
    active_s: float
    """Seconds the job was worked on, earlier `gyrectl up` included; written with each step and at the end."""


@record("current_job")
@dataclass(frozen=True)
class CurrentJobRecord:
    """The job that a cluster's nodes work on; `spec` is the job file as JSON."""

    name: str
    spec: str


@record("waiting")
@dataclass(frozen=True)
class WaitingRecord:
    """A node that is there and works on no job. It hangs on the lease of its gyred."""

    node: NodeId
    address: str
    cells: int
    gyre: str
    """Its version."""


@record("secret")
@dataclass(frozen=True)
class SecretRecord:
    """What the processes of one cluster show each other beside their certificates."""

    secret: str


@record("step")
@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, written in the transaction that publishes its snapshot."""

    step: int
    version: int
    """The version it produced."""
    groups: tuple[GroupId, ...]
    scored_runs: int
    mean_reward: float
    counted_tokens: int
    micro_steps: int
    cells: tuple[CellId, ...]
    """The cells whose gradient sums are in it."""
    metrics: dict[str, float]
    """loss, grad_norm, clip_fraction, kl, max_lag, …"""
    finished_unix_s: float


@record("group")
@dataclass(frozen=True)
class GroupRecord:
    group: GroupId
    task: TaskId
    purpose: Purpose
    index: int
    """The task's place in its stream: `TaskSource.train(index)` or `heldout()[index]`."""
    runs: tuple[RunId, ...]
    state: GroupState
    version: int
    """The snapshot version at its launch."""
    step: int
    """The step that consumed it; 0 until then."""


@record("run")
@dataclass(frozen=True)
class RunRecord:
    run: RunId
    group: GroupId
    state: RunState
    attempt: int
    node: NodeId
    """Where it waits, lives or has lived; empty while no node has room for it."""
    outcome: Outcome | None
    reward: float | None
    reason: str
    """Why it ended as it did, for people; empty when there is nothing to say."""
    trace: RunTrace | None
    started_unix_s: float
    ended_unix_s: float
    failed_on: tuple[NodeId, ...] = ()
    """Nodes where an attempt failed through no fault of its own: the next begins on another, while one takes runs."""


@record("stage")
@dataclass(frozen=True)
class StageRecord:
    stage: str
    seconds: float


@record("switch")
@dataclass(frozen=True)
class SwitchRecord:
    """One role switch, written when it ends."""

    switch: SwitchId
    cell: CellId
    epoch: int
    start: Role
    end: Role
    """The role it reached; other than the desired one when it failed."""
    desired: Role
    started_unix_s: float
    ended_unix_s: float
    stages: tuple[StageRecord, ...]
    trace_id: str
    moved_requests: int
    moved_blocks: int
    moved_bytes: int
    max_silence_s: float
    reason: str


def current_key(cluster: str) -> str:
    """Of a cluster's CurrentJobRecord."""
    return f"/gyre/{cluster}/current"


def waiting_prefix(cluster: str) -> str:
    """Of the WaitingRecords of a cluster's nodes."""
    return f"/gyre/{cluster}/waiting/"


def secret_key(cluster: str) -> str:
    return f"/gyre/{cluster}/secret"


@dataclass(frozen=True)
class Keys:
    """Every key path of one job, in one place."""

    cluster: str

    @property
    def root(self) -> str:
        return f"/gyre/{self.cluster}/"

    @property
    def leader(self) -> str:
        return f"{self.root}leader"

    @property
    def snapshot(self) -> str:
        return f"{self.root}snapshot"

    @property
    def job(self) -> str:
        return f"{self.root}job"

    @property
    def core(self) -> str:
        return f"{self.root}core"

    @property
    def nodes(self) -> str:
        """Prefix of the node records."""
        return f"{self.root}nodes/"

    def node(self, node: NodeId) -> str:
        return f"{self.nodes}{node}"

    @property
    def children(self) -> str:
        """Prefix of the child records."""
        return f"{self.root}children/"

    def child(self, node: NodeId, name: str) -> str:
        return f"{self.children}{node}/{name}"

    @property
    def drains(self) -> str:
        """Prefix of the drain records."""
        return f"{self.root}drains/"

    def drain(self, node: NodeId) -> str:
        return f"{self.drains}{node}"

    @property
    def cells(self) -> str:
        """Prefix of the cells' specs, which every node watches."""
        return f"{self.root}cells/"

    def cell_spec(self, cell: CellId) -> str:
        return f"{self.cells}{cell}"

    @property
    def roles(self) -> str:
        """Prefix of the cells' roles, which change all the time: apart from the specs, so that few hear of it."""
        return f"{self.root}roles/"

    def cell_role(self, cell: CellId) -> str:
        return f"{self.roles}{cell}"

    def cell_of(self, role: str) -> CellId:
        """The cell whose role lies at the key `role`."""
        return CellId(role.removeprefix(self.roles))

    def pin(self, cell: CellId) -> str:
        return f"{self.root}pins/{cell}"

    def step(self, step: int) -> str:
        return f"{self.root}steps/{step:08d}"

    def group(self, group: GroupId) -> str:
        return f"{self.root}groups/{group}"

    def run(self, run: RunId) -> str:
        return f"{self.root}runs/{run}"

    def switch(self, switch: SwitchId) -> str:
        return f"{self.root}switches/{switch}"
