"""Records in, records out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import pytest
import pytest_asyncio

from gyre.errors import BadInput, Unavailable
from gyre.ids import CellId, NodeId
from gyre.store import typed
from gyre.store.open import open_store
from gyre.store.protocol import Compare, Event, Page, Put, Store, StoreClosed, StoreFull, StoreRefuses, Txn
from gyre.store.records import CellRoleRecord, CellSpecRecord, Keys, Role, SnapshotRecord
from gyre.store.typed import TypedStore, put_record

KEYS = Keys("demo")


@pytest_asyncio.fixture
async def store() -> AsyncIterator[TypedStore]:
    store = open_store("memory:")
    yield TypedStore(store)
    await store.close()


async def test_a_record_comes_back_as_it_went_with_its_revisions(store: TypedStore) -> None:
    assert await store.get(KEYS.snapshot, SnapshotRecord) is None
    first = await store.put(KEYS.snapshot, SnapshotRecord(0, "a", "/v0"))
    second = await store.put(KEYS.snapshot, SnapshotRecord(1, "b", "/v1"))
    found = await store.get(KEYS.snapshot, SnapshotRecord)
    assert found is not None
    assert found.record == SnapshotRecord(1, "b", "/v1")
    assert (found.create_revision, found.mod_revision) == (first, second)


async def test_what_is_no_such_record_is_refused(store: TypedStore) -> None:
    await store.put(KEYS.snapshot, SnapshotRecord(0, "a", "/v0"))
    with pytest.raises(BadInput, match="CellSpecRecord"):
        await store.get(KEYS.snapshot, CellSpecRecord)
    await store.store.txn(puts=[Put(KEYS.snapshot, b"\xc1 no msgpack")])
    with pytest.raises(BadInput, match="SnapshotRecord"):
        await store.get(KEYS.snapshot, SnapshotRecord)


async def test_a_range_of_many_pages_shows_one_revision(store: TypedStore) -> None:
    cells = [CellId(f"c{n:04d}") for n in range(700)]
    role = CellRoleRecord(Role.ROLLOUT, Role.ROLLOUT, 1, 7, "", 0)
    for start in range(0, 700, 50):
        puts = [
            put
            for cell in cells[start : start + 50]
            for put in (
                put_record(KEYS.cell_spec(cell), CellSpecRecord(cell, NodeId("n"), 4)),
                put_record(KEYS.cell_role(cell), role),
            )
        ]
        revision = (await store.store.txn(puts=puts)).revision
    specs = await store.range(KEYS.cells, CellSpecRecord)
    roles = await store.range(KEYS.roles, CellRoleRecord)
    assert [item.record.cell for item in specs.items] == cells
    assert {item.record for item in roles.items} == {role}
    assert [KEYS.cell_of(item.key) for item in roles.items] == cells
    assert specs.revision == revision


class _CompactedBetweenPages:
    """A store whose history is compacted after the first page of the first listing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._compacted = False

    async def range(self, prefix: str, *, limit: int = 0, after: str = "", revision: int = 0) -> Page:
        page = await self._store.range(prefix, limit=limit, after=after, revision=revision)
        if not self._compacted:
            self._compacted = True
            later = await self._store.txn(puts=[Put(KEYS.snapshot, b"")])
            await self._store.compact(later.revision)
        return page


async def test_a_range_whose_revision_is_compacted_away_between_its_pages_begins_again(
    store: TypedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed, "_PAGE", 2)
    cells = [CellId(f"c{n}") for n in range(5)]
    await store.store.txn(
        puts=[put_record(KEYS.cell_spec(cell), CellSpecRecord(cell, NodeId("n"), 4)) for cell in cells]
    )
    found = await TypedStore(cast(Store, _CompactedBetweenPages(store.store))).range(KEYS.cells, CellSpecRecord)
    assert [item.record.cell for item in found.items] == cells
    assert found.revision == (await store.store.range(KEYS.cells)).revision


async def test_who_waits_for_a_change_lists_again_when_the_history_was_compacted_away(store: TypedStore) -> None:
    await store.put(KEYS.snapshot, SnapshotRecord(0, "a", "/v0"))
    second = await store.put(KEYS.snapshot, SnapshotRecord(1, "b", "/v1"))
    await store.store.compact(second)
    async with asyncio.timeout(20):
        await store.next_change(KEYS.snapshot, SnapshotRecord, 1)
        await store.next_change(KEYS.snapshot, SnapshotRecord, second)


async def test_a_watch_tells_records_before_and_after(store: TypedStore) -> None:
    start = await store.put(KEYS.snapshot, SnapshotRecord(0, "a", "/v0"))
    await store.put(KEYS.snapshot, SnapshotRecord(1, "b", "/v1"))
    async with aclosing(store.watch(KEYS.snapshot, SnapshotRecord, start)) as changes:
        async with asyncio.timeout(20):
            first, second = await anext(changes), await anext(changes)
    assert first.now is not None
    assert second.now is not None
    assert second.before is not None
    assert (first.now.record.version, first.before) == (0, None)
    assert (second.now.record.version, second.before.record.version, second.revision) == (1, 0, start + 1)


class Away:
    """A store that does not answer its first calls; a commit may be carried out all the same."""

    def __init__(self, store: Store, unanswered: int, *, carried_out: bool) -> None:
        self._store = store
        self._unanswered = unanswered
        self._carried_out = carried_out

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **rest: Any) -> Any:
            self._unanswered -= 1
            if self._unanswered >= 0:
                if self._carried_out:
                    await getattr(self._store, name)(*args, **rest)
                raise Unavailable("the store does not answer")
            return await getattr(self._store, name)(*args, **rest)

        return call


class Refusing:
    """A store that fails everything, a watch that is under way too, as long as it is told to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._error: Unavailable | None = None
        self._changed = asyncio.Event()
        self.refused = 0

    def refuse(self, error: Unavailable | None) -> None:
        self._error = error
        self._changed.set()

    def _check(self) -> None:
        if self._error is not None:
            self.refused += 1
            raise self._error

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **rest: Any) -> Any:
            self._check()
            return await getattr(self._store, name)(*args, **rest)

        return call

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Event]:
        self._check()
        self._changed.clear()
        async with aclosing(self._store.watch(prefix, from_revision)) as events:
            while True:
                event = asyncio.ensure_future(anext(events))
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait((event, changed), return_when=asyncio.FIRST_COMPLETED)
                    self._check()
                    yield await event
                finally:
                    event.cancel()
                    changed.cancel()
                    await asyncio.gather(event, changed, return_exceptions=True)


async def test_reads_and_commits_wait_for_a_store_that_is_away(
    store: TypedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed, "RETRY_S", 0.01)
    await store.put(KEYS.snapshot, SnapshotRecord(0, "a", "/v0"))
    away = TypedStore(cast(Store, Away(store.store, 2, carried_out=False)))
    found = await away.get(KEYS.snapshot, SnapshotRecord)
    assert found is not None
    assert found.record.version == 0


async def test_a_commit_whose_answer_was_lost_is_found_done_on_reading(
    store: TypedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed, "RETRY_S", 0.01)
    away = TypedStore(cast(Store, Away(store.store, 1, carried_out=True)))
    new = SnapshotRecord(0, "a", "/v0")
    result = await away.commit(Txn((Compare.created(KEYS.snapshot, 0),), (put_record(KEYS.snapshot, new),)))
    assert not result.succeeded
    found = await away.get(KEYS.snapshot, SnapshotRecord)
    assert found is not None
    assert found.record == new


REFUSED = (Unavailable("it does not answer"), StoreRefuses("a wrong password"), StoreFull("no space"))


@pytest.mark.parametrize("error", REFUSED, ids=lambda error: type(error).__name__)
async def test_reads_commits_and_watches_wait_for_a_store_that_cannot_be_had_and_say_so_once(
    store: TypedStore, error: Unavailable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(typed, "RETRY_S", 0.01)
    kept = Refusing(store.store)
    away = TypedStore(cast(Store, kept))
    first, second = SnapshotRecord(0, "a", "/v0"), SnapshotRecord(1, "b", "/v1")
    start = await away.put(KEYS.snapshot, first)
    async with aclosing(away.watch(KEYS.snapshot, SnapshotRecord, start)) as changes:
        assert (await anext(changes)).revision == start
        kept.refuse(error)
        heard = asyncio.ensure_future(anext(changes))
        read = asyncio.ensure_future(away.get(KEYS.snapshot, SnapshotRecord))
        written = asyncio.ensure_future(away.commit(Txn(puts=(put_record(KEYS.snapshot, second),))))
        while kept.refused < 30:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in (heard, read, written))
        kept.refuse(None)
        async with asyncio.timeout(20):
            assert (await written).succeeded
            assert (await read) is not None
            change = await heard
    assert change.now is not None
    assert change.now.record == second
    assert [line.getMessage() for line in caplog.records] == [
        f"the state store cannot be had, and is asked again: {error}"
    ]


async def test_who_does_not_want_to_wait_is_told_at_once(store: TypedStore) -> None:
    kept = Refusing(store.store)
    kept.refuse(StoreRefuses("a wrong password"))
    with pytest.raises(StoreRefuses, match="a wrong password"):
        await TypedStore(cast(Store, kept), away_s=0.0).get(KEYS.snapshot, SnapshotRecord)
    assert kept.refused == 1


async def test_a_store_that_is_closed_is_not_waited_for(store: TypedStore) -> None:
    await store.store.close()
    with pytest.raises(StoreClosed):
        await store.get(KEYS.snapshot, SnapshotRecord)
