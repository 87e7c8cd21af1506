"""Members of etcd are killed and frozen under a store that is at work: nothing is lost, repeated, or written late."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from gyre.errors import Unavailable
from gyre.store.etcd.store import EtcdStore
from gyre.store.protocol import Compacted, Get, Put

from .etcd_server import EtcdCluster, Member

DEADLINE_S = 60.0
WRITES = 60
HURT_AT = 20

Hurt = Callable[[EtcdCluster, EtcdStore], Awaitable[tuple[Member, signal.Signals]]]


async def kill_the_asked(cluster: EtcdCluster, store: EtcdStore) -> tuple[Member, signal.Signals]:
    return cluster.at(store.client.endpoint), signal.SIGKILL


async def freeze_the_asked(cluster: EtcdCluster, store: EtcdStore) -> tuple[Member, signal.Signals]:
    return cluster.at(store.client.endpoint), signal.SIGSTOP


async def kill_the_leader(cluster: EtcdCluster, store: EtcdStore) -> tuple[Member, signal.Signals]:
    return await cluster.leader(), signal.SIGKILL


async def freeze_the_leader(cluster: EtcdCluster, store: EtcdStore) -> tuple[Member, signal.Signals]:
    return await cluster.leader(), signal.SIGSTOP


@pytest.mark.parametrize("hurt", [kill_the_asked, freeze_the_asked, kill_the_leader, freeze_the_leader])
async def test_every_write_is_carried_out_once_and_told_once_while_a_member_is_away(
    etcd_cluster: EtcdCluster, store: EtcdStore, hurt: Hurt
) -> None:
    start = (await store.range("/p/")).revision
    member, number = await hurt(etcd_cluster, store)
    revisions: list[int] = []

    async def write() -> None:
        for n in range(WRITES):
            # Nothing but the store's own care keeps these from being written twice: they compare nothing.
            result = await store.txn(puts=[Put("/p/n", str(n).encode())], gets=[Get("/p/n")])
            assert result.gets[0] is not None
            assert (result.gets[0].value, result.gets[0].version) == (str(n).encode(), n + 1)
            revisions.append(result.revision)
            if n == HURT_AT:
                member.signal(number)

    async def watch() -> list[tuple[str, int]]:
        async with aclosing(store.watch("/p/", start + 1)) as events:
            return [((event := await anext(events)).kv.value.decode(), event.kv.mod_revision) for _ in range(WRITES)]

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(write())
        watching = tasks.create_task(watch())
    assert watching.result() == [(str(n), revision) for n, revision in enumerate(revisions)]

    await etcd_cluster.heal()  # what the frozen one still held, it may try to carry out now
    kv = await store.get("/p/n")
    assert kv is not None
    assert (kv.value, kv.version, kv.mod_revision) == (str(WRITES - 1).encode(), WRITES, revisions[-1])


@pytest.mark.usefixtures("wary")
async def test_a_silent_watch_leaves_a_frozen_endpoint(etcd_cluster: EtcdCluster, store: EtcdStore) -> None:
    async with aclosing(store.watch("/p/")) as events:
        first = asyncio.ensure_future(anext(events))
        while not first.done():
            await store.txn(puts=[Put("/p/first", b"")])
            await asyncio.sleep(0.01)
        etcd_cluster.at(store.client.endpoint).signal(signal.SIGSTOP)
        other = EtcdStore(store.client.address)  # so that no call of the watcher's own finds the endpoint frozen
        await other.txn(puts=[Put("/p/second", b"")])
        await other.close()
        async with asyncio.timeout(DEADLINE_S):
            while (await anext(events)).kv.key != "/p/second":
                pass


@pytest.mark.usefixtures("impatient")
async def test_a_write_that_no_member_could_take_is_unavailable_and_all_heals_by_itself(
    etcd_cluster: EtcdCluster, store: EtcdStore
) -> None:
    start = (await store.txn(puts=[Put("/p/n", b"before")])).revision
    for member in etcd_cluster.members:
        member.signal(signal.SIGSTOP)
    async with aclosing(store.watch("/p/", start + 1)) as events:
        waiting = asyncio.ensure_future(anext(events))
        with pytest.raises(Unavailable, match="does not answer"):
            await store.txn(puts=[Put("/p/n", b"lost")])
        for member in etcd_cluster.members:
            member.signal(signal.SIGCONT)
        await etcd_cluster.heal()
        after = await store.txn(puts=[Put("/p/n", b"after")], gets=[Get("/p/n")])
        async with asyncio.timeout(DEADLINE_S):
            told = [await waiting]
            while told[-1].kv.value != b"after":
                told.append(await anext(events))
    # The one without an answer was carried out before the next one, or never.
    assert [event.kv.value for event in told] in ([b"after"], [b"lost", b"after"])
    kv = await store.get("/p/n")
    assert kv == after.gets[0]


async def test_a_write_that_was_given_up_can_not_come_later(etcd_cluster: EtcdCluster, store: EtcdStore) -> None:
    await store.txn(puts=[Put("/p/n", b"0")])
    frozen = etcd_cluster.at(store.client.endpoint)
    frozen.signal(signal.SIGSTOP)
    writing = asyncio.create_task(store.txn(puts=[Put("/p/n", b"old")]))
    await asyncio.sleep(0.2)  # it lies in the frozen member now
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    new = await store.txn(puts=[Put("/p/n", b"new")])
    frozen.signal(signal.SIGCONT)
    await etcd_cluster.heal()
    await store.txn(puts=[Put("/p/other", b"")])
    kv = await store.get("/p/n")
    assert kv is not None
    assert (kv.value, kv.mod_revision) == (b"new", new.revision)


@pytest.mark.usefixtures("wary")
async def test_a_watch_that_missed_what_was_compacted_says_so(
    etcd_cluster: EtcdCluster, store: EtcdStore, keeper: EtcdStore
) -> None:
    start = (await store.txn(puts=[Put("/p/n", b"0")])).revision
    async with aclosing(store.watch("/p/", start)) as events:
        await anext(events)
        etcd_cluster.at(store.client.endpoint).signal(signal.SIGSTOP)  # which tells this watch nothing from here on
        for n in range(1, 10):
            last = (await keeper.txn(puts=[Put("/p/n", str(n).encode())])).revision
        await keeper.compact(last)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(Compacted) as compacted:
                await anext(events)
    assert compacted.value.revision == last
    page = await store.range("/p/")
    assert [kv.value for kv in page.items] == [b"9"]
    async with aclosing(store.watch("/p/", last)) as events, asyncio.timeout(DEADLINE_S):
        assert (await anext(events)).kv.value == b"9"
