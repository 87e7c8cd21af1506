"""Where a node's snapshots are: in shared memory within its bound, on disk what does not fit."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre.actors import snapshot_folders
from gyre.actors.snapshot_folders import KEEP_SNAPSHOTS, SnapshotFolders
from gyre.errors import StorageFull, Unavailable
from gyre.jobdir import JobDir
from gyre.train.gathering import Gathering, read_chunk
from gyre.train.snapshot import (
    MANIFEST,
    digest_of,
    list_snapshots,
    read_manifest,
    snapshot_path,
    verify,
    write_snapshot,
)
from gyre.train.whole_folder import CHUNK_BYTES

SIZE_BYTES = 3 * CHUNK_BYTES
ROOM_FOR_TWO = 2 * SIZE_BYTES + CHUNK_BYTES


class Held:
    """The folders of a node, and what it has said."""

    def __init__(self, tmp_path: Path, memory: Path, memory_bytes: int) -> None:
        self.said: list[str] = []
        self.memory = memory
        self.disk = tmp_path / "snapshots"
        self.disk.mkdir(exist_ok=True)
        self._source = tmp_path / "elsewhere"
        self.folders = SnapshotFolders(self.disk, memory, memory_bytes, self.said.append)

    def made(self, version: int, seed: int = 0) -> tuple[str, Path]:
        """Its digest and its folder at another node."""
        path = snapshot_path(self._source, version)
        weights = random.Random(f"{version} {seed}").randbytes(SIZE_BYTES - 2)

        def fill(folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(weights)
            (folder / "config.json").write_text("{}")

        return write_snapshot(path, version, fill), path

    def begin(self, version: int, seed: int = 0) -> Gathering:
        digest, path = self.made(version, seed)
        return self.folders.begin(version, digest, (path / MANIFEST).read_bytes())

    def fill(self, gathering: Gathering, chunks: int | None = None) -> None:
        path = snapshot_path(self._source, gathering.manifest.version)
        for number, place in enumerate(gathering.chunks[:chunks]):
            assert gathering.put(number, read_chunk(path, place))

    def fetch(self, version: int, seed: int = 0) -> Path:
        gathering = self.begin(version, seed)
        self.fill(gathering)
        return gathering.commit()

    def in_memory(self) -> list[int]:
        return [version for version, _ in list_snapshots(self.memory)]

    def on_disk(self) -> list[int]:
        return [version for version, _ in list_snapshots(self.disk)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Held]]:
    job = JobDir(tmp_path)

    def held(memory_bytes: int = ROOM_FOR_TWO) -> Held:
        return Held(tmp_path, job.snapshots_in_memory, memory_bytes)

    yield held
    job.clear_snapshots_in_memory()
    assert not job.snapshots_in_memory.exists()


def test_a_snapshot_of_another_node_is_held_in_private_shared_memory(make: Callable[..., Held]) -> None:
    held = make()
    path = held.fetch(3)
    assert path == snapshot_path(held.memory, 3)
    assert path.is_relative_to("/dev/shm")
    assert held.memory.stat().st_mode & 0o777 == 0o700
    assert (held.on_disk(), held.said) == ([], [])
    assert held.folders.find(3) == path


def test_the_one_in_use_and_the_one_that_comes_are_in_memory(make: Callable[..., Held]) -> None:
    held = make()
    for version in (1, 2, 3, 4):
        assert held.fetch(version).parent == held.memory
        assert held.in_memory() == [version - 1, version][-min(version, 2) :]
    assert (held.on_disk(), held.said) == ([], [])


def test_one_that_somebody_opens_keeps_its_room_and_the_next_goes_to_disk(make: Callable[..., Held]) -> None:
    held = make()
    held.fetch(1)
    held.fetch(2)
    with held.folders.pinned(1):
        assert held.fetch(3).parent == held.disk
        assert held.in_memory() == [1, 2]
    assert held.fetch(4).parent == held.memory
    assert len(held.said) == 1
    assert "snapshot 3 goes to disk" in held.said[0]


def test_what_an_engine_has_mapped_stays_with_it_when_the_snapshot_goes(make: Callable[..., Held]) -> None:
    held = make()
    path = held.fetch(1)
    expected = (path / "model.safetensors").read_bytes()
    with (path / "model.safetensors").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        held.fetch(2)
        held.fetch(3)
        assert not path.exists()
        assert mapped[:] == expected


@pytest.mark.parametrize("memory_bytes", [1, 2 * SIZE_BYTES - 1024 * 1024])
def test_where_two_do_not_fit_all_are_on_disk_and_that_is_told_once(
    make: Callable[..., Held], memory_bytes: int
) -> None:
    held = make(memory_bytes)
    for version in (1, 2, 3):
        assert held.fetch(version).parent == held.disk
    assert not held.memory.exists()
    (line,) = held.said
    assert "snapshot 1 goes to disk" in line
    assert "node.snapshot_memory_mib" in line


def test_without_memory_nothing_is_said(make: Callable[..., Held]) -> None:
    held = make(0)
    assert held.fetch(1).parent == held.disk
    assert not held.memory.exists()
    assert held.said == []


def test_shared_memory_that_is_full_by_others_is_not_begun_with(
    make: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = make()
    held.fetch(1)
    real = os.statvfs(held.memory)
    full = os.statvfs_result((*real[:3], 0, 0, *real[5:]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: full)
        assert held.fetch(2).parent == held.disk
    assert "/dev/shm has 0 MiB left" in held.said[0]
    assert held.fetch(3).parent == held.memory


def test_memory_that_ends_in_the_middle_loses_nothing_that_has_come(make: Callable[..., Held]) -> None:
    held = make()
    gathering = held.begin(1)
    held.fill(gathering, 2)
    assert gathering.path.parent == held.memory
    full = StorageFull("no space left on device")
    moved = held.folders.go_on_on_disk(gathering, full)
    assert moved.path.parent == held.disk
    assert moved.have == gathering.have == 0b11
    assert not gathering.path.exists()
    held.fill(moved)
    verify(moved.commit(), moved.digest)
    assert "no space left" in held.said[0]
    with pytest.raises(StorageFull):
        held.folders.go_on_on_disk(moved, full)


def test_a_folder_of_somebody_else_is_neither_written_nor_read(make: Callable[..., Held]) -> None:
    held = make()
    digest, _ = held.made(1)
    held.memory.mkdir(mode=0o755)
    try:
        write_snapshot(snapshot_path(held.memory, 1), 1, lambda folder: None)
        assert held.folders.find(1) is None
        assert held.fetch(1).parent == held.disk
        assert held.folders.find_whole(1, digest) == snapshot_path(held.disk, 1)
        assert "must be a folder of this user's" in held.said[0]
    finally:
        held.memory.chmod(0o700)


def test_the_next_gyred_finds_what_is_whole_and_goes_on_with_what_is_not(make: Callable[..., Held]) -> None:
    before = make()
    path = before.fetch(1)
    half = before.begin(2)
    before.fill(half, 2)

    after = make().folders
    digest, _ = before.made(1)
    assert after.find_whole(1, digest) == path
    found = after.find_gathering(2, half.digest)
    assert found is not None
    assert found.have == 0b11


def test_after_a_reboot_there_is_nothing_and_nothing_is_wrong(make: Callable[..., Held], tmp_path: Path) -> None:
    held = make()
    digest = digest_of((held.fetch(1) / MANIFEST).read_bytes())
    JobDir(tmp_path).clear_snapshots_in_memory()
    assert held.folders.find(1) is None
    assert held.folders.find_whole(1, digest) is None
    assert held.fetch(1).parent == held.memory


def test_one_of_another_content_or_torn_is_not_taken_for_it(make: Callable[..., Held]) -> None:
    held = make()
    path = held.fetch(1, seed=1)
    old, (new, _) = digest_of((path / MANIFEST).read_bytes()), held.made(1, seed=2)
    assert held.folders.find(1, old) == path
    assert held.folders.find(1, new) is None
    assert verify(held.fetch(1, seed=2), new)
    (path / "model.safetensors").write_bytes(b"cut short")
    assert held.folders.find(1, new) == path, "who loads it says that it is torn"
    assert held.folders.find_whole(1, new) is None
    with pytest.raises(Unavailable):
        held.folders.bring_to_disk(1, new)
    assert held.on_disk() == []


@pytest.mark.parametrize("memory_bytes", [ROOM_FOR_TWO, 0])
def test_every_byte_is_looked_at_once_and_again_when_it_has_changed(
    make: Callable[..., Held], memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(memory_bytes).fetch(1)
    held = make(memory_bytes)
    digest, _ = held.made(1)
    looked: list[Path] = []
    monkeypatch.setattr(snapshot_folders, "verify", lambda path: looked.append(path) or verify(path))
    path = held.folders.find_whole(1, digest)
    assert path is not None
    assert held.folders.find_whole(1) == held.folders.find_whole(1, digest) == path
    assert looked == [path]

    flip(path / "model.safetensors")
    assert held.folders.find_whole(1, digest) is None
    assert held.folders.find_whole(1) is None
    assert looked == [path, path]
    assert held.said == [f"snapshot 1 is damaged here, and no engine gets it: {held.folders.fault(1)}"]
    assert held.folders.fault(1) == "v00000001: model.safetensors does not match its checksum"


def test_what_has_just_come_is_not_looked_at_and_a_torn_one_beside_it_goes(
    make: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(0).fetch(1)
    held = make()
    digest, _ = held.made(1)
    torn = snapshot_path(held.disk, 1)
    flip(torn / "model.safetensors")
    assert held.folders.find_whole(1, digest) is None
    path = held.fetch(1)
    held.folders.has_come(path)
    assert (held.in_memory(), held.on_disk()) == ([1], [])
    monkeypatch.setattr(snapshot_folders, "verify", None)
    assert held.folders.find(1) == held.folders.find_whole(1, digest) == path


def test_a_torn_one_on_disk_is_replaced_by_what_is_whole_in_memory(make: Callable[..., Held]) -> None:
    make(0).fetch(1)
    held = make()
    digest, _ = held.made(1)
    flip(snapshot_path(held.disk, 1) / "model.safetensors")
    held.fetch(1)
    assert verify(held.folders.bring_to_disk(1, digest), digest)
    assert held.on_disk() == [1]


def flip(file: Path) -> None:
    """A byte in the middle; its size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_what_the_core_begins_from_is_brought_to_disk_and_leaves_memory(make: Callable[..., Held]) -> None:
    held = make()
    held.fetch(1)
    path = held.fetch(2)
    digest = digest_of((path / MANIFEST).read_bytes())
    with held.folders.pinned(2):
        kept = held.folders.bring_to_disk(2, digest)
        assert held.folders.find(2) == kept == snapshot_path(held.disk, 2)
        assert held.in_memory() == [2]
    assert verify(kept, digest) == read_manifest(kept)
    begun = kept.stat().st_ino
    assert held.folders.bring_to_disk(2, digest) == kept
    assert kept.stat().st_ino == begun, "somebody may be opening it"
    held.folders.keep_newest()
    assert (held.in_memory(), held.on_disk()) == ([], [2])


def test_on_disk_the_newest_few_stay_and_what_somebody_opens(make: Callable[..., Held]) -> None:
    held = make(0)
    for version in range(KEEP_SNAPSHOTS + 3):
        held.fetch(version)
    with held.folders.pinned(0):
        held.folders.keep_newest()
    assert held.on_disk() == [0, *range(3, KEEP_SNAPSHOTS + 3)]


def test_what_went_to_disk_meanwhile_leaves_no_older_one_in_memory(make: Callable[..., Held]) -> None:
    held = make()
    held.fetch(1)
    held.made(2)[1].rename(snapshot_path(held.disk, 2))
    with held.folders.pinned(1):
        held.folders.keep_newest()
        assert held.in_memory() == [1], "somebody opens it"
    held.folders.keep_newest()
    assert (held.in_memory(), held.on_disk()) == ([], [2])
