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

from gyre.actors.messages import EngineRoute, GatewayStatus, OpenRun
from gyre.actors.outside import Outside
from gyre.actors.remote import RemoteRef
from gyre.actors.runtime import LocalRef
from gyre.children import Children
from gyre.config import JobSpec
from gyre.harness.confine import Sandbox
from gyre.harness.launch import Launcher
from gyre.harness.tasks import Task, TaskSource
from gyre.ids import CellId, NodeId, RunId
from gyre.jobdir import JobDir
from gyre.store.records import Keys, Purpose
from gyre.store.typed import TypedStore
from gyre.telemetry.tracing import Tracing

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
    outside: Outside = field(default_factory=Outside)
    began_s: float = field(init=False)
    events: deque[str] = field(default_factory=lambda: deque[str](maxlen=EVENTS_KEPT))
    refs: dict[str, LocalRef] = field(default_factory=dict[str, LocalRef])

    def __post_init__(self) -> None:
        self.began_s = self.outside.monotonic_s()

    def say(self, line: str) -> None:
        """Tell people what happened: in the log, and in the live view."""
        log.info("%s", line)
        self.events.append(f"{time.strftime('%H:%M:%S')} {line}")

    routes: dict[CellId, EngineRoute] = field(default_factory=dict[CellId, EngineRoute])
    """How each engine may be used, as its cell last told; kept here so that it outlives the gateway's actor."""
    open_runs: dict[RunId, OpenRun] = field(default_factory=dict[RunId, OpenRun])
    """The runs that the gateway was told to let in and not yet to close; kept here for the same reason."""
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an engine has been open to the gateway."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an engine serves and the harness is warm: from then on a run's clock may start."""
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

    @property
    def gateway(self) -> LocalRef:
        return self.refs["gateway"]

    @property
    def core(self) -> LocalRef:
        return self.refs["core"]

    @property
    def scheduler(self) -> LocalRef:
        return self.refs["scheduler"]

    def cell(self, cell: CellId) -> LocalRef:
        return self.refs[f"cell-{cell}"]

    @property
    def cells(self) -> tuple[CellId, ...]:
        """The node's cells; the first is the core."""
        return tuple(CellId(f"c{index}") for index in range(self.spec.cells.count))

    @property
    def core_cell(self) -> CellId:
        return self.cells[0]

    def child_address(self, name: str) -> str:
        """Where the actor in child process `name` is reached."""
        return self.job.address(name)

    def connect(self, name: str) -> RemoteRef:
        """A reference to the actor in child process `name`."""
        return self.outside.connect(self.child_address(name), self.secret)
