"""What every actor of a node needs to know: the job, the folders, the store, and one another's references.

Built once by gyre.actors.node; actors take it and read from it. `events` is the short list of what happened that the
live view shows; the same lines go to the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gyre.actors.directory import Directory
from gyre.actors.elsewhere import Elsewhere
from gyre.actors.far import Far, read_address
from gyre.actors.held import HeldSnapshots
from gyre.actors.messages import EngineRoute, GatewayStatus, JobFailed, OpenRun, Place
from gyre.actors.messages_journals import CopyTo
from gyre.actors.outside import Outside
from gyre.actors.peers import Peers
from gyre.actors.remote import RemoteRef
from gyre.actors.runtime import LocalRef, Ref
from gyre.actors.snapshot_folders import SnapshotFolders
from gyre.actors.snapshot_service import Snapshots
from gyre.children import Children
from gyre.config import JobSpec
from gyre.credentials import Credentials
from gyre.harness.confine import Sandbox
from gyre.harness.launch import Launcher
from gyre.harness.tasks import Task, TaskSource
from gyre.ids import CellId, NodeId, RunId
from gyre.jobdir import JobDir, is_private
from gyre.store.records import Keys, Purpose
from gyre.store.typed import TypedStore
from gyre.telemetry.tracing import Tracing
from gyre.train.whole_folder import checkpoint_path

log = logging.getLogger("gyred")

EVENTS_KEPT = 200


@dataclass
class Site:
    node: NodeId
    spec: JobSpec
    job: JobDir
    base: Path
    """The folder that relative paths of the job file start from."""
    model_dir: Path
    keys: Keys
    store: TypedStore
    children: Children
    tracing: Tracing
    secret: str
    source: TaskSource
    sandbox: Sandbox
    launcher: Launcher
    hidden: tuple[Path, ...]
    """Folders that no run and no evaluator may see: the job's own, and those that hold answers."""
    active_before_s: float
    """Seconds the job was worked on before this gyred began."""
    cells: tuple[CellId, ...]
    """This node's own."""
    directory: Directory
    """Who is where, this node included."""
    host: str = "127.0.0.1"
    """Where this node's engines and processes are reached."""
    credentials: Credentials | None = None
    """Ours among the nodes; None where there is one node only."""
    snapshot_memory_bytes: int = 0
    """Of shared memory, for snapshots of other nodes; 0: they are on disk."""
    home: str = ""
    """Which folder of which machine our gyred runs from: no other gyred can have the same at the same time."""
    peers: Peers | None = None
    """The way to other nodes; None where there are none."""
    outside: Outside = field(default_factory=Outside)
    began_s: float = field(init=False)
    events: deque[str] = field(default_factory=lambda: deque[str](maxlen=EVENTS_KEPT))
    refs: dict[str, LocalRef] = field(default_factory=dict[str, LocalRef])
    """This node's actors, by the name under which other nodes reach them too."""
    failure: str = ""
    """Why the job cannot go on, as far as this node knows; the leader is told until it has written it down."""

    def __post_init__(self) -> None:
        self.began_s = self.outside.monotonic_s()

    def say(self, line: str) -> None:
        """Tell people what happened: in the log, and in the live view."""
        self._tell(logging.INFO, line)

    def warn(self, line: str) -> None:
        """The same of what may want something of them: an alarm of docs/operations.md."""
        self._tell(logging.WARNING, line)

    def _tell(self, level: int, line: str) -> None:
        log.log(level, "%s", line)
        self.events.append(f"{time.strftime('%H:%M:%S')} {line}")

    routes: dict[CellId, EngineRoute] = field(default_factory=dict[CellId, EngineRoute])
    """How each engine may be used, as its cell last told; kept here so that it outlives the gateway's actor."""
    open_runs: dict[RunId, OpenRun] = field(default_factory=dict[RunId, OpenRun])
    """The runs that the gateway was told to let in and not yet to close; kept here for the same reason."""
    copy_to: CopyTo | None = None
    """Where the gateway was told to have its journals copied; kept here for the same reason."""
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an engine has been open to the gateway."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an engine serves and the harness is warm: from then on a run's clock may start."""
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the cluster has our node's record: only then may anybody act in the node's name."""
    trouble: str = ""
    """Why no run begins here until that has changed; empty where runs do."""
    leaving: bool = False
    """The node ends soon: it begins no run any more."""
    stopping: bool = False
    """The job was told to end: what ends from now on ends because of that."""
    gateway_status: GatewayStatus | None = None
    """As last heard."""

    def task(self, purpose: Purpose, index: int) -> Task:
        """The task at `index` of its purpose's stream."""
        if purpose is Purpose.TRAIN:
            return self.source.train(index % self.spec.tasks.train if self.spec.tasks.train else index)
        return self.heldout[index]

    @cached_property
    def heldout(self) -> tuple[Task, ...]:
        return tuple(self.source.heldout())

    def active_s(self) -> float:
        """Seconds the job was worked on, earlier gyreds included."""
        return self.active_before_s + self.outside.monotonic_s() - self.began_s

    # ------------------------------------------------------------------------------------------ who is reached how

    @property
    def gateway(self) -> LocalRef:
        """This node's own."""
        return self.refs["gateway"]

    @cached_property
    def core(self) -> Ref:
        return Elsewhere("the core", lambda: self._at(self._core_node, "core"))

    @cached_property
    def scheduler(self) -> Ref:
        """The leader's."""
        return Elsewhere("the leader", lambda: self._at(self.directory.leader, "scheduler"))

    def cell(self, cell: CellId) -> Ref:
        return Elsewhere(str(cell), lambda: self._at(self.directory.node_of(cell), f"cell-{cell}"))

    def on(self, node: NodeId, actor: str) -> Ref:
        """An actor of a certain node."""
        return Elsewhere(f"{node}/{actor}", lambda: self._at(node, actor))

    def _at(self, node: NodeId | None, actor: str) -> Ref | None:
        if node is None:
            return None
        if node == self.node:
            return self.refs.get(actor)
        there = self.directory.node(node)
        if there is None or self.peers is None:
            return None
        return self.peers.ref(node, there.address, actor, there.incarnation)

    @property
    def has_copies(self) -> bool:
        """Whether journals have a copy at another node."""
        return self.credentials is not None and self.spec.journal.copies > 0

    @property
    def core_cell(self) -> CellId | None:
        core = self.directory.core
        return None if core is None else core.record.cell

    @cached_property
    def held(self) -> HeldSnapshots:
        def holder(node: NodeId) -> Ref:
            return self.on(node, "snapshots")

        def spares(version: int) -> list[Path]:
            staging = self.job.staging
            places = [staging, self.checkpoints] if is_private(staging) else [self.checkpoints]
            return [*(checkpoint_path(place, version) for place in places), self.model_dir]

        return HeldSnapshots(self.node, self.snapshots, self.model_dir, self.directory, holder, spares)

    @property
    def checkpoints(self) -> Path:
        """Where the core's replica keeps its state, which the next core goes on from if it reaches the folder too."""
        named = self.spec.checkpoint.dir
        return self.base / named / self.spec.job.name if named else self.job.checkpoints

    @cached_property
    def snapshots(self) -> Snapshots:
        job = self.job
        folders = SnapshotFolders(job.snapshots, job.snapshots_in_memory, self.snapshot_memory_bytes, self.warn)
        return Snapshots(folders)

    @property
    def _core_node(self) -> NodeId | None:
        core = self.directory.core
        return None if core is None else core.record.node

    def fail(self, reason: str) -> None:
        """The job cannot go on. The leader hears of it until it has written it down."""
        if not self.failure:
            self.failure = reason
            self.scheduler.tell(JobFailed(reason))

    def place(self, node: NodeId, child: str) -> Place | None:
        """Where a child process of ours reaches one of `node`; None while that is not known."""
        if node == self.node:
            return Place("", self.child_address(child))
        found = self.directory.child(node, child)
        return None if found is None else Place(f"{node}/{child}", found.address)

    def far(self, child: str) -> dict[str, str] | None:
        """What our child process has to know of those of other nodes (gyre.actors.far); None where there are none."""
        if self.credentials is None:
            return None
        paths = (self.credentials.ca, self.credentials.certificate, self.credentials.key)
        ca, certificate, key = map(str, paths)
        return Far(f"{self.node}/{child}", ca, certificate, key, self.host, str(self._far_file(child))).to_plain()

    def far_addresses(self) -> dict[str, str]:
        """Where other nodes' processes reach our children, as far as those have told, by their names."""
        if self.credentials is None:
            return {}
        names = ("gateway", *(f"replica-{cell}" for cell in self.cells))
        return {name: address for name in names if (address := read_address(self._far_file(name)))}

    def _far_file(self, child: str) -> Path:
        return self.job.state / f"{child}.far.json"

    def child_address(self, name: str) -> str:
        """Where the actor in child process `name` is reached."""
        return self.job.address(name)

    def connect(self, name: str) -> RemoteRef:
        """A reference to the actor in child process `name`."""
        return self.outside.connect(self.child_address(name), self.secret)
