"""The replica of a cell: what it holds of a batch, where gradient sums are the micro-steps that are in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gyre.actors.messages import GetLineages, Ok, Ping
from gyre.actors.messages_replica import (
    DropOwnSums,
    DropSums,
    LoadSnapshot,
    MergeSums,
    MicroStep,
    MicroStepDone,
    Offload,
    OptimizerStep,
    Ready,
    RunMicroStep,
    ShipSums,
    StageSums,
    StepDone,
    SumsShipped,
)
from gyre.errors import NotLoaded, Refused, Unavailable
from gyre.ids import CellId

from .machine import Child, Machine, Served
from .runs import COUNTED_TOKENS


class Replica(Served):
    def __init__(self, machine: Machine, child: Child, cell: CellId) -> None:
        super().__init__(machine, child)
        self.cell = cell
        self.version = -1
        self.in_memory = False
        self.own: list[MicroStep] = []
        self.staged: dict[str, tuple[MicroStep, ...]] = {}
        self.used: set[str] = set()
        self.merged: list[MicroStep] = []
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
                    place = message.gateways[item.run]
                    wanted = GetLineages(item.run, item.attempt, (item.index,))
                    world.watch.read(item, await world.lineages(self, place, wanted))
                await world.stage("micro-step", self.cell)
                await asyncio.sleep(0.1 + world.rng.random() * 0.5)
                if any(message.work.micro_step == work.micro_step for work in self.own):
                    raise Refused(f"{message.work.micro_step} is in these sums already")
                self.own.append(message.work)
                return MicroStepDone(
                    message.work.micro_step, 0.3, {"token_count": float(COUNTED_TOKENS * len(message.work.lineages))}
                )
            case ShipSums():
                return await self._ship(message)
            case StageSums():
                if message.version != self.version:
                    raise Refused(f"the sums are of version {message.version}, this replica holds {self.version}")
                await world.stage("stage", self.cell)
                self._keep(message.transfer, world.sums[message.transfer])
                return Ok()
            case MergeSums():
                await world.stage("merge", self.cell)
                if message.transfer in self.used or message.transfer not in self.staged:
                    raise Refused(f"transfer {message.transfer} is not staged here")
                micro_steps = self.staged[message.transfer]
                if self._has_some_of(micro_steps):
                    raise Refused(f"a micro-step of {message.transfer} is in the batch's sums already")
                del self.staged[message.transfer]
                self.used.add(message.transfer)
                self.merged += micro_steps
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
        own = self.world.sums[message.transfer] = tuple(self.own)
        micro_steps = tuple(work.micro_step for work in own)
        if message.core is not None:
            sums = StageSums(message.transfer, "layout", self.version, micro_steps, "float32", 1, "tcp:sim:1", 1)
            try:
                await self.world.child_ref(self.child.process, self.machine.name, message.core.address).ask(
                    sums, 60.0, Ok
                )
            except Unavailable as error:
                raise Refused(f"the core's replica did not take the sums: {error}") from error
        else:
            self._keep(message.transfer, own)
        self.own.clear()
        return SumsShipped(message.transfer, micro_steps, 0)

    async def _step(self, order: OptimizerStep) -> StepDone:
        self._require(order.version - 1)
        if self.own:
            raise Refused(f"own sums of {len(self.own)} micro-steps were neither kept nor dropped")
        merged = tuple(self.merged)
        self.version = -1
        await asyncio.sleep(0.2)
        await self.world.stage("step", self.cell)
        Path(order.path).mkdir(exist_ok=True)
        digest = self.world.watch.stepped(order, merged)
        self.version = order.version
        self._drop()
        return StepDone(order.version, digest, {"micro_steps": float(len(merged))})

    def _keep(self, transfer: str, micro_steps: tuple[MicroStep, ...]) -> None:
        if transfer in self.staged or transfer in self.used:
            raise Refused(f"transfer {transfer} was received before")
        if self._has_some_of(micro_steps):
            raise Refused("a micro-step is in the batch's sums already")
        self.staged[transfer] = micro_steps

    def _has_some_of(self, micro_steps: tuple[MicroStep, ...]) -> bool:
        merged = {work.micro_step for work in self.merged}
        return any(work.micro_step in merged for work in micro_steps)

    def _require(self, version: int) -> None:
        if not self.in_memory or self.version < 0 or version != self.version:
            raise NotLoaded(f"version {version} is not loaded")

    def _drop(self) -> None:
        self.own.clear()
        self.staged.clear()
        self.used.clear()
        self.merged.clear()
