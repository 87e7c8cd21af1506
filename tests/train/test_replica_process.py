"""The core's replica as a real process that is killed: the next one goes on from what is on disk."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gyre.actors.messages import (
    GetLineages,
    Lineages,
    LineageWork,
    LoadSnapshot,
    MergeSums,
    MicroStep,
    MicroStepDone,
    Ok,
    OptimizerStep,
    Ping,
    Ready,
    RunMicroStep,
    ShipSums,
    StepDone,
    SumsShipped,
)
from gyre.actors.remote import RemoteRef, connect, serve
from gyre.actors.runtime import Actor, ActorSystem, handles
from gyre.config import CheckpointSection, LossSection, OptimizerSection
from gyre.errors import Unavailable
from gyre.ids import MicroStepId, RunId
from gyre.train.checkpoint import list_checkpoints
from gyre.train.snapshot import make_first_snapshot, snapshot_path
from gyre.trajectory.records import Lineage

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


class Core:
    """The core's replica of one job, in its own folder, started and killed as a cell would."""

    def __init__(self, folder: Path, model_dir: Path, gateway: str, **section: int) -> None:
        folder.mkdir()
        self._gateway = gateway
        self._section = section
        self._model_dir = model_dir
        self.log = folder / "replica.log"
        self.snapshots_dir, self.checkpoints_dir = folder / "snapshots", folder / "checkpoints"
        self.checkpoints_dir.mkdir()
        make_first_snapshot(model_dir, self.snapshots_dir)
        self._address = f"unix:{folder}/replica.sock"
        self._secret_file = folder / "secret"
        self._secret_file.write_text(SECRET)
        self._process: subprocess.Popen[bytes] | None = None
        self._ref: RemoteRef | None = None

    async def start(self, version: int, before: tuple[str, ...] = ()) -> None:
        """A new process with snapshot `version`; `before` is a command in front of its own."""
        config = {
            "model_dir": str(self._model_dir),
            "loss": LossSection(clip_low=10.0, clip_high=1e6).model_dump(mode="json"),
            "optimizer": OptimizerSection(lr=LR, eps=1e-6).model_dump(mode="json"),
            "checkpoint": CheckpointSection(**self._section).model_dump(mode="json"),
            "checkpoints_dir": str(self.checkpoints_dir),
            "temperature": 1.0,
            "micro_batch_tokens": 64,
            "threads": 1,
        }
        module = ("-m", "gyre.actors.replica_process", self._address, str(self._secret_file), json.dumps(config))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*before, sys.executable, *module], stdout=log, stderr=log)
        self._ref = connect(self._address, SECRET)
        async with asyncio.timeout(START_S):
            while True:
                try:
                    await self._ref.ask(Ping(), 5.0, Ok)
                    break
                except Unavailable:
                    assert self._process.poll() is None, self.log.read_text()
                    await asyncio.sleep(0.05)
        await self._ref.ask(LoadSnapshot(str(snapshot_path(self.snapshots_dir, version)), version), ASK_S, Ready)

    async def end(self, number: signal.Signals) -> None:
        if self._process is not None:
            assert self._ref is not None
            await self._ref.close()
            os.kill(self._process.pid, number)
            await asyncio.to_thread(self._process.wait, ASK_S)
            self._process = None

    async def step(self, version: int) -> StepDone:
        """One batch, to `version`: the same runs, with other advantages each time."""
        assert self._ref is not None
        works = tuple(
            LineageWork(RunId(run), 1, 0, [1.0, -0.5, 0.25][(place + version) % 3], 6) for place, run in enumerate(RUNS)
        )
        work = MicroStep(MicroStepId(f"m{version}"), version, version - 1, works, 0)
        await self._ref.ask(RunMicroStep(work, self._gateway), ASK_S, MicroStepDone)
        await self._ref.ask(ShipSums("", f"t{version}"), ASK_S, SumsShipped)
        await self._ref.ask(MergeSums(f"t{version}"), ASK_S, Ok)
        order = OptimizerStep(version, version, 3, LR, str(snapshot_path(self.snapshots_dir, version)))
        return await self._ref.ask(order, ASK_S, StepDone)

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


@pytest.fixture
async def make_core(
    tmp_path: Path, make_model: Callable[..., Path], make_lineage: Callable[..., Lineage]
) -> AsyncIterator[MakeCore]:
    model_dir = make_model()
    lineages = {RunId(run): make_lineage(run) for run in RUNS}
    made: list[Core] = []

    def make(name: str, **section: int) -> Core:
        made.append(Core(tmp_path / name, model_dir, server.address, **section))
        return made[-1]

    async with ActorSystem.running("test") as system:
        gateway = system.spawn("gateway", lambda: Gateway(lineages))
        async with serve(gateway, f"unix:{tmp_path}/gateway.sock", SECRET) as server:
            yield make
            for core in made:
                await core.end(signal.SIGKILL)


@asynccontextmanager
async def running(
    core: Core, version: int, number: signal.Signals, before: tuple[str, ...] = ()
) -> AsyncIterator[Core]:
    await core.start(version, before)
    yield core
    await core.end(number)


async def test_a_job_whose_replica_is_killed_trains_as_one_whose_replica_is_not(make_core: MakeCore) -> None:
    whole, hurt = make_core("whole"), make_core("hurt")
    async with running(whole, 0, signal.SIGTERM):
        for version in range(1, 7):
            await whole.step(version)

    async with running(hurt, 0, signal.SIGKILL):
        for version in (1, 2):
            await hurt.step(version)
        await hurt.checkpointed(2)
    async with running(hurt, 2, signal.SIGTERM):  # told to end, it ends what it writes first
        for version in (3, 4, 5, 6):
            assert (await hurt.step(version)).metrics["moments_behind"] == 0.0
    assert (whole.weights(6) - hurt.weights(6)).abs().max() <= 1e-6
    assert (whole.weights(6) - whole.weights(5)).abs().max() > 1e-3, "a step is more than that"
    assert [version for version, _ in list_checkpoints(hurt.checkpoints_dir)] == [5, 6]


async def test_a_replica_killed_before_its_checkpoint_goes_on_from_published_weights_and_the_moments_before(
    make_core: MakeCore,
) -> None:
    core = make_core("core", every_steps=2)
    async with running(core, 0, signal.SIGKILL):
        for version in (1, 2):
            await core.step(version)
        await core.checkpointed(2)
        await core.step(3)
    async with running(core, 3, signal.SIGTERM):
        done = await core.step(4)
    assert (done.version, done.metrics["moments_behind"]) == (4, 1.0)
    assert "there is no checkpoint of version 3: weights are the snapshot's" in core.log.read_text()
    assert [version for version, _ in list_checkpoints(core.checkpoints_dir)] == [2, 4]


async def test_a_disk_without_room_for_a_checkpoint_stops_no_training(make_core: MakeCore) -> None:
    """On a real disk of its own that has room for half of one."""
    full = make_core("full")
    mount = 'mount -t tmpfs -o size=64k tmpfs "$0" && exec "$@"'
    before = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(full.checkpoints_dir))
    async with running(full, 0, signal.SIGTERM, before):
        for version in (1, 2, 3):
            done = await full.step(version)
    assert done.version == 3
    assert done.metrics["checkpoint_failures"] >= 1.0
    assert done.metrics["checkpoint_version"] == -1.0
    log = full.log.read_text()
    assert log.count("could not be written: No space left on device); training goes on") == 1
