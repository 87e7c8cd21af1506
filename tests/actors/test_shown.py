"""What people ask for is followed while they ask, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from gyre.actors import shown as shown_module
from gyre.actors.shown import Shown
from gyre.errors import Unavailable
from gyre.store.embedded import EmbeddedStore
from gyre.store.protocol import Event, KeyValue, Store
from gyre.store.records import Keys, StepRecord
from gyre.store.typed import TypedStore

KEYS = Keys("test")
DEADLINE_S = 60.0


class Counted:
    """A store that counts the watches that are open."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.watches = 0
        self.away = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, key: str) -> KeyValue | None:
        if self.away:
            raise Unavailable("the store is away")
        return await self._store.get(key)

    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncGenerator[Event, None]:
        self.watches += 1
        try:
            async for event in self._store.watch(prefix, from_revision):
                yield event
        finally:
            self.watches -= 1


def step(number: int) -> StepRecord:
    return StepRecord(number, number, (), 1, 0.5, 10, 1, (), {}, 0.0)


@asynccontextmanager
async def a_shown() -> AsyncIterator[tuple[Shown, TypedStore, Counted]]:
    counted = Counted(EmbeddedStore.open(None))
    store = TypedStore(cast(Store, counted))
    shown = Shown(store, KEYS)
    following = asyncio.ensure_future(shown.follow())
    try:
        yield shown, store, counted
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.store.close()


async def until_watched(counted: Counted, watches: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while counted.watches != watches:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_who_asks_sees_what_is_there_and_what_comes() -> None:
    async with a_shown() as (shown, store, counted):
        await store.put(KEYS.step(1), step(1))
        assert shown.steps.records == []
        await shown.look()
        assert shown.steps.records == [step(1)]
        await until_watched(counted, 3)
        await store.put(KEYS.step(2), step(2))
        async with asyncio.timeout(DEADLINE_S):
            while shown.steps.records != [step(1), step(2)]:
                await asyncio.sleep(0.01)
                await shown.look()


async def test_nothing_is_watched_when_nobody_has_asked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_module, "KEPT_S", 0.05)
    async with a_shown() as (shown, store, counted):
        assert counted.watches == 0
        for number in range(1, 4):  # and it begins again as often as somebody asks
            await store.put(KEYS.step(number), step(number))
            await shown.look()
            await until_watched(counted, 0)
        monkeypatch.setattr(shown_module, "KEPT_S", 60.0)
        await shown.look()
        assert shown.steps.records == [step(number) for number in range(1, 4)]


async def test_who_asks_while_the_store_is_away_hears_it_and_what_was_seen_stays() -> None:
    async with a_shown() as (shown, store, counted):
        await store.put(KEYS.step(1), step(1))
        assert await shown.look()
        counted.away = True
        assert not await shown.look()
        assert (shown.listed, len(shown.steps.records)) == (True, 1)
        counted.away = False
        assert await shown.look()
