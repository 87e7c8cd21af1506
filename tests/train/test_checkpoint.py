"""Checkpoints on disk: whole or not used, and written beside training."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from write_checkpoints import check

from gyre.config import CheckpointSection
from gyre.errors import StorageFull
from gyre.train import checkpoint_writer
from gyre.train.checkpoint import (
    Checkpoint,
    CheckpointTorn,
    Index,
    checkpoint_path,
    list_checkpoints,
    newest_fitting,
    read_moments,
    read_weights,
    verify,
    why_unfit,
    write_checkpoint,
)
from gyre.train.checkpoint_writer import CheckpointWriter

SETTLE_S = 60.0


def small(version: int) -> Checkpoint:
    tensor = torch.tensor([float(version), 2.0])
    return Checkpoint(version, f"digest-{version}", "layout", {"w": tensor}, {"exp_avg.w": tensor})


def versions(checkpoints_dir: Path) -> list[int]:
    return [version for version, _ in list_checkpoints(checkpoints_dir)]


def fitting(checkpoints_dir: Path, version: int = 9) -> int:
    found = newest_fitting(checkpoints_dir, version, "layout", lambda of: f"digest-{of}")
    return found[0].version if found else -1


# ------------------------------------------------------------------------------------------------ on disk


def test_a_checkpoint_reads_back_to_the_bit(tmp_path: Path) -> None:
    write_checkpoint(small(7), tmp_path)
    path = checkpoint_path(tmp_path, 7)
    index = verify(path)
    assert (index.version, index.snapshot, index.layout_hash) == (7, "digest-7", "layout")
    assert [entry.name for entry in index.files] == ["model.safetensors", "optimizer.safetensors"]
    assert torch.equal(read_weights(path)["w"], small(7).weights["w"])
    assert torch.equal(read_moments(path)["exp_avg.w"], small(7).moments["exp_avg.w"])
    assert fitting(tmp_path) == 7


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_or_cut_of_any_file_is_found_and_the_one_before_is_used(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = checkpoint_path(tmp_path, 2)
    if not path.exists():
        for version in (1, 2):
            write_checkpoint(small(version), tmp_path)
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    whole = file.read_bytes()
    content = bytearray(whole)
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    with pytest.raises(CheckpointTorn, match="c00000002"):
        verify(path)
    assert fitting(tmp_path) == 1
    file.write_bytes(whole)
    assert fitting(tmp_path) == 2


def test_every_byte_of_an_index_is_sealed(tmp_path: Path) -> None:
    write_checkpoint(small(1), tmp_path)
    path = checkpoint_path(tmp_path, 1)
    content = (path / "index.json").read_bytes()
    for place in range(len(content)):
        (path / "index.json").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(CheckpointTorn, match="index"):
            verify(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"null", b'{"files": 1}', b"[" * 100_000, b"\xff\xfe"])
def test_an_index_that_is_none_is_torn(tmp_path: Path, content: bytes) -> None:
    write_checkpoint(small(1), tmp_path)
    (checkpoint_path(tmp_path, 1) / "index.json").write_bytes(content)
    with pytest.raises(CheckpointTorn, match=r"index\.json was changed or cut short"):
        verify(checkpoint_path(tmp_path, 1))


def test_each_that_is_passed_over_is_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for version in (1, 2, 3, 4):
        write_checkpoint(small(version), tmp_path)
    (checkpoint_path(tmp_path, 4) / "model.safetensors").unlink()
    checkpoint_path(tmp_path, 3).rename(checkpoint_path(tmp_path, 5))
    (tmp_path / "notes").mkdir()
    assert fitting(tmp_path) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "checkpoint c00000005: it is of version 3; the one before is tried",
        "checkpoint c00000004: model.safetensors is missing, 104 bytes are expected; the one before is tried",
    ]
    assert fitting(tmp_path / "nowhere") == -1


@pytest.mark.parametrize(
    ("version", "layout_hash", "published", "reason"),
    [
        (7, "layout", "digest-7", ""),
        (8, "layout", "digest-7", ""),
        (8, "layout", "", ""),
        (6, "layout", "digest-7", "a step that was not published"),
        (7, "layout", "digest-of-another", "a step that was taken again"),
        (8, "layout", "digest-of-another", "a step that was taken again"),
        (7, "other", "digest-7", "layout"),
    ],
)
def test_what_a_checkpoint_fits(version: int, layout_hash: str, published: str, reason: str) -> None:
    found = why_unfit(Index(7, "digest-7", "layout", ()), version, layout_hash, published)
    assert reason in found
    assert bool(reason) == bool(found)


def test_a_writer_killed_at_any_point_leaves_a_state_to_go_on_from(tmp_path: Path) -> None:
    """Each next child begins with what the killed one left, whatever that is; no version is ever lost again."""
    dice = random.Random(4)
    program = Path(__file__).with_name("write_checkpoints.py")
    newest, torn = -1, 0
    with subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for _ in range(25):
            print(file=parent.stdin, flush=True)
            child = int(parent.stdout.readline())
            until_s = time.monotonic() + SETTLE_S
            while versions(tmp_path)[-1:] in ([], [newest]) and time.monotonic() < until_s:
                time.sleep(0.001)
            time.sleep(dice.uniform(0.0, 0.03))
            os.kill(child, signal.SIGKILL)
            while Path(f"/proc/{child}").exists():
                time.sleep(0.001)
            found = check(tmp_path)
            assert found > newest
            newest = found
            torn += any(path.name.startswith(".unfinished-") for path in tmp_path.iterdir())
        parent.stdin.close()
    assert torn > 0, "some kills came in the middle of a write"


# ------------------------------------------------------------------------------------------------ beside training


class Disk:
    """Takes the place of the disk: each write waits for leave, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.leave = threading.Semaphore(0)
        self.full = False
        self._began = threading.Condition()
        monkeypatch.setattr(checkpoint_writer, "write_checkpoint", self._write)

    def _write(self, checkpoint: Checkpoint, checkpoints_dir: Path) -> None:
        with self._began:
            self.begun.append(checkpoint.version)
            self._began.notify_all()
        assert self.leave.acquire(timeout=SETTLE_S)
        if self.full:
            raise StorageFull(f"c{checkpoint.version:08d} could not be written: No space left on device")
        write_checkpoint(checkpoint, checkpoints_dir)

    def wait_for(self, version: int) -> None:
        with self._began:
            assert self._began.wait_for(lambda: version in self.begun, SETTLE_S)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def writer_of(tmp_path: Path) -> Callable[..., CheckpointWriter]:
    def make(**section: int) -> CheckpointWriter:
        return CheckpointWriter(tmp_path / "checkpoints", CheckpointSection(**section))

    return make


def test_training_goes_on_while_one_is_written_and_the_newest_waits(
    tmp_path: Path, disk: Disk, writer_of: Callable[..., CheckpointWriter]
) -> None:
    writer = writer_of()
    writer.offer(small(1))
    disk.wait_for(1)
    for version in (2, 3, 4):
        writer.offer(small(version))
    assert not writer.settle(0.0)
    assert disk.begun == [1]
    for _ in range(2):
        disk.leave.release()
    assert writer.settle(SETTLE_S)
    assert disk.begun == [1, 4], "a newer one takes the place of the one that waits"
    assert versions(tmp_path / "checkpoints") == [1, 4]
    assert writer.metrics()["checkpoint_version"] == 4.0


def test_the_newest_are_kept(tmp_path: Path, writer_of: Callable[..., CheckpointWriter]) -> None:
    writer = writer_of(keep=3)
    for version in range(1, 7):
        writer.offer(small(version))
        assert writer.settle(SETTLE_S)
    assert versions(tmp_path / "checkpoints") == [4, 5, 6]
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_state_is_held_until_it_or_a_newer_one_is_on_disk(
    tmp_path: Path, writer_of: Callable[..., CheckpointWriter]
) -> None:
    writer = writer_of(every_steps=2)
    writer.offer(small(1))
    assert writer.settle(SETTLE_S)
    assert writer.held(1, "digest-1") is not None, "it was not its turn"
    assert writer.held(1, "digest-of-another") is None
    writer.offer(small(2))
    assert writer.settle(SETTLE_S)
    assert writer.held(1, "digest-1") is None
    assert writer.held(2, "digest-2") is None
    assert versions(tmp_path / "checkpoints") == [2]


def test_a_full_disk_is_one_warning_and_a_metric_until_it_has_room(
    tmp_path: Path, disk: Disk, writer_of: Callable[..., CheckpointWriter], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    writer = writer_of()
    for version, full in ((1, False), (2, True), (3, True), (4, False)):
        disk.full = full
        disk.leave.release()
        writer.offer(small(version))
        assert writer.settle(SETTLE_S)
        assert (writer.held(version, f"digest-{version}") is not None) == full
        assert writer.metrics()["checkpoint_failures"] == {1: 0, 2: 1, 3: 2, 4: 0}[version]
    assert [record.getMessage() for record in caplog.records] == [
        "there is no checkpoint of version 2 (c00000002 could not be written: No space left on device); training goes "
        "on and later ones are tried, but a replica that dies now begins the optimizer's state from version 1",
        "checkpoint c00000004 is on disk: checkpoints are written again",
    ]
    assert versions(tmp_path / "checkpoints") == [1, 4]


def test_what_a_killed_writer_left_is_cleared_by_the_next(
    tmp_path: Path, writer_of: Callable[..., CheckpointWriter]
) -> None:
    left = tmp_path / "checkpoints" / ".unfinished-c00000003-1"
    left.mkdir(parents=True)
    writer = writer_of()
    assert left.is_dir(), "a satellite's writer touches nothing"
    writer.offer(small(3))
    assert writer.settle(SETTLE_S)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["c00000003"]
