"""The embedded store: the conformance suite in memory and in a file, and what a file adds: locks, kills, resuming."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from gyre.errors import BadInput, Refused
from gyre.store.embedded import EmbeddedStore
from gyre.store.open import open_store
from gyre.store.protocol import Compacted, Store, StoreFull, StoreLocked

from .conformance import StoreConformance, put, take


class TestInMemory(StoreConformance):
    ttl_s = 0.8

    @pytest_asyncio.fixture
    async def store(self) -> AsyncIterator[Store]:
        store = open_store("memory:")
        yield store
        await store.close()


class TestInFile(StoreConformance):
    ttl_s = 0.8

    @pytest_asyncio.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = open_store(f"sqlite://{tmp_path}/state.db")
        yield store
        await store.close()


async def test_what_was_written_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    store = EmbeddedStore.open(tmp_path / "state.db")
    first = await put(store, "/a", b"1")
    second = await put(store, "/a", b"2")
    await store.compact(first)
    await store.close()

    store = EmbeddedStore.open(tmp_path / "state.db")
    kv = await store.get("/a")
    assert kv is not None
    assert (kv.value, kv.create_revision, kv.mod_revision, kv.version) == (b"2", first, second, 2)
    assert await put(store, "/b") == second + 1
    async with aclosing(store.watch("/", second)) as events:
        assert [event.kv.key for event in await take(events, 2)] == ["/a", "/b"]
    async with aclosing(store.watch("/", first - 1)) as events:
        with pytest.raises(Compacted):
            await take(events, 1)
    await store.close()


async def test_who_opens_the_file_ends_the_leases_of_the_process_before(tmp_path: Path) -> None:
    store = EmbeddedStore.open(tmp_path / "state.db")
    lease = await store.lease(3600)
    await put(store, "/leader", b"me", lease.id)
    last = await put(store, "/job", b"kept")
    await store.close()

    store = EmbeddedStore.open(tmp_path / "state.db")
    assert [kv.key for kv in (await store.range("/")).items] == ["/job"]
    async with aclosing(store.watch("/", last + 1)) as events:
        (event,) = await take(events, 1)
    assert (event.kind, event.kv.key) == ("delete", "/leader")
    await store.close()


_WRITER = """
import asyncio, sys
from pathlib import Path
from gyre.store.embedded import EmbeddedStore
from gyre.store.protocol import Put

async def main():
    store = EmbeddedStore.open(Path(sys.argv[1]))
    for n in range(10**9):
        result = await store.txn(puts=[Put(f"/a/{n:08d}", b"x"), Put(f"/b/{n:08d}", b"x")])
        print(n, result.revision, flush=True)

asyncio.run(main())
"""


async def test_a_killed_writer_leaves_every_acknowledged_write_whole_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = [writer.stdout.readline().split() for _ in range(50)]
    with pytest.raises(StoreLocked, match=f"process {writer.pid} has it open"):
        EmbeddedStore.open(path)
    os.kill(writer.pid, signal.SIGKILL)
    acknowledged += [line.split() for line in writer.stdout.read().splitlines() if line.count(" ") == 1]
    writer.wait(timeout=20)

    store = EmbeddedStore.open(path)
    a, b = (await store.range("/a/")).items, (await store.range("/b/")).items
    assert len(a) >= len(acknowledged) >= 50
    assert [kv.key[3:] for kv in a] == [kv.key[3:] for kv in b] == [f"{n:08d}" for n in range(len(a))]
    assert [kv.mod_revision for kv in a] == [kv.mod_revision for kv in b]
    for n, revision in acknowledged:
        assert a[int(n)].mod_revision == int(revision)
    await store.close()


async def test_a_second_writer_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = EmbeddedStore.open(path)
    with pytest.raises(StoreLocked) as refused:
        EmbeddedStore.open(path)
    assert str(refused.value) == f"state store {path}: process {os.getpid()} has it open; end that job first"
    await store.close()
    await EmbeddedStore.open(path).close()


async def test_a_file_that_finds_no_room_is_a_full_store_and_with_room_it_goes_on(tmp_path: Path) -> None:
    store = EmbeddedStore.open(tmp_path / "state.db")
    await put(store, "/a", b"1")
    db = store._history._db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises(StoreFull, match="free some space on its disk"):
        await put(store, "/a", bytes(200_000))
    kv = await store.get("/a")
    assert kv is not None
    assert kv.value == b"1"
    db.execute("PRAGMA max_page_count = 1000000")
    assert await put(store, "/a", b"2") == kv.mod_revision + 1
    await store.close()


async def test_a_reader_sees_a_live_job_and_a_finished_one_and_writes_neither(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    writer = EmbeddedStore.open(path)
    await put(writer, "/a", b"1")
    reader = open_store(f"sqlite://{path}", read_only=True)
    await put(writer, "/a", b"2")
    kv = await reader.get("/a")
    assert kv is not None
    assert kv.value == b"2"
    with pytest.raises(Refused):
        await put(reader, "/a", b"3")
    with pytest.raises(Refused):
        await reader.lease(5)
    async with aclosing(reader.watch("/")) as events:
        with pytest.raises(Refused):
            await anext(events)
    await writer.close()
    await reader.close()

    reader = EmbeddedStore.open(path, read_only=True)
    assert [(kv.key, kv.value) for kv in (await reader.range("/")).items] == [("/a", b"2")]
    await reader.close()


async def test_history_is_compacted_by_itself(tmp_path: Path) -> None:
    store = EmbeddedStore.open(None, kept_revisions=50)
    first = await put(store, "/a", b"0")
    for n in range(1, 300):
        last = await put(store, "/a", str(n).encode())
    with pytest.raises(Compacted):
        await store.range("/", revision=first)
    old = (await store.range("/", revision=last - 50)).items
    assert [kv.value for kv in old] == [b"249"]
    await store.close()


async def test_a_watch_that_falls_behind_the_history_is_told_so(tmp_path: Path) -> None:
    store = EmbeddedStore.open(None, kept_revisions=300)
    start = await put(store, "/a")
    async with aclosing(store.watch("/", start)) as events:
        await take(events, 1)
        for _ in range(1000):
            await put(store, "/a")
        with pytest.raises(Compacted):
            await take(events, 1000)
    await store.close()


async def test_a_cancelled_writer_still_wakes_the_watches(tmp_path: Path) -> None:
    store = EmbeddedStore.open(tmp_path / "state.db")
    start = await put(store, "/a")
    async with aclosing(store.watch("/", start + 1)) as events:
        waiting = asyncio.create_task(take(events, 20))
        await asyncio.sleep(0.02)
        # One transaction is with the thread when its writer is cancelled; whether it was still carried out is the
        # store's word, which the watch and a read must agree on.
        writing = [asyncio.create_task(put(store, f"/{n}")) for n in range(20)]
        await asyncio.sleep(0)
        writing[0].cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        written = [kv.key for kv in (await store.range("/")).items if kv.key != "/a"]
        for n in range(20 - len(written)):
            await put(store, f"/more-{n}")
        assert sorted(event.kv.key for event in await waiting)[: len(written)] == sorted(written)
    await store.close()


@pytest.mark.parametrize("url", ["", "sqlite:", "sqlite:///folder/", "postgres://x", "/plain/path", "memory"])
async def test_a_url_that_names_no_store_is_refused_with_what_is_allowed(url: str) -> None:
    with pytest.raises(BadInput, match="sqlite:///absolute/path"):
        open_store(url)


async def test_a_path_that_cannot_be_a_store_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database at all, " * 100)
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE of_another_program (x)")
    other.close()
    for name, message in {
        "text.db": "must be a whole SQLite file",
        "other.db": "must be a state store of format 1",
        "missing/state.db": "its folder must be there and writable",
    }.items():
        with pytest.raises(BadInput, match=message) as refused:
            EmbeddedStore.open(tmp_path / name)
        assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match="must be there to be read"):
        EmbeddedStore.open(tmp_path / "absent.db", read_only=True)
