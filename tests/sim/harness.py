"""The harness of a run's attempt, and what launches it."""

from __future__ import annotations

import asyncio

from gyre.actors.messages import Ok
from gyre.errors import GyreError, Unavailable
from gyre.harness.launch import HarnessExit
from gyre.harness.workspace import RunFolder

from .loop import Process
from .machine import Machine
from .runs import CALLS


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
