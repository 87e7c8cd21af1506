"""The core's replica as a real process that is killed: the next one goes on as if it had not been."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
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
    Place,
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


class Zygote:
    """Starts replica processes (replica_zygote.py)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, before: tuple[str, ...], argv: tuple[str, ...], log: Path) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"before": before, "argv": argv, "log": str(log)}), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    program = Path(__file__).with_name("replica_zygote.py")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Zygote(process)


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
        self._address = f"unix:{folder}/replica.sock"
        self._secret_file = folder / "secret"
        self._secret_file.write_text(SECRET)
        self._pid = 0
        self._ref: RemoteRef | None = None

    async def start(self, version: int, before: tuple[str, ...] = ()) -> None:
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
            "far": None,
        }
        argv = (self._address, str(self._secret_file), json.dumps(config))
        self._pid = self._zygote.start(before, argv, self.log)
        self._ref = connect(self._address, SECRET)
        async with asyncio.timeout(START_S):
            while True:
                try:
                    await self._ref.ask(Ping(), 5.0, Ok)
                    break
                except Unavailable:
                    assert not has_ended(self._pid), self.log.read_text()
                    await asyncio.sleep(0.05)
        await self._ref.ask(LoadSnapshot(str(snapshot_path(self.snapshots_dir, version)), version), ASK_S, Ready)

    async def end(self, number: signal.Signals) -> None:
        if self._pid:
            assert self._ref is not None
            await self._ref.close()
            os.kill(self._pid, number)
            await asyncio.to_thread(wait_for_end, self._pid)
            self._pid = 0

    async def step(self, version: int) -> StepDone:
        """One batch, to `version`: the same runs, with other advantages each time."""
        assert self._ref is not None
        works = tuple(
            LineageWork(RunId(run), 1, 0, [1.0, -0.5, 0.25][(place + version) % 3], 6) for place, run in enumerate(RUNS)
        )
        work = MicroStep(MicroStepId(f"m{version}"), version, version - 1, works, 0)
        await self._ref.ask(RunMicroStep(work, dict.fromkeys(RUNS, Place("", self._gateway))), ASK_S, MicroStepDone)
        await self._ref.ask(ShipSums(None, f"t{version}"), ASK_S, SumsShipped)
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
    tmp_path: Path, make_model: Callable[..., Path], make_lineage: Callable[..., Lineage], zygote: Zygote
) -> AsyncIterator[MakeCore]:
    model_dir = make_model()
    lineages = {RunId(run): make_lineage(run) for run in RUNS}
    made: list[Core] = []

    def make(name: str, **section: int) -> Core:
        made.append(Core(tmp_path / name, model_dir, server.address, zygote, **section))
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


STEPS = 6


@pytest.mark.parametrize("every_steps", [1, 2])
async def test_a_replica_killed_at_every_step_trains_as_one_that_is_not(make_core: MakeCore, every_steps: int) -> None:
    whole, hurt = make_core("whole"), make_core("hurt", every_steps=every_steps)
    async with running(whole, 0, signal.SIGTERM):
        for version in range(1, STEPS + 1):
            await whole.step(version)
    for version in range(1, STEPS + 1):
        async with running(hurt, version - 1, signal.SIGKILL):
            done = await hurt.step(version)
        assert done.metrics["moments_behind"] == 0.0
    assert (whole.weights(STEPS) - hurt.weights(STEPS)).abs().max() <= 1e-6
    assert (whole.weights(STEPS) - whole.weights(STEPS - 1)).abs().max() > 1e-3, "a step is more than that"
    if every_steps == 2:
        assert STEPS - 1 not in [version for version, _ in list_checkpoints(hurt.checkpoints_dir)], (
            "it never came there"
        )


async def test_a_step_whose_replica_is_killed_before_it_is_published_is_taken_again_to_the_same_weights(
    make_core: MakeCore,
) -> None:
    core = make_core("core", every_steps=10)
    taken: list[torch.Tensor] = []
    for version in (1, 2, 2):
        async with running(core, version - 1, signal.SIGKILL):
            assert (await core.step(version)).metrics["moments_behind"] == 0.0
            taken.append(core.weights(version))
    assert torch.equal(taken[1], taken[2])


async def test_a_clean_end_leaves_the_newest_on_disk_and_nothing_in_shared_memory(make_core: MakeCore) -> None:
    core = make_core("core", every_steps=10)
    async with running(core, 0, signal.SIGKILL):
        for version in (1, 2, 3):
            await core.step(version)
    assert [version for version, _ in list_checkpoints(core.staging_dir)] == [2, 3]
    assert list_checkpoints(core.checkpoints_dir) == []
    async with running(core, 3, signal.SIGTERM):  # ended before it has taken a step
        pass
    assert not core.staging_dir.exists()
    assert [version for version, _ in list_checkpoints(core.checkpoints_dir)] == [2, 3]
    async with running(core, 3, signal.SIGTERM):
        assert (await core.step(4)).metrics["moments_behind"] == 0.0
    assert not core.staging_dir.exists()
    assert [version for version, _ in list_checkpoints(core.checkpoints_dir)] == [3, 4]


async def test_what_is_staged_and_torn_has_the_one_before_it_in_its_place(make_core: MakeCore) -> None:
    core = make_core("core", every_steps=10)
    async with running(core, 0, signal.SIGKILL):
        for version in (1, 2):
            await core.step(version)
    (core.staging_dir / "c00000002" / "optimizer.safetensors").write_bytes(b"cut short")
    async with running(core, 2, signal.SIGTERM):
        done = await core.step(3)
    assert done.metrics["moments_behind"] == 1.0
    log = core.log.read_text()
    assert "checkpoint c00000002: optimizer.safetensors has 9 bytes" in log
    assert "there is no checkpoint of version 2: weights are the snapshot's" in log


def own_disk(folder: Path, size: str) -> tuple[str, ...]:
    """The command in front of a process that has a real disk of its own, of that size, at `folder`."""
    mount = f'mount -t tmpfs -o mode=0700,size={size} tmpfs "$0" && exec "$@"'
    return ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder))


async def test_where_shared_memory_has_no_room_the_answer_waits_for_the_disk(make_core: MakeCore) -> None:
    core = make_core("core", every_steps=10)
    core.staging_dir.mkdir(mode=0o700)
    for version in (1, 2):
        async with running(core, version - 1, signal.SIGKILL, own_disk(core.staging_dir, "64k")):
            assert (await core.step(version)).metrics["moments_behind"] == 0.0
        assert [found for found, _ in list_checkpoints(core.checkpoints_dir)][-1] == version
    assert "c00000002 could not be written: No space left on device); its step and the next" in core.log.read_text()


@pytest.mark.parametrize("staged", [True, False])
async def test_a_disk_without_room_for_a_checkpoint_stops_no_training(make_core: MakeCore, staged: bool) -> None:
    """On a real disk of its own that has room for half of one."""
    full = make_core("full")
    if not staged:
        full.staging_dir.write_text("no folder can be made here")
    async with running(full, 0, signal.SIGTERM, own_disk(full.checkpoints_dir, "64k")):
        for version in (1, 2, 3):
            done = await full.step(version)
    assert done.version == 3
    assert done.metrics["checkpoint_failures"] >= 1.0
    assert done.metrics["checkpoint_version"] == -1.0
    log = full.log.read_text()
    assert log.count("could not be written: No space left on device); training goes on") == 1
    assert [version for version, _ in list_checkpoints(full.staging_dir)] == ([2, 3] if staged else [])
