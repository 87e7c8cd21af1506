"""What stands in for a node's child processes: engine, replica, gateway and harness, each with its rules built in.

They live through the death of the gyred that started them, and the next one adopts them. What they do wrong is a
violation at once: an engine that gives its memory back under a request, a micro-step that is merged twice.
"""

from __future__ import annotations

import asyncio
import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.actors.messages import (
    CloseRun,
    DrainEngine,
    DrainReport,
    DropOwnSums,
    DropSums,
    GatewayStatus,
    GetGatewayStatus,
    GetLineages,
    Lineages,
    LoadSnapshot,
    MergeSums,
    MicroStepDone,
    Offload,
    Ok,
    OpenRun,
    OptimizerStep,
    Ping,
    Ready,
    RunMicroStep,
    SetRoutes,
    ShipSums,
    StageSums,
    StepDone,
    SumsShipped,
)
from gyre.children import ChildSpec, ExitStatus
from gyre.engine.records import EngineGone, EngineInfo, EngineRefused
from gyre.errors import GyreError, Refused, Unavailable
from gyre.harness.launch import HarnessExit
from gyre.harness.workspace import RunFolder
from gyre.ids import CellId, MicroStepId, RunId
from gyre.trajectory.records import LineageInfo, LineageRole, RunTrace

from .loop import Process

if TYPE_CHECKING:
    from .world import World

LINEAGE_TOKENS = 40
COUNTED_TOKENS = 10
CALLS = 2
TOKEN_S = 0.1


@dataclass(eq=False)
class Child:
    """One child process, as gyre.children shows it."""

    name: str
    pid: int
    process: Process
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    exit: ExitStatus | None = None

    @property
    def alive(self) -> bool:
        return self.exit is None

    async def wait(self) -> ExitStatus:
        await self.ended.wait()
        assert self.exit is not None
        return self.exit


class Machine:
    """A node's children and its processes' folder. It outlives every gyred of the node."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.children: dict[str, Child] = {}
        self.served: dict[str, Served] = {}
        """What each living child is, by name."""
        self.harnesses: dict[tuple[RunId, int], Harness] = {}
        self.journal = Journal()

    def end(self, child: Child, status: ExitStatus) -> None:
        if child.alive:
            child.exit = status
            served = self.served.pop(child.name, None)
            self.world.loop.kill(child.process)
            self.world.net.died(child.process)
            if served is not None:
                served.died()
            child.ended.set()


class Children:
    """gyre.children.Children of one node."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def adopt(self) -> dict[str, SimChild]:
        return {name: SimChild(self._machine, child) for name, child in sorted(self._machine.children.items())}

    async def start(self, spec: ChildSpec) -> SimChild:
        machine = self._machine
        before = machine.children.get(spec.name)
        if before is not None and before.alive:
            raise Refused(f"child {spec.name} is already running with pid {before.pid}")
        child = Child(spec.name, machine.world.next_pid(), Process(spec.name))
        machine.children[spec.name] = child
        kind, _, cell = spec.name.partition("-")
        match kind:
            case "engine":
                version = int(spec.argv[spec.argv.index("--version") + 1])
                ready = Path(spec.argv[spec.argv.index("--ready-file") + 1])
                served: Served = Engine(machine, child, CellId(cell), version, ready)
            case "replica":
                served = Replica(machine, child, CellId(cell))
            case _:
                served = Gateway(machine, child)
        machine.served[spec.name] = served
        machine.world.loop.start(child.process, served.run(), spec.name)
        return SimChild(machine, child)


class SimChild:
    def __init__(self, machine: Machine, child: Child) -> None:
        self._machine = machine
        self._child = child

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimChild) and other._child is self._child

    def __hash__(self) -> int:
        return self._child.pid

    @property
    def name(self) -> str:
        return self._child.name

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.alive

    @property
    def exit(self) -> ExitStatus | None:
        return self._child.exit

    async def wait(self) -> ExitStatus:
        return await self._child.wait()

    def signal(self, number: int) -> bool:
        was = self._child.alive
        self._machine.end(self._child, ExitStatus(signal=number))
        return was

    async def end(self, grace_s: float) -> ExitStatus:
        await asyncio.sleep(min(grace_s, self._machine.world.rng.random() * 0.3))
        self._machine.end(self._child, ExitStatus(signal=15))
        if self._machine.children.get(self.name) is self._child:
            del self._machine.children[self.name]
        return await self._child.wait()


class Served(ABC):
    """A child as it answers messages."""

    def __init__(self, machine: Machine, child: Child) -> None:
        self.machine = machine
        self.world = machine.world
        self.child = child
        self.up = False

    async def run(self) -> None:
        await asyncio.sleep(0.1 + self.world.rng.random() * 0.4)
        self.up = True

    async def serve(self, message: object, left_s: float) -> object:
        if not self.up:
            raise Unavailable(f"{self.child.name} does not listen yet")
        return await self.answer(message)

    @abstractmethod
    async def answer(self, message: object) -> object:
        """What the process answers to a message."""

    def died(self) -> None:  # noqa: B027 (most have nothing to do)
        """Its process is gone."""

    def exit(self, status: ExitStatus) -> None:
        self.machine.end(self.child, status)


# ------------------------------------------------------------------------------------------------ engine


@dataclass(eq=False)
class Sampling:
    """A request at an engine."""

    rid: str
    call: tuple[RunId, int, int]
    tokens_left: int
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


class Engine(Served):
    def __init__(self, machine: Machine, child: Child, cell: CellId, version: int, ready: Path) -> None:
        super().__init__(machine, child)
        self.cell = cell
        self.version = version
        self.released = False
        self.loading = False
        self.live: dict[str, Sampling] = {}
        self._ready = ready

    async def run(self) -> None:
        self.world.watch.engine_memory(self.cell, self)
        await super().run()
        self._ready.write_text(json.dumps({"url": f"sim:{self.machine.name}/{self.child.name}/{self.child.pid}"}))

    def died(self) -> None:
        self.live.clear()
        self.world.watch.engine_gone(self)

    async def generate(self, request: Sampling) -> tuple[int, int]:
        """The tokens sampled, and by which version; fewer than asked when it was stopped."""
        if self.released or self.loading:
            self.world.watch.violated(f"{request.call} was sent to {self.child.name}, which holds no weights")
        self.world.watch.began(self, request)
        self.live[request.rid] = request
        version, began_s = self.version, self.world.loop.time()
        try:
            try:
                async with asyncio.timeout(request.tokens_left * TOKEN_S):
                    await request.stopped.wait()
            except TimeoutError:
                return request.tokens_left, version
            return min(request.tokens_left, int((self.world.loop.time() - began_s) / TOKEN_S)), version
        finally:
            if self.live.pop(request.rid, None) is not None:
                self.world.watch.ended(self, request)

    async def answer(self, message: object) -> object:
        match message:
            case ("info",):
                return EngineInfo(self.version, "", "", "", 16)
            case ("weights", str(), int(version)):
                await self.world.stage("weights", self.cell)
                if self.live:
                    raise EngineRefused(400, "requests are sampled")
                self.loading = True
                await asyncio.sleep(0.05 + self.world.rng.random() * 0.3)
                self.loading, self.version = False, version
                return Ok()
            case ("release",):
                await self.world.stage("release", self.cell)
                if self.live:
                    self.world.watch.violated(f"{self.child.name} released its memory under {list(self.live)}")
                self.released, self.version = True, -1
                return Ok()
            case ("resume",):
                await self.world.stage("resume", self.cell)
                self.released, self.version = False, -1
                self.world.watch.engine_memory(self.cell, self)
                return Ok()
            case _:
                raise AssertionError(message)


class EngineClient:
    """gyre.engine.client.EngineClient, over the simulated network."""

    def __init__(self, ask: Callable[[object], Awaitable[object]]) -> None:
        self._ask = ask

    async def close(self) -> None:
        """There is no connection to end."""

    async def _control(self, *order: object) -> object:
        try:
            return await self._ask(order)
        except Unavailable as error:
            raise EngineGone(str(error)) from error

    async def update_weights(self, path: str, version: int) -> None:
        await self._control("weights", path, version)

    async def release_memory(self) -> None:
        await self._control("release")

    async def resume_memory(self) -> None:
        await self._control("resume")

    async def info(self) -> EngineInfo:
        found = await self._control("info")
        assert isinstance(found, EngineInfo)
        return found


# ------------------------------------------------------------------------------------------------ replica


class Replica(Served):
    """Gradient sums are the names of their micro-steps."""

    def __init__(self, machine: Machine, child: Child, cell: CellId) -> None:
        super().__init__(machine, child)
        self.cell = cell
        self.version = -1
        self.in_memory = False
        self.own: list[MicroStepId] = []
        self.staged: dict[str, tuple[MicroStepId, ...]] = {}
        self.used: set[str] = set()
        self.merged: Counter[MicroStepId] = Counter()
        self._turn = asyncio.Lock()

    def died(self) -> None:
        self.in_memory = False

    async def answer(self, message: object) -> object:
        if isinstance(message, Ping):
            return Ok()
        async with self._turn:
            return await self._take(message)

    async def _take(self, message: object) -> object:
        world = self.world
        match message:
            case LoadSnapshot():
                await world.stage("load", self.cell)
                if not Path(message.path).exists():
                    raise Refused(f"there is no snapshot at {message.path}")
                if message.version != self.version:
                    self._drop()
                self.version, self.in_memory = message.version, True
                self.own.clear()
                world.watch.replica_memory(self.cell, self)
                return Ready(message.version, "layout")
            case RunMicroStep():
                self._require(message.work.version)
                for item in message.work.lineages:
                    await world.lineages(self, GetLineages(item.run, item.attempt, (item.index,)))
                await world.stage("micro-step", self.cell)
                await asyncio.sleep(0.1 + world.rng.random() * 0.5)
                if message.work.micro_step in self.own:
                    raise Refused(f"{message.work.micro_step} is in these sums already")
                self.own.append(message.work.micro_step)
                return MicroStepDone(message.work.micro_step, 0.3, {"token_count": float(COUNTED_TOKENS)})
            case ShipSums():
                return await self._ship(message)
            case StageSums():
                if message.version != self.version:
                    raise Refused(f"the sums are of version {message.version}, this replica holds {self.version}")
                await world.stage("stage", self.cell)
                self._keep(message.transfer, message.micro_steps)
                return Ok()
            case MergeSums():
                await world.stage("merge", self.cell)
                if message.transfer in self.used or message.transfer not in self.staged:
                    raise Refused(f"transfer {message.transfer} is not staged here")
                micro_steps = self.staged[message.transfer]
                if any(self.merged[name] for name in micro_steps):
                    raise Refused(f"a micro-step of {message.transfer} is in the batch's sums already")
                del self.staged[message.transfer]
                self.used.add(message.transfer)
                self.merged.update(micro_steps)
                return Ok()
            case DropSums():
                self._drop()
                return Ok()
            case DropOwnSums():
                self.own.clear()
                return Ok()
            case OptimizerStep():
                return await self._step(message)
            case Offload():
                await world.stage("offload", self.cell)
                self.own.clear()
                self.in_memory = False
                return Ok()
            case _:
                raise AssertionError(message)

    async def _ship(self, message: ShipSums) -> SumsShipped:
        self._require(self.version)
        if not self.own:
            raise Refused("there are no sums to ship")
        await self.world.stage("ship", self.cell)
        micro_steps = tuple(self.own)
        if message.core:
            sums = StageSums(message.transfer, "layout", self.version, micro_steps, b"")
            try:
                await self.world.child_ref(self.child.process, self.machine.name, message.core).ask(sums, 60.0, Ok)
            except Unavailable as error:
                raise Refused(f"the core's replica did not take the sums: {error}") from error
        else:
            self._keep(message.transfer, micro_steps)
        self.own.clear()
        return SumsShipped(message.transfer, micro_steps, 0)

    async def _step(self, order: OptimizerStep) -> StepDone:
        self._require(order.version - 1)
        if self.own:
            raise Refused(f"own sums of {len(self.own)} micro-steps were neither kept nor dropped")
        merged = Counter(self.merged)
        self.version = -1
        await asyncio.sleep(0.2)
        await self.world.stage("step", self.cell)
        Path(order.path).mkdir(exist_ok=True)
        digest = self.world.watch.stepped(order, merged)
        self.version = order.version
        self._drop()
        return StepDone(order.version, digest, {"micro_steps": float(merged.total())})

    def _keep(self, transfer: str, micro_steps: tuple[MicroStepId, ...]) -> None:
        if transfer in self.staged or transfer in self.used:
            raise Refused(f"transfer {transfer} was received before")
        if any(self.merged[name] for name in micro_steps):
            raise Refused("a micro-step is in the batch's sums already")
        self.staged[transfer] = micro_steps

    def _require(self, version: int) -> None:
        if not self.in_memory or self.version < 0 or version != self.version:
            raise Refused(f"version {version} is not loaded")

    def _drop(self) -> None:
        self.own.clear()
        self.staged.clear()
        self.used.clear()
        self.merged.clear()


# ------------------------------------------------------------------------------------------------ gateway


@dataclass
class _Run:
    order: OpenRun
    calls: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """Answered calls: their tokens and the lowest version that sampled one."""
    closed: RunTrace | None = None


@dataclass
class Journal:
    """What a gateway has written down: the next one begins with it."""

    runs: dict[RunId, _Run] = field(default_factory=dict[RunId, _Run])


class Gateway(Served):
    def __init__(self, machine: Machine, child: Child) -> None:
        super().__init__(machine, child)
        self.runs = machine.journal.runs
        self.routes = SetRoutes(-1, ())
        self._at: dict[str, tuple[CellId, Sampling]] = {}
        self._drained: set[CellId] = set()
        self._changed = asyncio.Event()
        self._rids = count()
        self.sampled = 0
        self.calls = 0

    def died(self) -> None:
        for cell, request in self._at.values():
            engine = self.world.engine(cell)
            request.stopped.set()  # its connection is closed, and the engine aborts it
            if engine is not None and engine.live.pop(request.rid, None) is not None:
                self.world.watch.ended(engine, request)

    async def answer(self, message: object) -> object:
        match message:
            case Ping():
                return Ok()
            case SetRoutes():
                self.routes = message
                self._drained -= {route.cell for route in message.engines if route.accepting}
                self._wake()
                return Ok()
            case DrainEngine():
                await self.world.stage("drain", message.cell)
                self._drained.add(message.cell)
                stopping = [request for cell, request in self._at.values() if cell == message.cell]
                for request in stopping:
                    request.stopped.set()
                while any(cell == message.cell for cell, _ in self._at.values()):
                    await self._changed.wait()
                return DrainReport(len(stopping), 0, 0, 0.0, 0.0)
            case OpenRun():
                return self._open(message)
            case CloseRun():
                return self._close(message)
            case GetLineages():
                run = self.runs.get(message.run)
                if run is None or run.closed is None or run.order.attempt != message.attempt:
                    raise Refused(f"attempt {message.attempt} of {message.run} is not closed here")
                return Lineages(())
            case GetGatewayStatus():
                flying = Counter(str(cell) for cell, _ in self._at.values())
                open_runs = sum(run.closed is None for run in self.runs.values())
                url = f"http://{self.machine.name}"
                return GatewayStatus(
                    url, open_runs, len(self._at), 0, dict(flying), self.calls, self.sampled, 0.0, 0, {}
                )
            case ("call", str(run), str(key), int(number)):
                return await self._call(RunId(run), key, number)
            case _:
                raise AssertionError(message)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _open(self, order: OpenRun) -> Ok:
        known = self.runs.get(order.run)
        if known is not None and (
            order.attempt < known.order.attempt or (order.attempt == known.order.attempt and known.closed is not None)
        ):
            raise Refused(f"attempt {order.attempt} of {order.run} is over")
        if known is None or order.attempt > known.order.attempt:
            self.runs[order.run] = _Run(order)
        else:
            known.order = order
        return Ok()

    def _close(self, message: CloseRun) -> RunTrace:
        run = self.runs.get(message.run)
        if run is None or message.attempt != run.order.attempt:
            raise Refused(f"attempt {message.attempt} of {message.run} is not known")
        if run.closed is None:
            lowest = min((version for _, version in run.calls.values()), default=-1)
            tokens = sum(tokens for tokens, _ in run.calls.values())
            lineage = LineageInfo(0, LineageRole.MAIN, LINEAGE_TOKENS, COUNTED_TOKENS, lowest)
            lineages = (lineage,) if run.calls else ()
            run.closed = RunTrace(
                message.run,
                message.attempt,
                len(run.calls),
                tokens,
                COUNTED_TOKENS,
                LINEAGE_TOKENS,
                lineages,
                0,
                0,
                0,
                0.0,
                "",
            )
            for _, request in self._at.values():
                if request.call[0] == message.run:
                    request.stopped.set()
        return run.closed

    async def _call(self, name: RunId, key: str, number: int) -> Ok:
        run = self.runs.get(name)
        if run is None or run.order.key != key or run.closed is not None:
            raise Refused(f"{name} is not let in with that key")
        if number in run.calls:
            return Ok()
        left, lowest = 6, 1 << 30
        while left:
            engine = self._seat()
            if engine is None or any(
                request.call == (name, run.order.attempt, number) for _, request in self._at.values()
            ):
                with_change = self._changed
                try:
                    async with asyncio.timeout(0.5):
                        await with_change.wait()
                except TimeoutError:
                    pass
            else:
                request = Sampling(f"r{next(self._rids)}", (name, run.order.attempt, number), left)
                self._at[request.rid] = (engine.cell, request)
                try:
                    sampled, version = await self.world.generate(self, engine, request)
                except GyreError:
                    sampled, version = 0, lowest
                    await asyncio.sleep(0.1)
                finally:
                    del self._at[request.rid]
                    self._wake()
                left -= sampled
                self.sampled += sampled
                lowest = min(lowest, version)
            if run.closed is not None or self.runs.get(name) is not run:
                raise Refused(f"{name} was closed")
            if number in run.calls:
                return Ok()
        run.calls[number] = (6, lowest)
        self.calls += 1
        return Ok()

    def _seat(self) -> Engine | None:
        open_ = [
            route
            for route in self.routes.engines
            if route.accepting and route.version == self.routes.version and route.cell not in self._drained
        ]
        open_.sort(key=lambda route: (sum(cell == route.cell for cell, _ in self._at.values()), route.cell))
        for route in open_:
            engine = self.world.engine(route.cell)
            if engine is not None and engine.up and route.url.endswith(f"/{engine.child.pid}"):
                return engine
        return None


# ------------------------------------------------------------------------------------------------ harness


class Harness:
    """One attempt's harness: it makes its calls one after another, again where the proxy is not there, and leaves."""

    def __init__(self, machine: Machine, folder: RunFolder, base_url: str) -> None:
        self._machine = machine
        self.folder = folder
        self.pid = machine.world.next_pid()
        self.process = Process(f"harness {folder.run}/{folder.attempt}")
        self.ended = asyncio.Event()
        self.exit: HarnessExit | None = None
        self._key = base_url.rpartition("/")[2]
        machine.world.loop.start(self.process, self._work(), self.process.name)

    async def _work(self) -> None:
        world = self._machine.world
        for number in range(CALLS):
            await asyncio.sleep(world.rng.random() * 0.6)
            while True:
                order = ("call", str(self.folder.run), self._key, number)
                try:
                    await world.gateway_ref(self.process, self._machine.name).ask(order, 600.0, Ok)
                    break
                except Unavailable:
                    await asyncio.sleep(0.3)
                except GyreError:
                    self.leave(HarnessExit(code=1))
                    return
        self.leave(HarnessExit(code=0))

    def leave(self, how: HarnessExit) -> None:
        if self.exit is None:
            self.exit = how
            self.ended.set()
            self._machine.world.loop.kill(self.process)
            self._machine.world.net.died(self.process)


class HarnessProcess:
    """gyre.harness.launch.HarnessProcess."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.ref = harness
        self.folder = harness.folder

    @property
    def alive(self) -> bool:
        return self._harness.exit is None

    async def wait(self, limit_s: float | None = None) -> HarnessExit | None:
        try:
            async with asyncio.timeout(limit_s):
                await self._harness.ended.wait()
        except TimeoutError:
            return None
        return self._harness.exit

    async def end(self, grace_s: float = 2.0) -> HarnessExit:
        self._harness.leave(HarnessExit(signal=15))
        assert self._harness.exit is not None
        return self._harness.exit


class Launcher:
    """gyre.harness.launch.Launcher."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def warm(self) -> None:
        await asyncio.sleep(0.1)

    async def start(self, folder: RunFolder, base_url: str, instruction: str) -> HarnessProcess:
        before = self.adopt(folder)
        if before is not None and before.alive:
            return before
        await asyncio.sleep(self._machine.world.rng.random() * 0.05)
        harness = Harness(self._machine, folder, base_url)
        self._machine.harnesses[folder.run, folder.attempt] = harness
        return HarnessProcess(harness)

    def adopt(self, folder: RunFolder) -> HarnessProcess | None:
        harness = self._machine.harnesses.get((folder.run, folder.attempt))
        return None if harness is None else HarnessProcess(harness)

    async def stop(self) -> None:
        """It has no zygote."""


def reward_of(run: RunId) -> float:
    return float(random.Random(f"reward {run}").random() < 0.5)
