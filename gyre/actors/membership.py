"""The membership actor: this node's place in the cluster.

It keeps the node's record under a lease, so that others know that it is there; keeps the directory true; tells the
node's cells and gateway of a new snapshot; and has the core actor begin and end here as the leader places the core.

A lease that is lost says that others may have given the node up. It joins again at once; its runs that were given to
others meanwhile are then theirs, and its cells tell every gateway of their engines anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from gyre.actors.core import CoreActor
from gyre.actors.messages import Authority, ClusterChanged, JobFailed, Leave, Ok
from gyre.actors.runtime import Actor, LocalRef, handles
from gyre.actors.site import Site
from gyre.errors import Unavailable
from gyre.store.protocol import Lease, LeaseLost, Txn
from gyre.store.records import CellSpecRecord, ChildRecord, NodeRecord
from gyre.store.typed import put_record

LEASE_S = 10.0
JOIN_PAUSE_S = 1.0
STOP_S = 2.0
REPEAT_S = 1.0


class MembershipActor(Actor):
    """`spawn_core` makes the core actor as one of the node's own, which outlives a failure of this one."""

    def __init__(self, site: Site, spawn_core: Callable[[Callable[[], CoreActor]], LocalRef]) -> None:
        self._site = site
        self._spawn_core = spawn_core
        self._lease: Lease | None = None
        self._children: dict[str, str] = {}
        """What is written of our children, by name."""
        self._office = 0
        """The revision of the core record by which our core actor was begun; 0 when there is none."""
        self._version = -1
        self._unsubscribe: Callable[[], None] = lambda: None

    async def pre_start(self) -> None:
        directory = self._site.directory
        self._unsubscribe = directory.subscribe(lambda: self.ref.tell(ClusterChanged()))
        for mirror in directory.mirrors:
            self.task(mirror.follow(directory.changed))
        self.task(self._stay())
        self.task(self._repeat())

    async def post_stop(self) -> None:
        self._unsubscribe()
        if self._lease is not None and self._site.stopping:  # else the next gyred of this node goes on with all of it
            with suppress(LeaseLost, Unavailable):
                await self._lease.revoke()

    # ------------------------------------------------------------------------------------------ being there

    async def _stay(self) -> None:
        """Join, hold the lease until it is lost, and join again, for ever."""
        site = self._site
        while True:
            try:
                self._lease = lease = await site.store.store.lease(LEASE_S)
                await self._join(lease)
                while True:
                    await asyncio.sleep(lease.ttl_s / 3)
                    with suppress(Unavailable):  # it is proven still; when it is not any more it is lost
                        await lease.keep_alive()
                    await self._write_children(lease)
            except LeaseLost as error:
                site.say(f"{site.node} has to join the cluster again: {error}")
            except Unavailable:
                await asyncio.sleep(JOIN_PAUSE_S)

    async def _join(self, lease: Lease) -> None:
        site, keys = self._site, self._site.keys
        self._children = {}
        specs = [CellSpecRecord(cell, site.node, site.spec.cells.slots) for cell in site.cells]
        puts = (
            put_record(keys.node(site.node), self._me(), lease.id),
            *(put_record(keys.cell_spec(s.cell), s) for s in specs),
        )
        await site.store.commit(Txn(puts=puts))
        await self._write_children(lease)

    def _me(self) -> NodeRecord:
        site, peers = self._site, self._site.peers
        return NodeRecord(
            site.node,
            peers.address if peers else "",
            peers.incarnation if peers else "",
            0 if site.leaving else site.spec.harness.max_live,
        )

    @handles(Leave)
    async def leave(self, _: Leave) -> Ok:
        self._site.leaving = True
        if self._lease is not None:  # else it is said with the next joining
            put = put_record(self._site.keys.node(self._site.node), self._me(), self._lease.id)
            await self._site.store.commit(Txn(puts=(put,)))
        return Ok()

    async def _write_children(self, lease: Lease) -> None:
        """Where other nodes' processes reach our children, as far as those have told."""
        site = self._site
        found = site.far_addresses()
        puts = [
            put_record(site.keys.child(site.node, name), ChildRecord(site.node, name, address), lease.id)
            for name, address in found.items()
            if self._children.get(name) != address
        ]
        if puts:
            await site.store.commit(Txn(puts=tuple(puts)))
            self._children = found

    async def _repeat(self) -> None:
        """A failure that nobody may have heard of is told again; the leader writes it down once."""
        while True:
            await asyncio.sleep(REPEAT_S)
            if self._site.failure:
                self._site.scheduler.tell(JobFailed(self._site.failure))

    # ------------------------------------------------------------------------------------------ what has changed

    @handles(ClusterChanged)
    async def changed(self, _: ClusterChanged) -> None:
        self._tell_version()
        await self._place_core()

    def _tell_version(self) -> None:
        published = self._site.directory.snapshot
        if published is None or published.record.version <= self._version:
            return
        self._version = published.record.version
        for name in ("gateway", *(f"cell-{cell}" for cell in self._site.cells)):
            if (ref := self._site.refs.get(name)) is not None:  # one that is begun later reads the version itself
                ref.tell(Authority(self._version))

    async def _place_core(self) -> None:
        site, office = self._site, self._site.directory.core
        mine = office is not None and office.record.node == site.node
        if mine and office is not None and office.mod_revision == self._office:
            return
        if (held := site.refs.pop("core", None)) is not None:
            site.say(f"the core leaves {site.node}")
            await held.stop(STOP_S)
        self._office = 0
        if mine and office is not None and site.directory.snapshot is not None:
            self._office = office.mod_revision
            site.refs["core"] = self._spawn_core(lambda: CoreActor(site, office))
