"""The core's replica as a real process that is killed: the next one goes on as if it had not been."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from core_process import MakeCore, running

from gyre.train.checkpoint import list_checkpoints

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
