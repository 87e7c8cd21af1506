"""Who leads knows it no longer than it can prove it; who does not lead asks for nothing while somebody does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gyre.actors import campaign as campaign_module
from gyre.actors.campaign import Campaign
from gyre.actors.directory import Directory
from gyre.actors.site import Site
from gyre.errors import Unavailable
from gyre.ids import NodeId
from gyre.store.embedded import EmbeddedStore
from gyre.store.protocol import Lease, Store, Txn
from gyre.store.records import Keys, NodeRecord
from gyre.store.typed import TypedStore, put_record

KEYS = Keys("test")
DEADLINE_S = 60.0


class CutOff:
    """The store as one node has it. While it is cut off its calls hang, as those of a node without a network do."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.open = asyncio.Event()
        self.open.set()
        self.leases = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def lease(self, ttl_s: float) -> Lease:
        await self.open.wait()
        self.leases += 1
        return cast(Lease, Renewed(await self._store.lease(ttl_s), self.open))


class Renewed:
    def __init__(self, lease: Lease, way: asyncio.Event) -> None:
        self._lease = lease
        self._way = way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    async def keep_alive(self) -> float:
        await self._way.wait()
        return await self._lease.keep_alive()


class Node:
    def __init__(self, name: str, store: Store) -> None:
        self.store = CutOff(store)
        typed = TypedStore(cast(Store, self.store))
        self.directory = Directory(typed, KEYS)
        site = SimpleNamespace(
            node=NodeId(name),
            keys=KEYS,
            store=typed,
            directory=self.directory,
            peers=None,
            child_address=lambda child: f"unix:{child}",
        )
        self.told: list[str] = []
        self.campaign = Campaign(cast(Site, site), lambda _: self.told.append("elected"), self.told.append)


@asynccontextmanager
async def nodes(many: int) -> AsyncIterator[list[Node]]:
    store = EmbeddedStore.open(None)
    found = [Node(f"n{index}", store) for index in range(many)]
    puts = [put_record(KEYS.node(NodeId(f"n{n}")), NodeRecord(NodeId(f"n{n}"), "", "", 4)) for n in range(many)]
    for start in range(0, many, 100):
        txn = Txn(puts=tuple(puts[start : start + 100]))
        await store.txn(puts=txn.puts)
    tasks = [
        asyncio.ensure_future(mirror.follow(node.directory.changed))
        for node in found
        for mirror in node.directory.mirrors
    ]
    tasks += [asyncio.ensure_future(node.campaign.run()) for node in found]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.close()


async def until(wanted: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not wanted():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def leading(found: list[Node]) -> list[Node]:
    return [node for node in found if node.campaign.token]


async def test_a_leader_that_cannot_renew_its_lease_leads_no_more_before_another_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(campaign_module, "LEASE_S", 1.0)
    async with nodes(3) as found:
        await until(lambda: leading(found))
        (first,) = leading(found)
        old = first.campaign.token
        first.store.open.clear()  # nobody hears of it: the renewal hangs, and so does all that waits for the store
        await until(lambda: leading(found) != [first])
        assert first.campaign.token == 0
        await until(lambda: leading(found))
        (second,) = leading(found)
        assert second is not first
        assert second.campaign.token > old
        await until(lambda: len(first.told) == 2)
        assert first.told[0] == "elected"


async def test_a_lease_that_is_renewed_is_led_under_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign_module, "LEASE_S", 1.0)
    async with nodes(2) as found:
        await until(lambda: leading(found))
        (first,) = leading(found)
        renewals = 0
        keep = first.campaign._lease  # pyright: ignore[reportPrivateUsage]
        assert keep is not None
        true = keep.keep_alive

        async def counted() -> float:
            nonlocal renewals
            renewals += 1
            if renewals == 2:
                raise Unavailable("etcd does not confirm this one")
            return await true()

        keep.keep_alive = counted  # type: ignore[method-assign]
        await until(lambda: renewals >= 8)
        assert leading(found) == [first]
        assert first.told == ["elected"]


async def test_of_many_candidates_few_ask_for_a_lease_when_the_leader_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign_module, "SPREAD_S", 0.2)
    many = 200
    async with nodes(many) as found:
        await until(lambda: leading(found))
        (first,) = leading(found)
        await until(lambda: all(node.directory.leader == NodeId(f"n{found.index(first)}") for node in found))
        before = sum(node.store.leases for node in found)
        first.campaign.resign()
        await until(lambda: leading(found) and leading(found) != [first])
        (second,) = leading(found)
        await until(lambda: all(node.directory.leader == NodeId(f"n{found.index(second)}") for node in found))
        assert sum(node.store.leases for node in found) - before < many / 2
