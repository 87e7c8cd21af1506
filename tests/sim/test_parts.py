"""The parts of the simulator: time, processes, the store, the shortest list of faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import pytest_asyncio
from store.conformance import StoreConformance

from gyre.store.protocol import Put, Store

from .faults import Fault, Kind, shortest
from .loop import Process, SimLoop, Stuck
from .net import Network
from .store import Client, Server
from .world import simulate


class TestTheSimulatedStore(StoreConformance):
    @pytest_asyncio.fixture
    async def store(self) -> AsyncIterator[Store]:
        store = Server(kept_revisions=10_000)
        yield store
        await store.close()


def test_each_watch_hears_all_in_order_and_at_its_own_pace() -> None:
    loop, heard = SimLoop(), dict[int, list[tuple[float, str]]]()

    async def follow(client: Client, watch: int) -> None:
        heard[watch] = []
        async with aclosing(client.watch("k", 1)) as events:
            async for event in events:
                heard[watch].append((loop.time(), event.kv.key))

    async def world() -> None:
        server, process = Server(), Process("p")
        net = Network(loop, random.Random(1))
        client = Client(server, net, random.Random(2), "n0", process, lambda *_: None, lambda *_: True)
        watching = [loop.start(process, follow(client, watch), "watch") for watch in range(12)]
        await asyncio.sleep(1.0)
        for number in range(9):
            await client.txn(puts=[Put(f"k{number}", b"")])
            await asyncio.sleep(0.3)
        await asyncio.sleep(20.0)
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    loop.run(world(), 100.0)
    assert all([key for _, key in each] == [f"k{number}" for number in range(9)] for each in heard.values())
    assert all(each == sorted(each) for each in heard.values())
    orders = {watch: [at_s for at_s, _ in each] for watch, each in heard.items()}
    assert any(orders[a][3] < orders[b][1] for a in orders for b in orders), "one is two changes ahead of another"


def test_time_jumps_to_the_next_timer() -> None:
    loop = SimLoop()

    async def sleep() -> float:
        await asyncio.sleep(3600.0)
        return loop.time()

    assert loop.run(sleep(), 4000.0) == 3600.0


def test_what_waits_for_nothing_is_told() -> None:
    loop = SimLoop()
    with pytest.raises(Stuck):
        loop.run(asyncio.Event().wait(), 10.0)


def test_a_stopped_process_does_late_what_it_was_to_do_meanwhile() -> None:
    loop = SimLoop()
    process = Process("p")
    done: list[float] = []

    async def work() -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            done.append(loop.time())

    async def world() -> None:
        loop.start(process, work(), "work")
        await asyncio.sleep(1.5)
        loop.stop_process(process)
        await asyncio.sleep(8.5)
        loop.continue_process(process)
        await asyncio.sleep(5.0)

    loop.run(world(), 100.0)
    assert done == [1.0, 10.0, 11.0]


def test_a_killed_process_does_nothing_any_more_not_even_its_finally() -> None:
    loop = SimLoop()
    process = Process("p")
    done: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(2.0)
            done.append("work")
        finally:
            if process.alive:
                done.append("finally")

    async def world() -> None:
        loop.start(process, work(), "work")
        await asyncio.sleep(1.0)
        loop.kill(process)
        await asyncio.sleep(5.0)

    loop.run(world(), 100.0)
    assert not done


def test_the_shortest_list_has_only_what_the_failure_needs() -> None:
    events = [Fault(float(at), Kind.CRASH, f"n{at}") for at in range(7)]
    needed = {events[1], events[5]}
    assert set(shortest(events, lambda some: needed <= set(some))) == needed


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_a_seed_replays_exactly(seed: int) -> None:
    assert simulate(seed) == simulate(seed)
