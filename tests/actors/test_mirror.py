"""A mirror holds what the store holds under its prefix, but for what it was told to drop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from gyre.actors.mirror import Mirror
from gyre.store.embedded import EmbeddedStore
from gyre.store.protocol import Delete, Txn
from gyre.store.typed import TypedStore, put_record
from gyre.wire import record


@record("test.thing")
@dataclass(frozen=True)
class Thing:
    value: int


@pytest.fixture
async def store() -> AsyncIterator[TypedStore]:
    found = EmbeddedStore.open(None)
    yield TypedStore(found)
    await found.close()


class Following:
    """A mirror that is being followed; `values` waits until it holds just these."""

    def __init__(self, store: TypedStore) -> None:
        self.mirror = Mirror(store, "things/", Thing)
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self.mirror.follow(self._changed.set))

    async def holds(self, **expected: int) -> None:
        wanted = {f"things/{name}": value for name, value in expected.items()}
        async with asyncio.timeout(10):
            while {key: item.record.value for key, item in self.mirror.items.items()} != wanted:
                await self._changed.wait()
                self._changed.clear()


@pytest.fixture
async def following(store: TypedStore) -> AsyncIterator[Following]:
    found = Following(store)
    yield found
    found.task.cancel()
    await asyncio.wait([found.task])


async def test_what_was_there_what_comes_and_what_goes(store: TypedStore, following: Following) -> None:
    await store.put("things/a", Thing(1))
    await following.holds(a=1)
    await store.commit(Txn(puts=(put_record("things/a", Thing(2)), put_record("things/b", Thing(3)))))
    await following.holds(a=2, b=3)
    await store.commit(Txn(deletes=(Delete("things/a"),)))
    await following.holds(b=3)


async def test_our_own_write_is_seen_at_once_and_never_goes_back(store: TypedStore, following: Following) -> None:
    await store.put("things/a", Thing(1))
    await following.holds(a=1)
    before = following.mirror.items["things/a"]
    await store.put("things/a", Thing(2))
    now = await store.get("things/a", Thing)
    assert now is not None
    following.mirror.put(now)
    following.mirror.put(before)  # as if the watch were late
    assert following.mirror.items["things/a"].record == Thing(2)


async def test_a_dropped_record_does_not_come_back(store: TypedStore, following: Following) -> None:
    await store.put("things/a", Thing(1))
    await following.holds(a=1)
    following.mirror.drop("things/a")
    await store.put("things/a", Thing(2))
    await store.put("things/b", Thing(3))
    await following.holds(b=3)
    assert list(following.mirror.dropped) == ["things/a"]


async def test_a_record_that_was_over_at_a_revision_comes_back_when_it_is_written_again(
    store: TypedStore, following: Following
) -> None:
    await store.put("things/a", Thing(1))
    await following.holds(a=1)
    over = following.mirror.items["things/a"]
    following.mirror.drop("things/a", over.mod_revision)
    following.mirror.put(over)  # as if the watch were late
    assert following.mirror.items == {}
    await store.put("things/a", Thing(2))
    await following.holds(a=2)
    assert following.mirror.dropped == {}
    following.mirror.drop("things/a", over.mod_revision)  # as if it were told late
    assert following.mirror.items["things/a"].record == Thing(2)


async def test_a_mirror_goes_on_after_a_compaction(store: TypedStore) -> None:
    """A watch that begins before what is kept is told so, and the mirror lists again."""
    mirror: Mirror[Thing] = Mirror(store, "things/", Thing)
    changes = 0
    seen = asyncio.Event()

    def changed() -> None:
        nonlocal changes
        changes += 1
        seen.set()

    listed = store.range

    async def range_then_compact(prefix: str, cls: type[Thing]):
        listing = await listed(prefix, cls)
        if changes == 0:  # between the first listing and its watch, history moves on and is compacted
            await store.put("things/a", Thing(1))
            revision = await store.put("things/a", Thing(2))
            await store.store.compact(revision)
        return listing

    store.range = range_then_compact  # type: ignore[method-assign]
    task = asyncio.create_task(mirror.follow(changed))
    async with asyncio.timeout(10):
        while [item.value for item in mirror.records] != [2]:
            await seen.wait()
            seen.clear()
    task.cancel()
    await asyncio.wait([task])
