"""A replica of two ranks as a real process: it trains as one of one rank does, and when a rank is gone all of it is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from core_process import LR, Core, MakeCore, running, wait_for_end

from gyre.actors.messages import Ok, Place
from gyre.actors.messages_replica import DropOwnSums, MergeSums, OptimizerStep, ShipSums, StepDone, SumsShipped
from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.train import checkpoint
from gyre.train.shape import read_shape, require_shares
from gyre.train.snapshot import snapshot_path

MakeModel = Callable[..., Path]

SPLIT = {"vocab_size": 62}
"""A model that two ranks can share."""


def moments(core: Core, version: int) -> dict[str, torch.Tensor]:
    return dict(checkpoint.read_moments(checkpoint.checkpoint_path(core.checkpoints_dir, version)))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def other_ranks(pid: int) -> list[int]:
    """The processes of a replica's ranks but the first: its children."""

    def parent(of: Path) -> int:
        with suppress(OSError):
            return int((of / "stat").read_text().rpartition(")")[2].split()[1])
        return 0

    return [int(found.name) for found in Path("/proc").glob("[0-9]*") if parent(found) == pid]


# ------------------------------------------------------------------------------------------------ the same update


@pytest.mark.parametrize(
    "variant",
    [{"architecture": "qwen3"}, {"architecture": "qwen2", "tie_word_embeddings": True}],
    ids=["qwen3", "qwen2 tied"],
)
async def test_two_ranks_have_the_sums_and_take_the_steps_of_one(
    make_core: MakeCore, make_model: MakeModel, variant: dict[str, object]
) -> None:
    model = make_model(**variant, **SPLIT)
    one, two = make_core("one", model), make_core("two", model)
    async with running(one, 0, signal.SIGTERM), running(two, 0, signal.SIGTERM, ranks=2):
        for version in (1, 2):
            loss = [(await core.micro_step(version)).metrics for core in (one, two)]
            assert loss[1] == pytest.approx(loss[0], rel=1e-5, abs=1e-6)
            done: list[StepDone] = []
            for core in (one, two):
                await core.keep(version)
                done.append(await core.optimizer_step(version))
            assert done[1].metrics["grad_norm"] == pytest.approx(done[0].metrics["grad_norm"], rel=1e-5)
    assert distance(two.weights(2) - two.weights(0), one.weights(2) - one.weights(0)) < 1e-4
    for version in (1, 2):
        expected = moments(one, version)
        found = moments(two, version)
        assert found.keys() == expected.keys()
        for name, moment in expected.items():  # weighted sums of the gradients of all steps, and of their squares
            assert distance(found[name], moment) < 1e-4, name
    log = two.log.read_text()
    assert not [bad for bad in ("WARNING", "ERROR", "CRITICAL", "Traceback", "terminate") if bad in log], log


async def test_a_checkpoint_of_any_ranks_is_gone_on_with_by_any_others(
    make_core: MakeCore, make_model: MakeModel
) -> None:
    model = make_model(**SPLIT)
    whole, changed = make_core("whole", model), make_core("changed", model)
    async with running(whole, 0, signal.SIGTERM):
        for version in (1, 2, 3):
            await whole.step(version)
    for version, ranks in ((1, 1), (2, 2), (3, 1)):
        async with running(changed, version - 1, signal.SIGKILL, ranks=ranks):
            assert (await changed.step(version)).metrics["moments_behind"] == 0.0
    assert (whole.weights(3) - changed.weights(3)).abs().max() <= 1e-6
    assert (whole.weights(3) - whole.weights(2)).abs().max() > 1e-3, "a step is more than that"


async def test_sums_go_from_ranks_to_as_many_ranks_and_no_others(make_core: MakeCore, make_model: MakeModel) -> None:
    model = make_model(**SPLIT)
    alone, core, satellite = (make_core(name, model) for name in ("alone", "core", "satellite"))
    async with (
        running(alone, 0, signal.SIGKILL),
        running(core, 0, signal.SIGKILL, ranks=2),
        running(satellite, 0, signal.SIGKILL, ranks=2),
    ):
        await satellite.micro_step(1)
        with pytest.raises(Refused, match=r"both must be of one model and one cells\.train_ranks"):
            await satellite.asked(ShipSums(Place("", alone.address), "t1"), SumsShipped)
        shipped = await satellite.asked(ShipSums(Place("", core.address), "t1"), SumsShipped)
        assert shipped.micro_steps == ("m1.0",)
        await core.asked(MergeSums("t1"), Ok)
        await core.optimizer_step(1)
        await alone.step(1)
    assert distance(core.weights(1) - core.weights(0), alone.weights(1) - alone.weights(0)) < 1e-4


# ------------------------------------------------------------------------------------------------ what fails


async def test_what_is_refused_leaves_all_ranks_as_they_were(make_core: MakeCore, make_model: MakeModel) -> None:
    model = make_model(**SPLIT)
    whole, hurt = make_core("whole", model), make_core("hurt", model)
    async with running(whole, 0, signal.SIGTERM):
        await whole.step(1)
    async with running(hurt, 0, signal.SIGTERM, ranks=2):
        with pytest.raises(Refused, match="there are no sums to ship"):
            await hurt.keep(1)
        with pytest.raises(BadInput, match="token ids from 0 to 61 are expected"):
            await hurt.micro_step(1, ("a", "outside"))
        with pytest.raises(Refused, match="is for version 1"):
            await hurt.micro_step(2)
        await hurt.micro_step(1)
        with pytest.raises(Refused, match="in these sums already"):
            await hurt.micro_step(1)
        with pytest.raises(Refused, match="neither kept nor dropped"):
            await hurt.optimizer_step(1)
        snapshot_path(hurt.snapshots_dir, 0).rename(snapshot_path(hurt.snapshots_dir, 1))
        with pytest.raises(Refused, match="version 0, asked for was 1"):
            await hurt.load(1)
        snapshot_path(hurt.snapshots_dir, 1).rename(snapshot_path(hurt.snapshots_dir, 0))
        await hurt.keep(1)
        (hurt.snapshots_dir / "file").write_text("no folder can be made here")
        with pytest.raises(GyreError, match="FileExistsError"):
            await hurt.asked(OptimizerStep(1, 1, 3, LR, str(hurt.snapshots_dir / "file" / "v00000001")), StepDone)
        with pytest.raises(Refused, match="no parameters are loaded"):
            await hurt.optimizer_step(1)
        await hurt.load(0)
        await hurt.micro_step(1)
        await hurt.asked(DropOwnSums(), Ok)
        await hurt.step(1)
    assert distance(hurt.weights(1) - hurt.weights(0), whole.weights(1) - whole.weights(0)) < 1e-4


async def test_a_rank_that_is_killed_takes_its_replica_along_and_the_next_one_goes_on(
    make_core: MakeCore, make_model: MakeModel
) -> None:
    """In the middle of a micro-step and of a step: the rank is stopped first, so that the other waits for it. Nor does one
    outlive the first."""
    model = make_model(**SPLIT)
    whole, hurt = make_core("whole", model), make_core("hurt", model)
    async with running(whole, 0, signal.SIGTERM):
        for version in (1, 2):
            await whole.step(version)

    async def killed_in(work: Callable[[int], object], version: int) -> None:
        first, (other,) = hurt.pid, other_ranks(hurt.pid)
        os.kill(other, signal.SIGSTOP)
        asked = asyncio.ensure_future(work(version))  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(0.5)
        assert not asked.done()
        os.kill(other, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await asked
        await asyncio.to_thread(wait_for_end, first)
        assert f"rank 1 (pid {other}) ended: killed by SIGKILL; the replica ends with it" in hurt.log.read_text()
        hurt.pid = 0

    await hurt.start(0, ranks=2)
    await killed_in(hurt.micro_step, 1)
    await hurt.start(0, ranks=2)
    await hurt.step(1)
    await hurt.micro_step(2)
    await hurt.keep(2)
    await killed_in(hurt.optimizer_step, 2)
    await hurt.start(1, ranks=2)
    assert (await hurt.step(2)).metrics["moments_behind"] == 0.0
    assert distance(hurt.weights(2) - hurt.weights(0), whole.weights(2) - whole.weights(0)) < 1e-4

    first, (other,) = hurt.pid, other_ranks(hurt.pid)
    os.kill(other, signal.SIGSTOP)
    asked = asyncio.ensure_future(hurt.micro_step(3))
    await asyncio.sleep(0.5)
    os.kill(first, signal.SIGKILL)
    os.kill(other, signal.SIGCONT)
    with pytest.raises(Unavailable):
        await asked
    for pid in (first, other):
        await asyncio.to_thread(wait_for_end, pid)
    hurt.pid = 0


@pytest.mark.parametrize("which", ["first", "other"])
def test_ranks_that_do_not_come_to_the_same_end_end(make_model: MakeModel, tmp_path: Path, which: str) -> None:
    """One has failed by itself while the other waits for it."""
    program = """
        import pathlib, sys
        from gyre.train import ranked
        from gyre.train.replica import Replica, ReplicaConfig
        ranked.SAME_END_S = 0.5
        replica = ranked.RankedReplica(pathlib.Path(sys.argv[1]), ReplicaConfig(), pathlib.Path(sys.argv[2]), None, 2)
        waits, fails = (Replica.load, (pathlib.Path("nowhere"), 0)), (Replica.merge, ("unknown",))
        here, other = (fails, waits) if sys.argv[3] == "first" else (waits, fails)
        replica._at_once(lambda: here[0](replica._replica, *here[1]), [other])
    """
    argv = [sys.executable, "-c", textwrap.dedent(program), str(make_model(**SPLIT)), str(tmp_path / "c"), which]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    told = "the first rank failed" if which == "first" else "rank 1 failed"
    assert told in done.stderr
    assert "the replica ends with it" in done.stderr


def test_ranks_that_cannot_share_the_model_are_refused_by_what_they_do_not_divide(make_model: MakeModel) -> None:
    shape = read_shape(make_model())
    require_shares(shape, 1)
    with pytest.raises(BadInput, match=r"cells\.train_ranks: 2 .* must divide the model's vocab_size \(61\)"):
        require_shares(shape, 2)
    with pytest.raises(BadInput, match=r"num_attention_heads \(4\), num_key_value_heads \(2\)"):
        require_shares(shape, 3)
