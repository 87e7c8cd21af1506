"""A node's child processes as gyre.children shows them. What each does is in engine.py, replica.py, gateway.py.

They live through the death of the gyred that started them, and the next one adopts them. What they do wrong is a
violation at once: an engine that gives its memory back under a request, a micro-step that is merged twice.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gyre.children import ChildSpec, ExitStatus
from gyre.errors import Refused, Unavailable
from gyre.harness.launch import HarnessExit
from gyre.ids import RunId

from .loop import Process
from .net import Target

if TYPE_CHECKING:
    from .gateway import Journal
    from .harness import Harness
    from .world import World


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

    def __init__(self, world: World, name: str, journal: Journal, make: Make) -> None:
        self.world = world
        self.name = name
        self.make = make
        self.children: dict[str, Child] = {}
        self.served: dict[str, Served] = {}
        """What each living child is, by name."""
        self.harnesses: dict[tuple[RunId, int], Harness] = {}
        self.journal = journal
        self.far: dict[str, str] = {}
        """Where children are reached by other nodes, as each has last told, by name."""

    def die(self) -> None:
        """All that runs here ends at once, and nobody takes it up again."""
        for child in self.children.values():
            self.end(child, ExitStatus(signal=9))
        for harness in self.harnesses.values():
            harness.leave(HarnessExit(lost=True))
        self.far.clear()

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
        served = machine.make(machine, child, spec)
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
        self.target = Target(machine.name, child.process, self.serve, lambda _: None)
        self.up = False

    async def run(self) -> None:
        await asyncio.sleep(0.1 + self.world.rng.random() * 0.4)
        self.up = True
        self.machine.far[self.child.name] = f"sim:{self.machine.name}/{self.child.name}/{self.child.pid}"

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


Make = Callable[[Machine, Child, ChildSpec], Served]
"""Makes what runs in a process, by its name."""
