"""One name is one gyred's: it joins, joins again when its record is gone, and never in place of another that lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest

from gyre.actors import membership
from gyre.actors.core import CoreActor
from gyre.actors.membership import MembershipActor
from gyre.actors.runtime import ActorSystem, LocalRef
from gyre.actors.site import Site
from gyre.errors import NameTaken
from gyre.ids import CellId
from gyre.store.protocol import Delete, Lease, Txn
from gyre.store.records import CoreRecord, NodeRecord, SnapshotRecord
from gyre.store.typed import Versioned, put_record

from .stand_ins import DEADLINE_S, a_site, until

LEASE_S = 0.6


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(membership, "LEASE_S", LEASE_S)
    monkeypatch.setattr(membership, "NAME_S", 1.5 * LEASE_S)
    monkeypatch.setattr(membership, "JOIN_PAUSE_S", 0.05)
    made = a_site(tmp_path)
    made.home = "here"
    yield made
    await made.store.store.close()


def member(site: Site, taken: list[NameTaken]) -> MembershipActor:
    return MembershipActor(site, lambda _: pytest.fail("it has no office"), taken.append)


async def until_record(site: Site, enough: Callable[[Versioned[NodeRecord] | None], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if enough(await site.store.get(site.keys.node(site.node), NodeRecord)):
                return
            await asyncio.sleep(0.01)


async def another(site: Site, home: str) -> Lease:
    """A gyred of that home is there under the same name."""
    lease = await site.store.store.lease(LEASE_S)
    put = put_record(site.keys.node(site.node), NodeRecord(site.node, "tls:other:7400", "i", 4, home), lease.id)
    await site.store.commit(Txn(puts=(put,)))
    return lease


async def kept_alive(lease: Lease) -> None:
    while True:
        await lease.keep_alive()
        await asyncio.sleep(LEASE_S / 4)


async def test_a_name_that_a_living_gyred_of_another_home_has_is_not_taken(site: Site) -> None:
    alive = asyncio.ensure_future(kept_alive(await another(site, "elsewhere")))
    taken: list[NameTaken] = []
    async with ActorSystem.running("test") as system:
        system.spawn("member", lambda: member(site, taken))
        await until(lambda: taken)
    alive.cancel()
    assert "tls:other:7400" in str(taken[0])
    assert not site.joined.is_set()
    found = await site.store.get(site.keys.node(site.node), NodeRecord)
    assert found is not None
    assert found.record.home == "elsewhere"


async def test_no_core_begins_in_the_name_of_a_node_that_has_not_joined(site: Site) -> None:
    await site.store.put(site.keys.snapshot, SnapshotRecord(0, "a", "/v0"))
    await site.store.put(site.keys.core, CoreRecord(CellId("c0"), site.node))
    await another(site, "elsewhere")
    joined: list[bool] = []

    def spawn_core(_: Callable[[], CoreActor]) -> LocalRef:
        joined.append(site.joined.is_set())
        return cast(LocalRef, None)

    async with ActorSystem.running("test") as system:
        system.spawn("member", lambda: MembershipActor(site, spawn_core, lambda _: None))
        await until(lambda: joined)
    assert joined == [True]


async def test_a_dead_ones_name_is_free_when_its_lease_has_ended_and_at_once_for_its_own_home(site: Site) -> None:
    taken: list[NameTaken] = []
    await another(site, "elsewhere")
    async with ActorSystem.running("test") as system:
        system.spawn("member", lambda: member(site, taken))
        await until_record(site, lambda found: found is not None and found.record.home == "here")
        await site.joined.wait()
    site.joined.clear()
    old = asyncio.ensure_future(kept_alive(await another(site, "here")))
    async with ActorSystem.running("test") as system:
        system.spawn("member", lambda: member(site, taken))
        await until_record(site, lambda found: found is not None and found.record.address == "")
    old.cancel()
    assert taken == []


async def test_a_record_that_is_gone_is_written_again_and_one_that_another_has_ends_ours(site: Site) -> None:
    taken: list[NameTaken] = []
    key = site.keys.node(site.node)
    async with ActorSystem.running("test") as system:
        system.spawn("member", lambda: member(site, taken))
        await site.joined.wait()
        await site.store.commit(Txn(deletes=(Delete(key),)))
        await until_record(site, lambda found: found is not None and found.record.home == "here")
        await site.store.commit(Txn(deletes=(Delete(key),)))
        alive = asyncio.ensure_future(kept_alive(await another(site, "elsewhere")))
        await until(lambda: taken)
        alive.cancel()
    found = await site.store.get(key, NodeRecord)
    assert found is not None
    assert found.record.home == "elsewhere"


async def test_a_node_without_room_for_a_run_says_so_in_its_record_until_there_is(site: Site) -> None:
    site.job.runs.rmdir()
    async with ActorSystem.running("test") as system:
        system.spawn("member", lambda: member(site, []))
        await until_record(site, lambda found: found and found.record.trouble)
        found = await site.store.get(site.keys.node(site.node), NodeRecord)
        assert found is not None
        assert (found.record.max_live, found.record.trouble) == (0, site.trouble)
        assert site.trouble == f"{site.job.runs} cannot be written: No such file or directory"
        site.job.runs.mkdir()
        await until_record(site, lambda found: found and found.record.max_live and not found.record.trouble)
