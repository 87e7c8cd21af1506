"""What a node's engines and replicas load from: a snapshot that is here, or comes from a node that holds it."""

from __future__ import annotations

import random
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gyre.actors import held as held_module
from gyre.actors import snapshot_fetch
from gyre.actors.held import HeldSnapshots
from gyre.actors.runtime import ActorSystem
from gyre.actors.site import Site
from gyre.actors.snapshot_folders import SnapshotFolders, held_by
from gyre.actors.snapshot_service import Snapshots, SnapshotService
from gyre.errors import StorageFull, Unavailable
from gyre.ids import CellId, NodeId
from gyre.store.protocol import Txn
from gyre.store.records import CoreRecord, NodeRecord, SnapshotRecord
from gyre.store.typed import put_record
from gyre.train.gathering import Gathering
from gyre.train.snapshot import list_snapshots, snapshot_path, verify, write_snapshot
from gyre.train.whole_folder import CHUNK_BYTES, checkpoint_path, remove_whole

from .stand_ins import a_site, first_records, follow, until

SIZE_BYTES = 3 * CHUNK_BYTES
OTHER, THIRD = NodeId("n1"), NodeId("n2")


@dataclass
class Cluster:
    """Our node, n0, and n1, which has the core and makes every snapshot."""

    site: Site
    system: ActorSystem
    made: Snapshots

    @property
    def memory(self) -> Path:
        return self.site.job.snapshots_in_memory

    @property
    def in_memory(self) -> list[int]:
        return [version for version, _ in list_snapshots(self.memory)]

    @property
    def on_disk(self) -> list[int]:
        return [version for version, _ in list_snapshots(self.site.job.snapshots)]

    async def publish(self, version: int) -> str:
        def fill(folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(random.Random(version).randbytes(SIZE_BYTES))

        digest = write_snapshot(snapshot_path(self.made.folders.disk, version), version, fill)
        await self.put(SnapshotRecord(version, digest, OTHER))
        await until(lambda: (now := self.site.directory.snapshot) is not None and now.record.digest == digest)
        return digest

    async def put(self, record: SnapshotRecord | CoreRecord) -> None:
        keys = self.site.keys
        key = keys.snapshot if isinstance(record, SnapshotRecord) else keys.core
        await self.site.store.commit(Txn(puts=(put_record(key, record),)))

    async def load(self, version: int) -> Path:
        async with self.site.held.held(version) as path:
            return path


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    site = a_site(tmp_path)
    site.snapshot_memory_bytes = 2 * SIZE_BYTES + CHUNK_BYTES
    await first_records(site)
    others = (put_record(site.keys.node(OTHER), NodeRecord(OTHER, "", "", 4)),)
    await site.store.commit(Txn(puts=(*others, put_record(site.keys.core, CoreRecord(CellId("n1-c0"), OTHER)))))
    made = Snapshots(SnapshotFolders(tmp_path / "other"))
    async with ActorSystem.running("test") as system:
        await follow(site, system)
        ref = system.spawn("other", lambda: SnapshotService(made))
        monkeypatch.setattr(site, "on", lambda *_: ref)
        yield Cluster(site, system, made)
    site.job.clear_snapshots_in_memory()


async def test_what_comes_from_another_node_is_loaded_from_memory_and_never_was_on_disk(cluster: Cluster) -> None:
    for version in (1, 2, 3):
        digest = await cluster.publish(version)
        path = await cluster.load(version)
        assert path == snapshot_path(cluster.memory, version)
        verify(path, digest)
    assert (cluster.in_memory, cluster.on_disk) == ([2, 3], [])
    assert held_by(cluster.site.job) == {2: snapshot_path(cluster.memory, 2), 3: snapshot_path(cluster.memory, 3)}


async def test_it_is_served_on_from_memory(cluster: Cluster, tmp_path: Path) -> None:
    digest = await cluster.publish(1)
    await cluster.load(1)
    copies = cluster.made.sent_bytes
    ref = cluster.system.spawn("ours", lambda: SnapshotService(cluster.site.snapshots))
    third = Snapshots(SnapshotFolders(tmp_path / "third"))
    held = HeldSnapshots(THIRD, third, tmp_path, cluster.site.directory, lambda _: ref, lambda _: ())
    verify(await held.have(1, digest, cluster.site.node), digest)
    assert cluster.made.sent_bytes == copies
    assert cluster.site.snapshots.sent_bytes == SIZE_BYTES


async def test_after_a_reboot_it_is_fetched_again(cluster: Cluster) -> None:
    digest = await cluster.publish(1)
    path = await cluster.load(1)
    cluster.site.job.clear_snapshots_in_memory()
    assert await cluster.load(1) == path
    verify(path, digest)


async def test_the_next_gyred_has_it_without_asking_anybody(cluster: Cluster) -> None:
    await cluster.publish(1)
    path = await cluster.load(1)
    sent = cluster.made.sent_bytes
    next_gyred(cluster)
    assert await cluster.load(1) == path
    assert cluster.made.sent_bytes == sent


def next_gyred(cluster: Cluster) -> None:
    """What is known of the folders is gone with a gyred; they stay."""
    for name in ("held", "snapshots"):
        del cluster.site.__dict__[name]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
async def test_one_that_was_damaged_between_two_gyreds_is_had_from_others_again(
    cluster: Cluster, damage: Callable[[Path], None]
) -> None:
    digest = await cluster.publish(1)
    path = await cluster.load(1)
    damage(path / "model.safetensors")
    next_gyred(cluster)
    verify(await cluster.load(1), digest)
    assert any(line.endswith(cluster.site.snapshots.folders.fault(1)) for line in cluster.site.events)


async def test_where_nobody_gives_another_an_engine_gets_none_and_a_replica_what_is_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.publish(1)
    path = await cluster.load(1)
    flip(path / "model.safetensors")
    remove_whole(snapshot_path(cluster.made.folders.disk, 1))
    next_gyred(cluster)
    monkeypatch.setattr(held_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(snapshot_fetch, "ABSENT_S", 0.0)
    with pytest.raises(Unavailable, match=r"v00000001: model\.safetensors does not match its checksum; .*n1: "):
        await cluster.load(1)
    async with cluster.site.held.held(1, torn=True) as torn:
        assert torn == path


async def test_where_nobody_gives_another_it_is_mended_with_the_weights_of_its_checkpoint(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = await cluster.publish(1)
    path = await cluster.load(1)
    checkpoint = checkpoint_path(cluster.site.checkpoints, 1)
    checkpoint.mkdir(parents=True)
    shutil.copy(path / "model.safetensors", checkpoint)
    flip(path / "model.safetensors")
    remove_whole(snapshot_path(cluster.made.folders.disk, 1))
    next_gyred(cluster)
    monkeypatch.setattr(snapshot_fetch, "ABSENT_S", 0.0)
    mended = await cluster.load(1)
    verify(mended, digest)
    assert mended == await cluster.load(1) == snapshot_path(cluster.site.job.snapshots, 1)


async def test_while_it_is_loaded_it_keeps_its_place(cluster: Cluster) -> None:
    await cluster.publish(1)
    async with cluster.site.held.held(1) as path:
        for version in (2, 3):
            digest = await cluster.publish(version)
            await cluster.site.held.have(version, digest, OTHER)
        assert path.is_dir()
        assert (cluster.in_memory, cluster.on_disk) == ([1], [3])
    await cluster.publish(4)
    await cluster.load(4)
    assert cluster.in_memory == [4]


async def test_memory_that_is_full_in_the_middle_has_it_go_on_on_disk(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, memory = Gathering.put, cluster.memory

    def full(self: Gathering, number: int, data: bytes) -> bool:
        if self.path.parent == memory and self.have:
            raise StorageFull("snapshots could not be written: No space left on device")
        return put(self, number, data)

    monkeypatch.setattr(Gathering, "put", full)
    digest = await cluster.publish(1)
    path = await cluster.load(1)
    assert path == snapshot_path(cluster.site.job.snapshots, 1)
    verify(path, digest)
    assert [*memory.iterdir()] == []
    assert "snapshot 1 goes to disk" in cluster.site.events[-1]


async def test_the_node_that_gets_the_core_has_the_published_snapshot_on_disk(cluster: Cluster) -> None:
    digest = await cluster.publish(1)
    assert (await cluster.load(1)).parent == cluster.memory
    await cluster.put(CoreRecord(CellId("c0"), cluster.site.node))
    await until(lambda: cluster.site.core_cell == "c0")
    path = await cluster.load(1)
    assert path == snapshot_path(cluster.site.job.snapshots, 1)
    verify(path, digest)
    cluster.site.snapshots.folders.keep_newest()
    assert cluster.in_memory == []
    assert await cluster.load(1) == path
