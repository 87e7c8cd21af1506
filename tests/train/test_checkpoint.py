"""Checkpoints: whole or not used, staged before the step is answered, and brought to disk beside training."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from write_checkpoints import check

from gyre.config import CheckpointSection
from gyre.errors import StorageFull
from gyre.train import checkpoint_writer
from gyre.train.checkpoint import (
    MODEL,
    Checkpoint,
    CheckpointTorn,
    Index,
    checkpoint_path,
    copy_checkpoint,
    list_checkpoints,
    newest_fitting,
    read_moments,
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
    found = newest_fitting((checkpoints_dir,), version, "layout", lambda of: f"digest-{of}")
    return found[0].version if found else -1


# ------------------------------------------------------------------------------------------------ on disk


def test_a_checkpoint_reads_back_to_the_bit(tmp_path: Path) -> None:
    write_checkpoint(small(7), tmp_path)
    path = checkpoint_path(tmp_path, 7)
    index = verify(path)
    assert (index.version, index.snapshot, index.model_hash) == (7, "digest-7", "layout")
    assert [entry.name for entry in index.files] == ["model.safetensors", "optimizer.safetensors"]
    assert torch.equal(load_file(path / MODEL)["w"], small(7).weights["w"])
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
    ("version", "model_hash", "published", "reason"),
    [
        (7, "layout", "digest-7", ""),
        (8, "layout", "digest-7", ""),
        (8, "layout", "", ""),
        (6, "layout", "digest-7", "a step that was not published"),
        (7, "layout", "digest-of-another", "a step that was taken again"),
        (8, "layout", "digest-of-another", "a step that was taken again"),
        (7, "other", "digest-7", "of model"),
    ],
)
def test_what_a_checkpoint_fits(version: int, model_hash: str, published: str, reason: str) -> None:
    found = why_unfit(Index(7, "digest-7", "layout", ()), version, model_hash, published)
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


# ------------------------------------------------------------------------------------------------ shared memory, then disk


class Disk:
    """Takes the place of the disk: each write waits for leave, and may fail."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.leave = threading.Semaphore(0)
        self.full = False
        self._folder = folder
        self._began = threading.Condition()
        monkeypatch.setattr(checkpoint_writer, "copy_checkpoint", self._copy)
        monkeypatch.setattr(checkpoint_writer, "write_checkpoint", self._write)

    def _copy(self, source: Path, checkpoints_dir: Path) -> None:
        self._take(int(source.name.removeprefix("c")))
        copy_checkpoint(source, checkpoints_dir)

    def _write(self, checkpoint: Checkpoint, checkpoints_dir: Path) -> None:
        if checkpoints_dir == self._folder:
            self._take(checkpoint.version)
        write_checkpoint(checkpoint, checkpoints_dir)

    def _take(self, version: int) -> None:
        with self._began:
            self.begun.append(version)
            self._began.notify_all()
        assert self.leave.acquire(timeout=SETTLE_S)
        if self.full:
            raise StorageFull(f"c{version:08d} could not be written: No space left on device")

    def wait_for(self, version: int) -> None:
        with self._began:
            assert self._began.wait_for(lambda: version in self.begun, SETTLE_S)


class Places:
    """A writer's two folders; `staging` is its process's shared memory."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.staging = folder / "checkpoints", folder / "staging"

    def writer(self, **section: int) -> CheckpointWriter:
        return CheckpointWriter(self.disk, self.staging, CheckpointSection(**section))

    def fitting(self, version: int) -> int:
        """What a fresh replica that holds snapshot `version` goes on from."""
        with self.writer().places() as places:
            found = newest_fitting(places, version, "layout", lambda of: f"digest-{of}")
        return found[0].version if found else -1


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


@pytest.fixture
def disk(places: Places, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(places.disk, monkeypatch)


def test_training_goes_on_while_one_is_written_and_the_newest_is_next(places: Places, disk: Disk) -> None:
    writer = places.writer()
    writer.offer(small(1))
    disk.wait_for(1)
    for version in (2, 3, 4):
        writer.offer(small(version))
        assert places.fitting(version) == version, "it is safe before it is on disk"
    assert not writer.settle(0.0)
    assert disk.begun == [1]
    assert versions(places.staging) == [1, 3, 4], "the one being written, the newest, and that before it"
    for _ in range(2):
        disk.leave.release()
    assert writer.settle(SETTLE_S)
    assert disk.begun == [1, 4], "a newer one takes the place of those that wait"
    assert versions(places.disk) == [1, 4]
    assert writer.metrics()["checkpoint_version"] == 4.0
    assert places.staging.stat().st_mode & 0o777 == 0o700


def test_the_newest_are_kept(places: Places) -> None:
    writer = places.writer(keep=3)
    for version in range(1, 7):
        writer.offer(small(version))
        assert writer.settle(SETTLE_S)
    assert versions(places.disk) == [4, 5, 6]
    assert versions(places.staging) == []
    assert not [path for path in places.disk.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("every_steps", [1, 2, 3, 10])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("staging", ["there is room", "there is none"])
def test_whenever_it_dies_a_step_can_be_gone_on_from_and_taken_again(
    places: Places, every_steps: int, keep: int, staging: str
) -> None:
    """Dead after a step: it was published, or was not. The next process goes on in both cases, and dies too."""
    if staging == "there is none":
        places.staging.write_text("no folder can be made here")
    for version in range(1, 12):
        writer = places.writer(every_steps=every_steps, keep=keep)
        for again in (1, 2):  # the first was not published
            writer.offer(small(version))
            writer.settle(SETTLE_S)
            assert places.fitting(version) == version, again
            assert places.fitting(version - 1) == (version - 1 or -1), again
        assert len(versions(places.disk)) <= max(keep, 2)
        if staging == "there is room":
            assert len(versions(places.staging)) <= 2


def test_an_end_brings_all_to_disk_and_leaves_no_folder(places: Places) -> None:
    writer = places.writer(every_steps=10)
    for version in (1, 2, 3):
        writer.offer(small(version))
    assert versions(places.staging) == [2, 3], "the step to 3 may have to be taken again"
    assert versions(places.disk) == []
    (places.staging / ".unfinished-c00000009-1").mkdir()
    assert writer.end(SETTLE_S)
    assert versions(places.disk) == [2, 3]
    assert not places.staging.exists()
    writer.offer(small(4))
    assert versions(places.disk) == [3, 4], "a step that ends after that goes straight to disk"
    assert not places.staging.exists()


def test_an_end_that_the_disk_has_no_room_for_leaves_the_staged_ones_to_be_gone_on_from(
    places: Places, disk: Disk
) -> None:
    disk.full = True
    disk.leave.release()
    writer = places.writer(every_steps=10)
    writer.offer(small(1))
    assert writer.end(SETTLE_S)
    assert versions(places.staging) == [1]
    assert places.fitting(1) == 1


def test_a_torn_staged_one_has_the_one_before_it_in_its_place_and_is_not_brought(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    writer = places.writer(every_steps=10)
    for version in (1, 2):
        writer.offer(small(version))
    file = checkpoint_path(places.staging, 2) / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert places.fitting(2) == 1
    assert writer.end(SETTLE_S)
    assert versions(places.disk) == [1]
    assert not places.staging.exists()
    assert "staged checkpoint c00000002: optimizer.safetensors has" in caplog.messages[-1]


def test_a_folder_that_others_can_write_is_not_trusted(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(small(1), places.staging)
    places.staging.chmod(0o755)
    assert places.fitting(1) == -1
    writer = places.writer()
    writer.offer(small(2))
    assert versions(places.disk) == [2], "the answer waited for the disk"
    assert "it must be a folder of this user's with mode 0700" in caplog.text


def test_where_there_is_no_shared_memory_the_answer_waits_for_the_disk_whatever_the_turn(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    places.staging.write_text("no folder can be made here")
    writer = places.writer(every_steps=10)
    for version in (1, 2, 3):
        writer.offer(small(version))
        assert versions(places.disk)[-1] == version
        assert writer.held(version, f"digest-{version}") is None
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "checkpoint c00000001 cannot be staged in shared memory"
    ]


def test_a_state_is_held_in_memory_where_neither_takes_it(places: Places, disk: Disk) -> None:
    places.staging.write_text("no folder can be made here")
    disk.full = True
    disk.leave.release()
    writer = places.writer()
    writer.offer(small(1))
    assert writer.held(1, "digest-1") is not None
    assert writer.held(1, "digest-of-another") is None
    disk.full = False
    disk.leave.release()
    assert writer.end(SETTLE_S), "the end tries once more"
    assert versions(places.disk) == [1]


@pytest.mark.parametrize(("staged", "who"), [(True, "machine"), (False, "replica")])
def test_a_full_disk_is_one_warning_and_a_metric_until_it_has_room(
    places: Places, disk: Disk, caplog: pytest.LogCaptureFixture, staged: bool, who: str
) -> None:
    caplog.set_level(logging.INFO)
    if not staged:
        places.staging.write_text("no folder can be made here")
    writer = places.writer()
    for version, full in ((1, False), (2, True), (3, True), (4, False)):
        disk.full = full
        disk.leave.release()
        writer.offer(small(version))
        assert writer.settle(SETTLE_S)
        assert (writer.held(version, f"digest-{version}") is not None) == (full and not staged)
        assert writer.metrics()["checkpoint_failures"] == {1: 0, 2: 1, 3: 2, 4: 0}[version]
    assert [record.getMessage() for record in caplog.records if "staged" not in record.getMessage()] == [
        "there is no checkpoint of version 2 on disk (c00000002 could not be written: No space left on device); training "
        f"goes on and later ones are tried, but a {who} that dies now begins the optimizer's state from version 1",
        "checkpoint c00000004 is on disk: checkpoints are written again",
    ]
    assert versions(places.disk) == [1, 4]


def test_what_a_killed_writer_left_is_cleared_by_the_next(places: Places) -> None:
    left = places.disk / ".unfinished-c00000003-1", places.staging / ".unfinished-c00000003-1"
    for folder in left:
        folder.mkdir(parents=True)
    places.staging.chmod(0o700)
    writer = places.writer()
    assert all(folder.is_dir() for folder in left), "a satellite's writer touches nothing"
    writer.offer(small(3))
    assert writer.settle(SETTLE_S)
    assert [path.name for path in places.disk.iterdir()] == ["c00000003"]
    assert list(places.staging.iterdir()) == []
