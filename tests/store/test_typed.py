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
from gyre.store.protocol import Compare, Put, Store, StoreClosed, Txn
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


async def test_a_store_that_is_closed_is_not_waited_for(store: TypedStore) -> None:
    await store.store.close()
    with pytest.raises(StoreClosed):
        await store.get(KEYS.snapshot, SnapshotRecord)
