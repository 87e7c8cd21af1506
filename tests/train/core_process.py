"""Real replica processes for tests that kill them: started, asked and ended as a cell does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from gyre.actors.messages import GetLineages, Lineages, Ok, Ping, Place
from gyre.actors.messages_replica import (
    LineageWork,
    LoadSnapshot,
    MergeSums,
    MicroStep,
    MicroStepDone,
    OptimizerStep,
    Ready,
    RunMicroStep,
    ShipSums,
    StepDone,
    SumsShipped,
)
from gyre.actors.remote import RemoteRef, connect
from gyre.actors.runtime import Actor, handles
from gyre.config import CheckpointSection, LossSection, OptimizerSection
from gyre.errors import Unavailable
from gyre.ids import MicroStepId, RunId
from gyre.train.checkpoint import list_checkpoints
from gyre.train.snapshot import make_first_snapshot, snapshot_path
from gyre.trajectory.records import Lineage

T = TypeVar("T")

SECRET = "between us"
START_S = 120.0
ASK_S = 60.0
RUNS = ("a", "b", "c")
LR = 0.02


class Gateway(Actor):
    def __init__(self, lineages: dict[RunId, Lineage]) -> None:
        self._lineages = lineages

    @handles(GetLineages)
    async def lineages(self, message: GetLineages) -> Lineages:
        return Lineages((self._lineages[message.run],))


class Zygote:
    """Starts replica processes (replica_zygote.py)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, before: tuple[str, ...], argv: tuple[str, ...], log: Path) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"before": before, "argv": argv, "log": str(log)}), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def wait_for_end(pid: int) -> None:
    until_s = time.monotonic() + ASK_S
    while not has_ended(pid):
        assert time.monotonic() < until_s
        time.sleep(0.01)


class Core:
    """The core's replica of one job, in its own folder, started and killed as a cell would."""

    def __init__(self, folder: Path, model_dir: Path, gateway: str, zygote: Zygote, **section: int) -> None:
        folder.mkdir()
        self._zygote = zygote
        self._gateway = gateway
        self._section = section
        self._model_dir = model_dir
        self.log = folder / "replica.log"
        self.snapshots_dir, self.checkpoints_dir = folder / "snapshots", folder / "checkpoints"
        self.checkpoints_dir.mkdir()
        self.staging_dir = folder / "staging"
        """On a disk, where tests do not mind: what counts is that it outlives the process."""
        make_first_snapshot(model_dir, self.snapshots_dir)
        self.address = f"unix:{folder}/replica.sock"
        self._secret_file = folder / "secret"
        self._secret_file.write_text(SECRET)
        self.pid = 0
        self.ref: RemoteRef | None = None

    async def start(self, version: int, before: tuple[str, ...] = (), ranks: int = 1) -> None:
        """A new process with snapshot `version`; `before` is a command in front of its own."""
        config = {
            "model_dir": str(self._model_dir),
            "loss": LossSection(clip_low=10.0, clip_high=1e6).model_dump(mode="json"),
            "optimizer": OptimizerSection(lr=LR, eps=1e-6).model_dump(mode="json"),
            "checkpoint": CheckpointSection(**self._section).model_dump(mode="json"),
            "checkpoints_dir": str(self.checkpoints_dir),
            "staging_dir": str(self.staging_dir),
            "temperature": 1.0,
            "micro_batch_tokens": 64,
            "threads": 1,
            "sums_dtype": "float32",
            "ranks": ranks,
            "first_device": 0,
            "far": None,
        }
        argv = (self.address, str(self._secret_file), json.dumps(config))
        self.pid = self._zygote.start(before, argv, self.log)
        self.ref = connect(self.address, SECRET)
        async with asyncio.timeout(START_S):
            while True:
                try:
                    await self.ref.ask(Ping(), 5.0, Ok)
                    break
                except Unavailable:
                    assert not has_ended(self.pid), self.log.read_text()
                    await asyncio.sleep(0.05)
        await self.load(version)

    async def load(self, version: int) -> Ready:
        return await self.asked(LoadSnapshot(str(snapshot_path(self.snapshots_dir, version)), version), Ready)

    async def end(self, number: signal.Signals) -> None:
        if self.pid:
            assert self.ref is not None
            await self.ref.close()
            os.kill(self.pid, number)
            await asyncio.to_thread(wait_for_end, self.pid)
            self.pid = 0

    async def step(self, version: int) -> StepDone:
        """One batch, to `version`: the same runs, with other advantages each time."""
        await self.micro_step(version)
        await self.keep(version)
        return await self.optimizer_step(version)

    async def micro_step(self, version: int, runs: Sequence[str] = RUNS, number: int = 0) -> MicroStepDone:
        """The `number`-th of that batch."""
        works = tuple(
            LineageWork(RunId(run), 1, 0, [1.0, -0.5, 0.25][(place + version) % 3], 6) for place, run in enumerate(runs)
        )
        work = MicroStep(MicroStepId(f"m{version}.{number}"), version, version - 1, works, 0)
        order = RunMicroStep(work, dict.fromkeys(map(RunId, runs), Place("", self._gateway)))
        return await self.asked(order, MicroStepDone)

    async def keep(self, version: int) -> None:
        await self.asked(ShipSums(None, f"t{version}"), SumsShipped)
        await self.asked(MergeSums(f"t{version}"), Ok)

    async def optimizer_step(self, version: int) -> StepDone:
        order = OptimizerStep(version, version, 3, LR, str(snapshot_path(self.snapshots_dir, version)))
        return await self.asked(order, StepDone)

    async def asked(self, message: Any, answer: type[T]) -> T:
        assert self.ref is not None
        return await self.ref.ask(message, ASK_S, answer)

    async def checkpointed(self, version: int) -> None:
        async with asyncio.timeout(ASK_S):
            while True:
                if version in [found for found, _ in list_checkpoints(self.checkpoints_dir)]:
                    return
                await asyncio.sleep(0.01)

    def weights(self, version: int) -> torch.Tensor:
        found = load_file(snapshot_path(self.snapshots_dir, version) / "model.safetensors")
        return torch.cat([found[name].flatten() for name in sorted(found)])


MakeCore = Callable[..., Core]


@asynccontextmanager
async def running(
    core: Core, version: int, number: signal.Signals, before: tuple[str, ...] = (), ranks: int = 1
) -> AsyncIterator[Core]:
    await core.start(version, before, ranks)
    yield core
    await core.end(number)
