"""Snapshots between nodes: real TLS over loopback, real folders, real killed processes."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gyre import pki
from gyre.actors import snapshot_fetch
from gyre.actors.messages_snapshots import Chunk, GetChunk, GetHeld, GetManifest, Held, SnapshotManifest
from gyre.actors.peers import Peers
from gyre.actors.runtime import ActorSystem, LocalRef, Ref, handles
from gyre.actors.snapshot_fetch import fetch
from gyre.actors.snapshot_folders import SnapshotFolders
from gyre.actors.snapshot_service import Snapshots, SnapshotService
from gyre.credentials import Credentials
from gyre.errors import Refused, Unavailable
from gyre.train.gathering import Gathering, find_gathering
from gyre.train.snapshot import read_manifest, snapshot_path, verify, write_snapshot
from gyre.train.whole_folder import CHUNK_BYTES

LIMIT_S = 60.0
NODES = ("core", "b", "c", "d")
CHUNKS = 9
"""Of the snapshot: eight and a bit of the weights, and one small file."""
SIZE_BYTES = 8 * CHUNK_BYTES - 1000


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    pki.init(folder, "lab", 30)
    for name in (*NODES, "liar"):
        pki.issue(folder, name, pki.Kind.NODE, 10)
    return folder


class Node:
    """One node's worth: its snapshots, its service, and its connections."""

    def __init__(self, name: str, snapshots: Snapshots, peers: Peers) -> None:
        self.name = name
        self.snapshots = snapshots
        self.peers = peers

    @property
    def folder(self) -> Path:
        return self.snapshots.folders.disk

    @property
    def copies_sent(self) -> float:
        return self.snapshots.sent_bytes / SIZE_BYTES

    def write(self, version: int, seed: int = 0) -> str:
        def fill(folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(random.Random(seed).randbytes(SIZE_BYTES))
            (folder / "config.json").write_text("{}")

        return write_snapshot(snapshot_path(self.folder, version), version, fill)

    def ref(self, other: Node) -> tuple[str, Ref]:
        return self.ref_at(other.name, other.peers.address)

    def ref_at(self, name: str, address: str) -> tuple[str, Ref]:
        return name, self.peers.ref(name, address, "snapshots")

    async def fetch(self, version: int, digest: str, *sources: tuple[str, Ref]) -> Path:
        async with asyncio.timeout(LIMIT_S):
            return await fetch(self.name, self.snapshots, version, digest, sources)

    def hurt(self, version: int, chunk: int) -> None:
        """Change a byte of it on disk."""
        path = snapshot_path(self.folder, version)
        place = read_manifest(path).chunks[chunk]
        with (path / place.file).open("r+b") as file:
            file.seek(place.offset)
            byte = file.read(1)[0]
            file.seek(place.offset)
            file.write(bytes([byte ^ 1]))


class Liar(SnapshotService):
    """Says that it holds all, and sends what is not it."""

    @handles(GetManifest)
    async def manifest(self, message: GetManifest) -> SnapshotManifest:
        return SnapshotManifest(message.version, message.digest, b'{"format": 2, "version": 1, "files": {}}')

    @handles(GetHeld)
    async def held(self, _: GetHeld) -> Held:
        return Held(None)

    @handles(GetChunk)
    async def chunk(self, message: GetChunk) -> Chunk:
        return Chunk(bytes(CHUNK_BYTES if message.chunk % 2 else 10), b"\xff" * 100)


@asynccontextmanager
async def node(
    authority: Path, folder: Path, name: str, kind: type[SnapshotService] = SnapshotService
) -> AsyncIterator[Node]:
    snapshots = Snapshots(SnapshotFolders(folder / name))
    async with ActorSystem.running(name) as system:
        service = system.spawn("snapshots", lambda: kind(snapshots))

        def find(actor: str) -> LocalRef:
            assert actor == "snapshots"
            return service

        credentials = Credentials(authority / "ca.pem", authority / f"{name}.pem", authority / f"{name}.key")
        async with Peers(name, credentials, find, "tls:127.0.0.1:0") as peers:
            yield Node(name, snapshots, peers)


@pytest.fixture
async def nodes(authority: Path, tmp_path: Path) -> AsyncIterator[dict[str, Node]]:
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(node(authority, tmp_path, name)) for name in NODES}


@asynccontextmanager
async def dying(authority: Path, name: str, folder: Path, chunks: int) -> AsyncIterator[tuple[int, str]]:
    """A node in a process of its own that is killed after so many chunks: its pid and address."""
    argv = (sys.executable, "-m", "tests.actors.snapshot_node", str(authority), name, str(folder), str(chunks))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            yield process.pid, (await asyncio.to_thread(process.stdout.readline)).strip()
        finally:
            process.kill()


async def test_a_snapshot_is_had_from_another_node_whole_and_with_its_digest(nodes: dict[str, Node]) -> None:
    core, b = nodes["core"], nodes["b"]
    digest = core.write(7)
    path = await b.fetch(7, digest, b.ref(core))
    assert path == snapshot_path(b.folder, 7)
    verify(path, digest)
    assert [file.name for file in b.folder.iterdir()] == [path.name]
    assert core.copies_sent == pytest.approx(1.0, abs=0.01)
    assert await b.fetch(7, digest) == path, "it is here"


async def test_nodes_that_fetch_at_the_same_time_have_it_from_each_other(nodes: dict[str, Node]) -> None:
    core, *others = nodes.values()
    digest = core.write(1)
    async with asyncio.TaskGroup() as group:
        for other in others:
            sources = [other.ref(source) for source in nodes.values() if source is not other]
            group.create_task(other.fetch(1, digest, *sources))
    for other in others:
        verify(snapshot_path(other.folder, 1), digest)
    assert core.copies_sent < 2.0, "and not three"
    assert sum(source.copies_sent for source in nodes.values()) == pytest.approx(3.0, abs=0.2)
    assert all(other.copies_sent > 0 for other in others)


async def test_a_node_serves_on_what_it_has_of_a_snapshot_that_its_source_did_not_live_to_send_whole(
    nodes: dict[str, Node], authority: Path
) -> None:
    b, c, core = nodes["b"], nodes["c"], nodes["core"]
    digest = core.write(1)
    async with dying(authority, "d", core.folder, 4) as (_, address):
        with pytest.raises(
            Unavailable, match=r"snapshot 1 cannot be had: d: .*(broke before the answer|cannot be reached)"
        ):
            await b.fetch(1, digest, b.ref_at("d", address))
    assert [path.name.partition("-")[0] for path in b.folder.iterdir()] == [".gathering"]
    half = find_gathering(b.folder, 1, digest)
    assert half is not None
    assert 0 < half.have.bit_count() <= 4
    with b.snapshots.fetched(1, digest):
        b.snapshots.serve_on(half)
        _, ref = c.ref(b)
        assert await ref.ask(GetHeld(1, digest), LIMIT_S, Held) == Held(half.have.to_bytes(2, "little"))
        await c.fetch(1, digest, c.ref(b), c.ref(core))
    verify(snapshot_path(c.folder, 1), digest)
    assert b.snapshots.sent_bytes > 0
    assert core.copies_sent < 1.0


async def test_what_an_earlier_try_had_is_not_fetched_again(nodes: dict[str, Node], authority: Path) -> None:
    b, core = nodes["b"], nodes["core"]
    digest = core.write(1)
    async with dying(authority, "d", core.folder, 5) as (_, address):
        with pytest.raises(Unavailable):
            await b.fetch(1, digest, b.ref_at("d", address))
    half = find_gathering(b.folder, 1, digest)
    assert half is not None
    assert half.have
    missing_bytes = sum(place.size_bytes for number, place in enumerate(half.chunks) if not half.have >> number & 1)
    verify(await b.fetch(1, digest, b.ref(core)), digest)
    assert core.snapshots.sent_bytes == missing_bytes
    assert [file.name for file in b.folder.iterdir()] == ["v00000001"]


async def test_a_source_that_is_killed_in_the_middle_is_gone_on_without(
    nodes: dict[str, Node], authority: Path
) -> None:
    b, core = nodes["b"], nodes["core"]
    digest = core.write(1)
    async with dying(authority, "d", core.folder, 3) as (_, address):
        path = await b.fetch(1, digest, b.ref_at("d", address), b.ref(core))
    verify(path, digest)
    assert core.copies_sent < 1.0, "three chunks came of the one that died"


async def test_a_source_that_is_stopped_costs_its_deadline_and_is_gone_on_without(
    nodes: dict[str, Node], authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_fetch, "CHUNK_S", 1.0)
    monkeypatch.setattr(snapshot_fetch, "ASK_S", 1.0)
    b, core = nodes["b"], nodes["core"]
    digest = core.write(1)
    async with dying(authority, "d", core.folder, 100) as (pid, address):
        name, ref = b.ref_at("d", address)
        await ref.ask(GetHeld(1, digest), LIMIT_S, Held)
        os.kill(pid, signal.SIGSTOP)
        path = await b.fetch(1, digest, (name, ref), b.ref(core))
    verify(path, digest)


async def test_a_chunk_that_comes_wrong_is_had_from_another(nodes: dict[str, Node]) -> None:
    core, b, c = nodes["core"], nodes["b"], nodes["c"]
    digest = core.write(1)
    shutil.copytree(core.folder, c.folder)
    for chunk in range(1, CHUNKS):
        c.hurt(1, chunk)
    path = await b.fetch(1, digest, b.ref(c), b.ref(core))
    verify(path, digest)


async def test_no_source_is_trusted_with_the_manifest_nor_with_a_chunk(
    nodes: dict[str, Node], authority: Path, tmp_path: Path
) -> None:
    core, b = nodes["core"], nodes["b"]
    digest = core.write(1)
    async with node(authority, tmp_path, "liar", Liar) as liar:
        verify(await b.fetch(1, digest, b.ref(liar), b.ref(core)), digest)
        with pytest.raises(
            Unavailable, match=r"liar: v00000002: manifest\.json has digest \S+, published was xxh3_128:0"
        ):
            await b.fetch(2, "xxh3_128:0", b.ref(liar))


async def test_who_can_give_none_of_it_is_named_with_the_reason(
    nodes: dict[str, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_fetch, "ABSENT_S", 0.5)
    core, b, c, d = (nodes[name] for name in ("core", "b", "c", "d"))
    digest = core.write(1)
    shutil.copytree(core.folder, c.folder)
    for chunk in range(CHUNKS):
        core.hurt(1, chunk)
    other = d.write(1, seed=1)
    with pytest.raises(Unavailable) as none:
        await b.fetch(1, other, b.ref(core), b.ref_at("b2", "tls:127.0.0.1:1"))
    assert "core: another snapshot 1 is held here" in str(none.value)
    assert "b2: tls:127.0.0.1:1 cannot be reached" in str(none.value)
    with pytest.raises(Unavailable, match=r"core: chunk \d that it sent is not what the manifest says"):
        await b.fetch(1, digest, b.ref(core), b.ref(d))
    with pytest.raises(Unavailable, match="core: snapshot 2 is not held here; c: snapshot 2 is not held here"):
        await b.fetch(2, digest, b.ref(core), b.ref(c))
    with pytest.raises(Unavailable, match="there is nobody to ask"):
        await b.fetch(2, digest)


async def test_only_what_the_manifest_lists_can_be_had(nodes: dict[str, Node]) -> None:
    core, b = nodes["core"], nodes["b"]
    digest = core.write(1)
    _, ref = b.ref(core)
    assert len((await ref.ask(GetChunk(1, digest, 1), LIMIT_S, Chunk)).data) == CHUNK_BYTES
    for chunk in (-1, CHUNKS, 10**12):
        with pytest.raises(Refused, match="snapshot 1 has chunks 0 to 8"):
            await ref.ask(GetChunk(1, digest, chunk), LIMIT_S, Chunk)
    with pytest.raises(Refused, match="snapshot 2 is not held here"):
        await ref.ask(GetChunk(2, digest, 0), LIMIT_S, Chunk)
    shutil.rmtree(snapshot_path(core.folder, 1))
    with pytest.raises(Refused, match="snapshot 1 is not held here"):
        await ref.ask(GetChunk(1, digest, 0), LIMIT_S, Chunk)


async def test_a_snapshot_is_fetched_once_at_a_time(nodes: dict[str, Node]) -> None:
    core, b = nodes["core"], nodes["b"]
    digest = core.write(1)
    ended = await asyncio.gather(*(b.fetch(1, digest, b.ref(core)) for _ in range(3)), return_exceptions=True)
    verify(snapshot_path(b.folder, 1), digest)
    assert [type(end) for end in ended[1:]] == [Refused, Refused]
    assert core.copies_sent == pytest.approx(1.0, abs=0.01)


async def test_a_fetch_that_is_cancelled_leaves_nobody_who_writes_in_the_next_ones_folder(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = SnapshotFolders.begin

    def late(folders: SnapshotFolders, version: int, digest: str, manifest: bytes) -> Gathering:
        if not begun.is_set():  # the machine is busy, the first time
            begun.set()
            go_on.wait(LIMIT_S)
        return real(folders, version, digest, manifest)

    monkeypatch.setattr(SnapshotFolders, "begin", late)
    async with node(authority, tmp_path, "core") as core, node(authority, tmp_path, "b") as b:
        digest = core.write(1)
        first = asyncio.create_task(b.fetch(1, digest, b.ref(core)))
        await asyncio.to_thread(begun.wait, LIMIT_S)
        first.cancel()
        await asyncio.sleep(0.1)
        with pytest.raises(Refused, match="fetched already"):
            await b.fetch(1, digest, b.ref(core))
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert verify(await b.fetch(1, digest, b.ref(core)), digest)


async def test_a_folder_that_goes_while_it_is_filled_is_no_end_of_who_asked(
    authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Gathering.put

    def gone(gathering: Gathering, number: int, data: bytes) -> bool:
        shutil.rmtree(gathering.path, ignore_errors=True)
        return real(gathering, number, data)

    async with node(authority, tmp_path, "core") as core, node(authority, tmp_path, "b") as b:
        digest = core.write(1)
        monkeypatch.setattr(Gathering, "put", gone)
        with pytest.raises(Unavailable, match="snapshot 1 cannot be kept: "):
            await b.fetch(1, digest, b.ref(core))
        monkeypatch.undo()
        assert verify(await b.fetch(1, digest, b.ref(core)), digest)
