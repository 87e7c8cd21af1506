"""Many watches on one stream: each gets its own, and none waits for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest
import pytest_asyncio
from cluster.etcd_server import EtcdCluster, PlainEtcd

from gyre.errors import Refused
from gyre.store.etcd.store import EtcdStore
from gyre.store.open import open_store
from gyre.store.protocol import Event, Put

DEADLINE_S = 60.0


@pytest_asyncio.fixture
async def store(plain_etcd: PlainEtcd) -> AsyncIterator[EtcdStore]:
    store = open_store(plain_etcd.url)
    assert isinstance(store, EtcdStore)
    yield store
    await store.close()


async def values(events: AsyncGenerator[Event, None], many: int) -> list[str]:
    async with asyncio.timeout(DEADLINE_S):
        return [(await anext(events)).kv.value.decode() for _ in range(many)]


async def test_each_of_many_watches_gets_its_own_changes_and_those_before_it_began(store: EtcdStore) -> None:
    start = (await store.range("/p/")).revision

    async def watch(name: int, *, late: bool) -> list[str]:
        if late:
            await written.wait()
        async with aclosing(store.watch(f"/p/{name:02}/", start + 1)) as events:
            return await values(events, 3)

    written = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(watch(name, late=name % 2 == 1)) for name in range(40)]
        for turn in range(3):
            for name in range(40):
                await store.txn(puts=[Put(f"/p/{name:02}/key", f"{name} {turn}".encode())])
        written.set()
    assert [each.result() for each in watching] == [[f"{name} {turn}" for turn in range(3)] for name in range(40)]


async def test_a_watch_that_is_left_says_nothing_to_the_next_one(store: EtcdStore) -> None:
    start = (await store.range("/p/")).revision
    async with aclosing(store.watch("/p/", start + 1)) as staying:
        await store.txn(puts=[Put("/p/a", b"0")])
        assert await values(staying, 1) == ["0"]
        for turn in range(1, 30):
            async with aclosing(store.watch("/p/", start + turn)) as passing:
                assert await values(passing, 1) == [str(turn - 1)]
            await store.txn(puts=[Put("/p/a", str(turn).encode())])
        assert await values(staying, 29) == [str(turn) for turn in range(1, 30)]


async def test_a_watch_that_does_not_take_what_comes_holds_up_no_other_and_loses_nothing(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.store.etcd.stream.UNTAKEN", 5)
    start = (await store.range("/p/")).revision
    wanted = [str(n) for n in range(60)]
    async with aclosing(store.watch("/p/", start + 1)) as slow, aclosing(store.watch("/p/", start + 1)) as quick:
        await store.txn(puts=[Put("/p/n", b"0")])
        assert await values(slow, 1) == await values(quick, 1) == ["0"]
        for n in wanted[1:]:
            await store.txn(puts=[Put("/p/n", n.encode())])
            assert await values(quick, 1) == [n]
        assert await values(slow, 59) == wanted[1:]


async def test_a_watch_that_is_refused_leaves_the_others_alone(etcd_cluster: EtcdCluster) -> None:
    store = open_store(etcd_cluster.url())
    try:
        start = (await store.range("/p/")).revision
        async with aclosing(store.watch("/p/", start + 1)) as events:
            await store.txn(puts=[Put("/p/a", b"0")])
            assert await values(events, 1) == ["0"]
            async with aclosing(store.watch("outside", start)) as refused:
                with pytest.raises(Refused):
                    await values(refused, 1)
            await store.txn(puts=[Put("/p/a", b"1")])
            assert await values(events, 1) == ["1"]
    finally:
        await store.close()
