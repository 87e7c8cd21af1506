"""The membership actor: this node's place in the cluster.

It keeps the node's record under a lease, so that others know that it is there; keeps the directory true; tells the
node's cells and gateway of a new snapshot; and has the core actor begin and end here as the leader places the core.

A lease that is lost says that others may have given the node up. It joins again at once; its runs that were given to
others meanwhile are then theirs, and its cells tell every gateway of their engines anew. So it does when its record is
gone though the lease stands.

One name is one gyred's. While another's record stands, from another home, it does not join: one that begins waits for as
long as the lease of a dead one may last, and one that was there ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from gyre.actors.core import CoreActor
from gyre.actors.messages import Authority, ClusterChanged, JobFailed, Leave, Ok
from gyre.actors.runtime import Actor, LocalRef, handles
from gyre.actors.site import Site
from gyre.errors import NameTaken, Unavailable
from gyre.store.protocol import Compare, Lease, LeaseLost, Put, Txn
from gyre.store.records import CellSpecRecord, ChildRecord, NodeRecord
from gyre.store.typed import put_record

LEASE_S = 10.0
JOIN_PAUSE_S = 1.0
NAME_S = 1.5 * LEASE_S
"""For the lease of another under our name to end, which it does where that one is dead."""
STOP_S = 2.0
REPEAT_S = 1.0


class MembershipActor(Actor):
    """`spawn_core` makes the core actor as one of the node's own, which outlives a failure of this one. `on_taken` is
    called when another living gyred has the node's name: ours has to end."""

    def __init__(
        self,
        site: Site,
        spawn_core: Callable[[Callable[[], CoreActor]], LocalRef],
        on_taken: Callable[[NameTaken], None],
    ) -> None:
        self._site = site
        self._spawn_core = spawn_core
        self._on_taken = on_taken
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
        """Join, hold the lease until it is lost, and join again, until another has our name."""
        site = self._site
        since_s: float | None = None
        """Since when another was seen that has our name, of a gyred that has not joined yet."""
        while True:
            try:
                self._lease = lease = await site.store.store.lease(LEASE_S)
            except Unavailable:
                await asyncio.sleep(JOIN_PAUSE_S)
                continue
            try:
                await self._look_for_room()
                await self._join(lease)
                while True:
                    await asyncio.sleep(lease.ttl_s / 3)
                    with suppress(Unavailable):  # it is proven still; when it is not any more it is lost
                        await lease.keep_alive()
                        if not await self._stands(lease):
                            site.warn(f"{site.node} has to join the cluster again: its record is gone")
                            await self._join(lease)
                    if await self._look_for_room():
                        await self._write_me(lease)
                    await self._write_children(lease)
            except LeaseLost as error:
                site.warn(f"{site.node} has to join the cluster again: {error}")
            except NameTaken as error:
                with suppress(LeaseLost, Unavailable):
                    await lease.revoke()
                now_s = site.outside.monotonic_s()
                if since_s is None:
                    site.warn(str(error))
                    since_s = now_s
                if site.joined.is_set() or now_s - since_s > NAME_S:
                    self._on_taken(error)
                    return
                await asyncio.sleep(JOIN_PAUSE_S)
            except Unavailable:
                await asyncio.sleep(JOIN_PAUSE_S)

    async def _join(self, lease: Lease) -> None:
        site, keys = self._site, self._site.keys
        self._children = {}
        specs = [CellSpecRecord(cell, site.node, site.spec.cells.slots) for cell in site.cells]
        await self._write_me(lease, *(put_record(keys.cell_spec(s.cell), s) for s in specs))
        await self._write_children(lease)
        if not site.joined.is_set():
            site.joined.set()
            self.ref.tell(ClusterChanged())  # the core may have been placed here before

    async def _look_for_room(self) -> bool:
        """Whether runs can begin here has changed."""
        site = self._site
        why = await site.outside.no_room(site.job.runs)
        if why == site.trouble:
            return False
        site.trouble = why
        if why:
            site.warn(f"{site.node} gets no runs for now: {why}")
        else:
            site.say(f"{site.node} takes runs again")
            if (node := site.refs.get("node")) is not None:
                node.tell(ClusterChanged())
        return True

    async def _write_me(self, lease: Lease, *others: Put) -> None:
        """Our record, and what goes with it. Raises NameTaken while that of another home stands."""
        site, key = self._site, self._site.keys.node(self._site.node)
        while True:
            found = await site.store.get(key, NodeRecord)
            if found is not None and found.record.home != site.home:
                raise NameTaken(
                    f"another gyred, at {found.record.address or 'an unknown address'}, is in the cluster as "
                    f"{site.node}; a node needs a name of its own (name in its node.toml), or the other has to end first"
                )
            compare = Compare.modified(key, found.mod_revision if found else 0)
            put = put_record(key, self._me(), lease.id)
            if (await site.store.commit(Txn((compare,), (put, *others)))).succeeded:
                return

    async def _stands(self, lease: Lease) -> bool:
        """Whether the cluster has our record by this lease. Raises Unavailable: it is asked once."""
        found = await self._site.store.store.get(self._site.keys.node(self._site.node))
        return found is not None and found.lease == lease.id

    def _me(self) -> NodeRecord:
        site, peers = self._site, self._site.peers
        return NodeRecord(
            site.node,
            peers.address if peers else "",
            peers.incarnation if peers else "",
            0 if site.leaving or site.trouble else site.spec.harness.max_live,
            site.home,
            site.trouble,
        )

    @handles(Leave)
    async def leave(self, _: Leave) -> Ok:
        self._site.leaving = True
        if self._lease is not None and self._site.joined.is_set():  # else it is said with the next joining
            await self._write_me(self._lease)
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
        if self._site.joined.is_set():  # else what is of this name may be another gyred's
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
