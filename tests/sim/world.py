"""One simulated job: nodes, their actors, the store and the network on one loop, and the faults of a seed.

    report = simulate(seed)             # with the seed's own faults
    report = simulate(seed, faults)     # with these
    assert not report.violation, report

The actors are the product's. What they would start, connect to or ask outside is of the modules beside this one.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from gyre.actors import claims, scheduler
from gyre.actors import node as node_module
from gyre.actors.cell import CellActor
from gyre.actors.core import CoreActor
from gyre.actors.daemon import STOP_S, first_snapshot, stop_people
from gyre.actors.directory import Directory
from gyre.actors.gateway import GatewayActor
from gyre.actors.mailbox import Broken
from gyre.actors.membership import MembershipActor
from gyre.actors.messages import GetLineages, Lineages, Place
from gyre.actors.messages_replica import MicroStep
from gyre.actors.node import NodeActor
from gyre.actors.outside import Outside
from gyre.actors.runtime import Actor, ActorSystem, Backoff, LocalRef, Ref
from gyre.actors.scheduler import SchedulerActor
from gyre.actors.site import Site
from gyre.actors.supervision import Failure
from gyre.children import ChildSpec, ExitStatus
from gyre.config import (
    BatchSection,
    CellsSection,
    HarnessSection,
    JobSection,
    JobSpec,
    JournalSection,
    LimitsSection,
    ModelSection,
    TasksSection,
)
from gyre.errors import GyreError, NameTaken, OthersAway, Refused, Unavailable
from gyre.harness.confine import UNCONFINED
from gyre.harness.evaluate import Evaluation
from gyre.harness.launch import HarnessExit
from gyre.harness.tasks import Task
from gyre.harness.workspace import RunFolder
from gyre.ids import CellId, NodeId, RunId, TaskId
from gyre.jobdir import JobDir
from gyre.sched.placement import NOWHERE
from gyre.store import typed
from gyre.store.protocol import KeyValue, Txn
from gyre.store.records import CellRoleRecord, JobRecord, JobState, Keys, RunRecord, RunState
from gyre.store.typed import TypedStore
from gyre.train.snapshot import snapshot_path

from . import faults as f
from .engine import Engine, EngineClient
from .faults import QUIET_S, Fault, Kind, Layout
from .gateway import Gateway, Journal
from .harness import Launcher
from .loop import Process, SimLoop, Stuck
from .machine import Child, Children, Machine, Served
from .net import FAR_S, Network, SimRef, Target
from .replica import Replica
from .runs import reward_of
from .store import PLACE, Client, Server, now
from .watch import Watch

SETTLE_S = 400.0
"""From the last fault on, for the job to end."""
STOP_ALL_S = 60.0
GATEWAY_S = 20.0
"""As long as gyre.actors.replica_process asks for a gateway that is not there."""
TROUBLE_S = 12.0
"""After a fault, for who was hurt by it to be as before: a node's lease, and some time to join again."""


COMPACT_EVERY_S = 0.4
TWIN_GOES_S = 26.0
"""For a twin's lease to end, and for who has waited for that to be started again."""
_HURTS_NOBODY = (Kind.COMPACT, Kind.TWIN)
"""Of these nobody may take longer than without. A twin that joins is another matter."""
AGAIN_S = 3.0
"""As long as systemd waits before it starts a gyred that has ended again."""


@dataclass(frozen=True)
class Report:
    seed: int
    faults: tuple[Fault, ...]
    violation: str
    """Empty where every invariant held."""
    virtual_s: float
    turns: int
    digest: str
    """Of everything that was said and written, in order: equal in every replay."""
    said: tuple[str, ...]

    def __str__(self) -> str:
        events = "\n".join(f"    {fault}" for fault in self.faults) or "    (none)"
        said = "\n".join(f"    {line}" for line in self.said)
        return f"seed {self.seed}: {self.violation}\n  faults:\n{events}\n  what was said last:\n{said}"


def job_spec(seed: int, layout: Layout) -> JobSpec:
    rng = random.Random(f"job {seed}")
    return JobSpec(
        job=JobSection(name="sim", steps=2),
        model=ModelSection(path="builtin:tiny"),
        tasks=TasksSection(source="builtin:chores", heldout=rng.choice((0, 1))),
        harness=HarnessSection(profile="scripted", max_live=4, attempts=8),
        cells=CellsSection(count=len(layout.cells), slots=2),
        batch=BatchSection(
            groups=2, group_size=rng.choice((2, 3)), staleness=rng.choice((0, 1)), micro_step_tokens=64, claim_s=10.0
        ),
        limits=LimitsSection(run_s=300.0, evaluator_s=5.0),
        journal=JournalSection(copies=rng.choice((0, 1, 1, 1))),
    )


class NoTasks:
    name = "none"
    private_folders: tuple[Path, ...] = ()

    def train(self, index: int) -> Task:
        return Task(TaskId(f"train-{index}"), "do nothing", {}, ("true",), b"{}")

    def heldout(self) -> list[Task]:
        return [Task(TaskId("heldout-0"), "do nothing", {}, ("true",), b"{}")]


class SimOutside(Outside):
    def __init__(self, world: World, node: Node, process: Process) -> None:
        self._world = world
        self._node = node
        self._process = process

    def unix_s(self) -> float:
        return 1.8e9 + self._world.loop.time() + self._node.clock_s

    def monotonic_s(self) -> float:
        return self._world.loop.time()

    async def no_room(self, folder: Path) -> str:
        return ""

    def connect(self, address: str, secret: str) -> Any:
        return self._world.child_ref(self._process, self._node.name, address)

    def engine(self, url: str, key: str, kind: str) -> Any:
        return EngineClient(self._world, self._process, self._node.name, url)

    async def evaluate(self, task: Task, folder: RunFolder, *_: Any) -> Evaluation:
        await asyncio.sleep(self._world.rng.random() * 0.5)
        return Evaluation(reward_of(folder.run), "")

    async def end_marked(self, mark: str) -> None:
        await asyncio.sleep(0)


@dataclass(eq=False)
class SimSpan:
    tracing: SimTracing
    name: str
    trace_id: str

    @property
    def traceparent(self) -> str:
        return self.trace_id

    def set(self, **attributes: object) -> None: ...

    def fail(self, error: str) -> None: ...

    def end(self, error: str = "") -> None:
        self.tracing.open.pop(id(self), None)


class SimTracing:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.open: dict[int, SimSpan] = {}
        self._spans = 0

    def start(self, name: str, parent_traceparent: str = "", **attributes: object) -> SimSpan:
        self._spans += 1
        span = SimSpan(self, name, parent_traceparent or f"{self.process.name}.{self._spans}")
        self.open[id(span)] = span
        return span

    @contextmanager
    def span(self, name: str, parent_traceparent: str = "", **attributes: object) -> Generator[SimSpan]:
        span = self.start(name, parent_traceparent)
        try:
            yield span
        finally:
            span.end()


class SimSite(Site):
    """A site of one of several nodes: who is elsewhere is reached over the network."""

    world: World
    name: str
    process: Process
    targets: dict[LocalRef, Target]
    """What leads here to this gyred's actors."""
    held: Holder  # type: ignore[assignment]

    def _tell(self, level: int, line: str) -> None:
        self.world.say(self.name, line)

    def _at(self, node: NodeId | None, actor: str) -> Ref | None:
        if node is None or node == self.node:
            return self.refs.get(actor) if node is not None else None
        if self.directory.node(node) is None:
            return None
        return self.world.actor_ref(self, node, actor)

    @property
    def has_copies(self) -> bool:
        return len(self.world.nodes) > 1 and self.spec.journal.copies > 0

    def far_addresses(self) -> dict[str, str]:
        return dict(self.world.nodes[self.name].machine.far)

    def child_address(self, name: str) -> str:
        return f"sim:{self.name}/{name}"


class Holder:
    """gyre.actors.held.HeldSnapshots: whatever is asked for comes."""

    def __init__(self, world: World, job: JobDir) -> None:
        self._world = world
        self._job = job

    @asynccontextmanager
    async def held(self, version: int, *, torn: bool = False) -> AsyncIterator[Path]:
        yield await self._hold(version)

    async def _hold(self, version: int) -> Path:
        path = snapshot_path(self._job.snapshots, version)
        if not path.is_dir():
            await asyncio.sleep(self._world.rng.random() * 0.3)
            path.mkdir(exist_ok=True)
        return path

    async def have(self, version: int, digest: str, first: NodeId) -> Path:
        return await self._hold(version)


@dataclass(eq=False)
class Node:
    """A node: its machine, and the gyred that runs there now."""

    name: str
    machine: Machine
    clock_s: float = 0.0
    process: Process | None = None
    lives: int = 0
    site: SimSite | None = None
    system: ActorSystem | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    gyred: asyncio.Task[None] | None = None
    tracing: SimTracing | None = None
    dead: bool = False
    """For good, and its disk with it."""
    twin_until_s: float = 0.0
    """Until then the cluster may have another gyred under this name."""
    troubled_until_s: float = 0.0
    """Until then what others expect of it may take longer than it should."""

    @property
    def ready(self) -> bool:
        """Whether it begins runs."""
        return self.process is not None and self.process.alive and self.site is not None and self.site.ready.is_set()

    def token(self) -> int:
        """By which its scheduler leads; 0 when it does not."""
        host = self.system.roots.get("scheduler") if self.system is not None and self.site is not None else None
        scheduler = host._actor if host is not None else None
        return scheduler.term.token if isinstance(scheduler, SchedulerActor) else 0


class World:
    def __init__(self, seed: int, faults: Sequence[Fault], folder: Path) -> None:
        self.seed = seed
        self.faults = faults
        self.loop = SimLoop()
        self.rng = random.Random(f"world {seed}")
        self.layout = f.layout(seed)
        self.spec = job_spec(seed, self.layout)
        self.keys = Keys("sim")
        self.net = Network(self.loop, random.Random(f"net {seed}"))
        self.server = Server()
        self.watch = Watch(self)
        self.folder = folder
        self.nodes = {name: Node(name, Machine(self, name, Journal(), made)) for name in self.layout.nodes}
        self.tokens = count(1)
        """No token is sampled twice, so that what is trained tells by whom it was sampled."""
        self.sums: dict[str, tuple[MicroStep, ...]] = {}
        """What goes from replica to replica beside the messages, by transfer."""
        self.said: deque[str] = deque(maxlen=60)
        self._digest = hashlib.sha256()
        self._pids = 100
        self._stages: dict[str, deque[Fault]] = {}
        self._at_writes: list[Fault] = []
        self._disturbed_until_s = 0.0
        self.finished = False
        self._context = Process("faults").context

    # ------------------------------------------------------------------ the course of it

    async def play(self) -> None:
        for name in self.nodes:
            self._start_gyred(name)
        for fault in self.faults:
            self.loop.call_at(fault.at_s, self._strike, fault)
        end_s = max([0.0, *(fault.at_s + fault.for_s for fault in self.faults)]) + SETTLE_S
        while not self.watch.first and not self._job_over():
            if self.loop.time() > end_s:
                self.watch.violated("the job has not ended, and nothing has gone wrong for long")
            self.watch.look()
            await asyncio.sleep(3.0)
        if not self.watch.first:
            self.finished = True
            await self._end()
            self.watch.look()
            self.watch.settled()

    def _job_over(self) -> bool:
        kv = now(self.server.get(self.keys.job))
        return kv is not None and typed.versioned(kv, JobRecord).record.state in (JobState.FINISHED, JobState.FAILED)

    async def _end(self) -> None:
        """Every node leaves by itself, for the job has ended; those that are killed or stopped come back first."""
        end_s = self.loop.time() + STOP_ALL_S
        for node in self.nodes.values():
            if node.process is not None and node.process.stopped:
                self.loop.continue_process(node.process)
        while left := [node.name for node in self.living() if node.gyred is None or not node.gyred.done()]:
            if self.loop.time() > end_s:
                self.watch.violated(f"gyred of {left} does not end")
                return
            await asyncio.sleep(0.2)

    def say(self, node: str, line: str) -> None:
        text = f"{self.loop.time():7.3f} {node}: {line}"
        self._digest.update(text.encode())
        self.said.append(text)

    @property
    def digest(self) -> str:
        self._digest.update(f"{self.loop.time()} {self.loop.turns} {self.watch.commits}".encode())
        return self._digest.hexdigest()[:16]

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    # ------------------------------------------------------------------ gyred

    def _start_gyred(self, name: str) -> None:
        node = self.nodes[name]
        node.lives += 1
        node.process = process = Process(f"gyred {name}.{node.lives}")
        node.ended = asyncio.Event()
        node.gyred = self.loop.start(process, self._gyred(node, process), f"{name}")

    async def _gyred(self, node: Node, process: Process) -> None:
        site = self._site(node, process)
        node.site = site

        def failed(failure: Failure) -> None:
            self._failed(node.name, failure)

        try:
            async with ActorSystem.running(node.name, on_failure=failed, stop_s=STOP_S) as system:
                node.system = system
                await self._people(node, site, system)
                await node.ended.wait()
                site.stopping = True
                await stop_people(site)
        except GyreError as error:
            self.say(node.name, f"gyred ends: {error}")
            self.watch.violated(f"gyred of {node.name} ends: {error}")

    def _failed(self, node: str, failure: Failure) -> None:
        self.say(node, f"{failure.actor} failed in {failure.during}: {failure.error}")
        if not f.explains(failure):
            self.watch.violated(
                f"{failure.actor} failed in {failure.during} by itself: {failure.error}\n{failure.trace}"
            )
        elif failure.restart_in_s is None:
            self.watch.violated(f"{failure.actor} gives up after {failure.during}: {failure.error}")

    async def _people(self, node: Node, site: SimSite, system: ActorSystem) -> None:
        restart = Backoff()

        def spawn_core(factory: Callable[[], CoreActor]) -> LocalRef:
            return system.spawn("core", factory, restart=restart)

        def spawn(name: str, factory: Callable[[], Actor]) -> None:
            site.refs[name] = system.spawn(name, factory, restart=restart)

        def taken(error: NameTaken) -> None:
            """Its gyred ends, and is started again until the other is gone."""
            if self.loop.time() > node.twin_until_s:
                self.watch.violated(f"{node.name} is not let in under its own name: {error}")
            self.later(0.0, lambda: self._crash(node.name))
            self.later(AGAIN_S, lambda: self._back(node.name))

        spawn("member", lambda: MembershipActor(site, spawn_core, taken))
        await site.joined.wait()
        spawn("scheduler", lambda: SchedulerActor(site))
        await first_snapshot(site)
        spawn("gateway", lambda: GatewayActor(site))
        for cell in site.cells:
            spawn(f"cell-{cell}", lambda cell=cell: CellActor(site, cell))
        spawn("node", lambda: NodeActor(site, node.ended))

    async def _twin(self, name: str, process: Process) -> None:
        """A gyred with the name of another node, from a home of its own. Where it has joined, for the node's own has been
        away for long, somebody notices and ends it."""
        home = f"elsewhere {process.name}"
        site = self._site(Node(name, Machine(self, home, Journal(), made)), process, home)

        def spawn_core(factory: Callable[[], CoreActor]) -> LocalRef:
            assert site.joined.is_set(), "it acts in the name of another node"
            return system.spawn("core", factory)

        async with ActorSystem.running(home, on_failure=lambda failure: self._failed(name, failure)) as system:
            system.spawn("member", lambda: MembershipActor(site, spawn_core, lambda _: None), restart=Backoff())
            await site.joined.wait()
            self._disturb(TWIN_GOES_S)
            self.nodes[name].troubled_until_s = self.loop.time() + TWIN_GOES_S + TROUBLE_S
            self.loop.kill(process)
            await asyncio.Event().wait()

    def _site(self, node: Node, process: Process, home: str = "") -> SimSite:
        """`home` is another than that of the node's own gyred for its twin."""
        node.tracing = tracing = SimTracing(process)
        place = home or node.name
        client = Client(self.server, self.net, self.rng, place, process, self.watch.written, self.at_write)
        kv, store = now(self.server.get(self.keys.job)), TypedStore(client)
        site = SimSite(
            node=NodeId(node.name),
            spec=self.spec,
            job=self.job_of(node.name),
            base=self.folder,
            model_dir=self.folder,
            keys=self.keys,
            store=store,
            children=Children(node.machine),  # type: ignore[arg-type]
            tracing=tracing,  # type: ignore[arg-type]
            secret="secret",
            source=NoTasks(),
            sandbox=UNCONFINED,
            launcher=Launcher(node.machine),  # type: ignore[arg-type]
            hidden=(),
            active_before_s=typed.versioned(kv, JobRecord).record.active_s if kv else 0.0,
            cells=self.cells_of(node.name),
            directory=Directory(store, self.keys),
            outside=SimOutside(self, node, process),
            home=home,
        )
        site.world, site.name, site.process, site.targets = self, node.name, process, {}
        site.held = Holder(self, site.job)
        return site

    # ------------------------------------------------------------------ who is reached how

    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.dead]

    def job_of(self, node: str) -> JobDir:
        return JobDir(self.folder / node)

    def cells_of(self, node: str) -> tuple[CellId, ...]:
        return tuple(CellId(f"c{index}") for index, place in enumerate(self.layout.cells) if place == node)

    def _ref(self, source: Process, place: str, name: str, find: Any, *, repeats: bool = False) -> Any:
        return SimRef(self.net, source, place, name, find, repeats=repeats)

    def actor_ref(self, site: SimSite, node: NodeId, actor: str) -> Any:
        return self._ref(site.process, site.name, f"{node}/{actor}", lambda: self._actor(node, actor))

    def _actor(self, place: str, name: str) -> Target | None:
        node = self.nodes[place]
        if node.process is None or not node.process.alive or node.site is None:
            return None
        ref = node.site.refs.get(name)
        if not isinstance(ref, LocalRef):
            return None
        target = node.site.targets.get(ref)
        if target is None:
            target = Target(place, node.process, lambda message, left_s: ref.ask(message, left_s, object), ref.tell)
            node.site.targets[ref] = target
        return target

    def child_ref(self, source: Process, place: str, address: str) -> Any:
        where, name = address.removeprefix("sim:").split("/")[:2]
        pid = address.split("/")[2:]

        def find() -> Target | None:
            served = self.nodes[where].machine.served.get(name)
            if served is None or not served.child.alive or (pid and pid[0] != str(served.child.pid)):
                return None
            return served.target

        return self._ref(source, place, name, find, repeats=place == where and name == "gateway")

    def gateway_ref(self, source: Process, place: str) -> Any:
        """The gateway of the node, as a harness there reaches it."""
        return self._ref(source, place, "gateway", lambda: self._gateway(place))

    def _gateway(self, node: str) -> Target | None:
        served = self.nodes[node].machine.served.get("gateway")
        return None if served is None else served.target

    async def lineages(self, replica: Served, gateway: Place, wanted: GetLineages) -> Lineages:
        ref = self.child_ref(replica.child.process, replica.machine.name, gateway.address)
        until_s = self.loop.time() + GATEWAY_S
        while True:
            try:
                return await ref.ask(wanted, 60.0, Lineages)
            except Unavailable as error:
                if self.loop.time() > until_s:
                    raise OthersAway(f"the lineages of {wanted.run} are not to be had: {error}") from error
            await asyncio.sleep(0.2)

    # ------------------------------------------------------------------ what the invariants look at

    def leading(self) -> int:
        kv = now(self.server.get(self.keys.leader))
        return 0 if kv is None else kv.create_revision

    def run_record(self, run: RunId) -> RunRecord | None:
        kv = now(self.server.get(self.keys.run(run)))
        return None if kv is None else typed.versioned(kv, RunRecord).record

    def run_records(self) -> list[RunRecord]:
        page = now(self.server.range(f"{self.keys.root}runs/"))
        return [typed.versioned(kv, RunRecord).record for kv in page.items]

    def role_records(self) -> list[tuple[CellId, CellRoleRecord]]:
        page = now(self.server.range(self.keys.roles))
        return [(self.keys.cell_of(kv.key), typed.versioned(kv, CellRoleRecord).record) for kv in page.items]

    def routed(self, cell: CellId) -> bool:
        """Whether every gateway that has runs gives requests to the cell's engine, if that is there."""
        if self.nodes[self.layout.cells[int(cell[1:])]].dead:
            return True
        gateways = [node.machine.served.get("gateway") for node in self.nodes.values() if node.ready]
        return all(isinstance(gateway, Gateway) and gateway.engines.open(cell) for gateway in gateways)

    def has_room(self, node: NodeId, runs: Sequence[RunRecord]) -> bool:
        """Whether the node, or any where none is named, can begin one more run."""
        live = Counter(run.node for run in runs if run.state is RunState.LIVE)
        able = [NodeId(each.name) for each in self.nodes.values() if each.ready]
        return any(live[each] < self.spec.harness.max_live for each in able if node in (each, NOWHERE))

    def harness_lives(self, run: RunRecord) -> bool:
        if not run.node:
            return False
        harness = self.nodes[run.node].machine.harnesses.get((run.run, run.attempt))
        return harness is not None and harness.exit is None

    def disturbed(self) -> bool:
        return self.loop.time() < self._disturbed_until_s

    def begins(self, node: str) -> bool:
        """Whether the node's gyred is there, and not as far yet that it sees to its runs."""
        there = self.nodes[node].process
        return there is not None and there.alive and not self.nodes[node].ready

    def later(self, s: float, call: Callable[[], None]) -> None:
        """In the name of nobody who can be killed."""
        self.loop.call_later(s, call, context=self._context)

    def troubled(self, *nodes: str) -> bool:
        """Whether one of them was hurt a moment ago, or is."""
        time_s = self.loop.time()
        return any(time_s < self.nodes[node].troubled_until_s for node in nodes)

    def open_spans(self) -> Iterator[tuple[str, str]]:
        for node in self.nodes.values():
            if node.tracing is not None and node.process is not None and node.process.alive:
                for span in node.tracing.open.values():
                    yield node.name, span.name

    # ------------------------------------------------------------------ faults

    async def stage(self, name: str, cell: CellId) -> None:
        """Where a stage of a child may be slow or fail, when a fault says so."""
        waiting = self._stages.get(f"{name} {cell}")
        if not waiting:
            return
        fault = waiting.popleft()
        if fault.kind is Kind.SLOW:
            self._disturb(fault.amount)
            await asyncio.sleep(fault.amount)
        else:
            self._disturb(0.0)
            raise Refused(f"fault: {name} fails")

    def at_write(self, place: str, txn: Txn) -> bool:
        """A fault that waits for such a write strikes. Whether the write is on its way."""
        for fault in self._at_writes:
            node, part = fault.where.split()
            if node == place and any(part in put.key for put in txn.puts) and not self.finished:
                self._at_writes.remove(fault)
                self._disturb(fault.for_s)
                self._trouble(fault)
                self.say("world", f"now: {fault}")
                return self._struck(fault, node)
        return True

    def _struck(self, fault: Fault, node: str) -> bool:
        if fault.kind is Kind.CRASH_AT_WRITE:
            self.loop.call_soon(self._crash, node, context=self._context)
            self.loop.call_later(fault.for_s, self._back, node, context=self._context)
            return bool(fault.amount)
        # A write that is carried out is on its way when the link is cut; its answer is not.
        until_s = self.loop.time() + fault.for_s
        if fault.amount:
            self.net.cut(PLACE, node, until_s)
            self.loop.call_later(20 * FAR_S, self.net.cut, node, PLACE, until_s, context=self._context)
        else:
            self.net.cut(node, PLACE, until_s)
            self.net.cut(PLACE, node, until_s)
        return True

    def _disturb(self, for_s: float) -> None:
        self._disturbed_until_s = max(self._disturbed_until_s, self.loop.time() + for_s)

    def _trouble(self, fault: Fault) -> None:
        """Who is hurt by it, and until when; all are by what is about no node."""
        named = [word for word in fault.where.split() if word in self.nodes]
        for name in named or self.nodes:
            node = self.nodes[name]
            node.troubled_until_s = max(node.troubled_until_s, self.loop.time() + fault.for_s + TROUBLE_S)

    def _has(self, fault: Fault) -> bool:
        """Whether what the fault is about is there."""
        named = [word for word in fault.where.split() if word in ("n0", "n1", "n2")]
        return all(word in self.nodes and not self.nodes[word].dead for word in named)

    def _strike(self, fault: Fault) -> None:
        if self.finished or not self._has(fault):
            return
        loop, net, until_s = self.loop, self.net, self.loop.time() + fault.for_s
        if fault.kind not in _HURTS_NOBODY:
            self._disturb(fault.for_s)
            self._trouble(fault)
        self.say("world", str(fault))
        words = fault.where.split()
        match fault.kind:
            case Kind.CRASH:
                self._crash(fault.where)
                loop.call_later(fault.for_s, self._back, fault.where)
            case Kind.DIE:
                self._die(fault.where)
            case Kind.PAUSE:
                process = self.nodes[fault.where].process
                if process is not None and process.alive:
                    loop.stop_process(process)
                    loop.call_later(fault.for_s, loop.continue_process, process)
            case Kind.TWIN:
                process = Process(f"twin of {fault.where} at {fault.at_s}")
                loop.start(process, self._twin(fault.where, process), process.name)
                loop.call_later(fault.for_s, loop.kill, process)
                node = self.nodes[fault.where]
                node.twin_until_s = max(node.twin_until_s, until_s + TWIN_GOES_S)
            case Kind.ACTOR:
                system = self.nodes[words[0]].system
                process = self.nodes[words[0]].process
                host = system.roots.get(words[1]) if system is not None else None
                if host is not None and process is not None and process.alive:
                    host.put_own(Broken("fault", f.Injected()))
            case Kind.KILL:
                self._kill_child(words[0], words[1])
            case Kind.CUT | Kind.SEVER:
                net.cut(words[0], words[1], until_s)
                net.cut(words[1], words[0], until_s)
                if fault.kind is Kind.SEVER:
                    net.break_links(words[0], words[1])
            case Kind.CUT_ONE_WAY:
                net.cut(words[0], words[1], until_s)
            case Kind.BREAK:
                net.break_links(words[0], words[1])
            case Kind.SLOW_NET:
                net.slow(words[0], words[1], until_s, fault.amount)
                net.slow(words[1], words[0], until_s, fault.amount)
            case Kind.REPEAT:
                net.repeated_until_s = until_s
            case Kind.STORE_AWAY:
                self.server.away_until_s = max(until_s, self.server.away_until_s)
            case Kind.STORE_REFUSES:
                self.server.refuses_until_s = max(until_s, self.server.refuses_until_s)
            case Kind.STORE_FULL:
                self.server.full_until_s = max(until_s, self.server.full_until_s)
            case Kind.COMPACT:
                self._compact(until_s)
            case Kind.CUT_AT_WRITE | Kind.CRASH_AT_WRITE:
                self._at_writes.append(fault)
            case Kind.CLOCK:
                self.nodes[fault.where].clock_s += fault.amount
            case Kind.SLOW | Kind.FAIL:
                self._stages.setdefault(fault.where, deque()).append(fault)

    def _compact(self, until_s: float) -> None:
        self.server.forget()
        if self.loop.time() < until_s:
            self.later(COMPACT_EVERY_S, lambda: self._compact(until_s))

    def _crash(self, name: str) -> None:
        node = self.nodes[name]
        if node.process is not None and node.process.alive:
            self.loop.kill(node.process)
            self.net.died(node.process)
            node.system = node.site = None

    def _back(self, name: str) -> None:
        node = self.nodes[name]
        if not node.dead and (node.process is None or not node.process.alive):
            self._start_gyred(name)

    def _die(self, name: str) -> None:
        node = self.nodes[name]
        if self.layout.outlives([name, *(other.name for other in self.nodes.values() if other.dead)]):
            node.dead = True
            self._crash(name)
            node.machine.die()
            node.machine.journal.runs.clear()
            shutil.rmtree(self.job_of(name).root)

    def _kill_child(self, node: str, name: str) -> None:
        machine = self.nodes[node].machine
        if name == "harness":
            living = [harness for harness in machine.harnesses.values() if harness.exit is None]
            if living:
                self.rng.choice(living).leave(HarnessExit(lost=True))
            return
        child = machine.children.get(name)
        if child is not None:
            machine.end(child, ExitStatus(signal=9))


def process_of(node: Node) -> Process:
    assert node.process is not None
    return node.process


def made(machine: Machine, child: Child, spec: ChildSpec) -> Served:
    """What runs in a child process, by its name."""
    kind, _, cell = child.name.partition("-")
    match kind:
        case "engine":
            version = int(spec.argv[spec.argv.index("--version") + 1])
            ready = Path(spec.argv[spec.argv.index("--ready-file") + 1])
            return Engine(machine, child, CellId(cell), version, ready)
        case "replica":
            return Replica(machine, child, CellId(cell))
        case _:
            return Gateway(machine, child, spec)


def simulate(seed: int, faults: Sequence[Fault] | None = None) -> Report:
    """Play one job to its end, or to the first violation."""
    events = f.faults(seed) if faults is None else tuple(faults)
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="gyre-sim-", dir=base))
    with _quietly():
        world = World(seed, events, folder)
        try:
            _first_files(world)
            try:
                world.loop.run(world.play(), QUIET_S + 3 * SETTLE_S)
            except Stuck as error:
                world.watch.violated(str(error))
            return Report(
                seed, events, world.watch.first, world.loop.time(), world.loop.turns, world.digest, tuple(world.said)
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            del world


_OFTEN = {(scheduler, "TICK_S"): 1.0, (node_module, "GATEWAY_EVERY_S"): 3.0, (claims, "IDLE_S"): 0.6}
"""What the actors look at again and again, less often: a job is then played in half the time."""
_PAGE = 5
"""Records that the store gives at once: so few that a listing may take several pages."""


def _once(read: Callable[[KeyValue, type[Any]], Any]) -> Callable[[KeyValue, type[Any]], Any]:
    """`read`, which makes of a value in the store what it made of it before."""
    known: dict[tuple[int, type[Any]], tuple[KeyValue, Any]] = {}

    def again(kv: KeyValue, cls: type[Any]) -> Any:
        found = known.get((id(kv), cls))
        if found is None:
            found = known[id(kv), cls] = (kv, read(kv, cls))
        return found[1]

    return again


@contextmanager
def _quietly() -> Generator[None]:
    """For a job that is played: many actors read the same bytes, so records are unpacked once; what dies unawaited with
    its process is no news; and the log is what the report shows of it."""
    unpack, versioned, hook = typed.unpack, typed.versioned, sys.unraisablehook
    typed.unpack, typed.versioned = lru_cache(20_000)(unpack), _once(versioned)
    tasks = asyncio.tasks._all_tasks  # type: ignore[attr-defined]
    tasks.add = lambda _: None  # nobody asks for all of them, and the list is dear
    changed = {**_OFTEN, (typed, "_PAGE"): _PAGE}
    often = {(module, name): getattr(module, name) for module, name in changed}
    for (module, name), s in changed.items():
        setattr(module, name, s)
    sys.unraisablehook = lambda _: None
    logging.disable(logging.CRITICAL)
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            gc.collect(1)  # all that was made since
            gc.enable()
            logging.disable(logging.NOTSET)
            typed.unpack, typed.versioned, sys.unraisablehook = unpack, versioned, hook
            del tasks.add
            for (module, name), s in often.items():
                setattr(module, name, s)


def _first_files(world: World) -> None:
    for node in world.nodes:
        job = world.job_of(node)
        for made in (job.root, job.state, job.logs, job.journal, job.trajectories, job.snapshots, job.runs):
            made.mkdir(parents=True, exist_ok=True)
    (world.folder / "config.json").write_text("{}")
    (world.folder / "model.safetensors").write_bytes(b"weights")


def find_shortest(report: Report, tries: int = 60) -> Report:
    """The shortest part of a failing report's faults that still fails, and how."""
    best = report

    def fails(events: Sequence[Fault]) -> bool:
        nonlocal best
        again = simulate(report.seed, events)
        if again.violation:
            best = again
        return bool(again.violation)

    f.shortest(report.faults, fails, tries)
    return best
