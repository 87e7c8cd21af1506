"""This node's part in the copies of journals: it chooses the peer that has ours, and deletes those of others that are of no
more use. The bytes go from gateway to gateway.

The node actor tells it what it sees of runs and groups. The choice is kept on disk, so that the next gyred stays with it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from gyre.actors.messages import Ok
from gyre.actors.messages_journals import Attempt, CopyTo
from gyre.actors.mirror import Mirror
from gyre.actors.site import Site
from gyre.errors import GyreError
from gyre.ids import NodeId, RunId
from gyre.proxy.held_copies import HeldCopies
from gyre.sched.copies import choose_peer, is_of_use, is_untrained
from gyre.sched.placement import NOWHERE
from gyre.store.records import GroupRecord, RunRecord, RunState

TELL_S = 300.0
RETRY_S = 1.0


class JournalCopies:
    """`runs` and `groups` are the node actor's mirrors, of which it tells what changes."""

    def __init__(self, site: Site, runs: Mirror[RunRecord], groups: Mirror[GroupRecord]) -> None:
        self._site = site
        self._runs = runs
        self._groups = groups
        self._settled: dict[RunId, RunRecord] = {}
        """Ours, as far as they were not trained when we last looked."""
        self._held = HeldCopies(site.job.copies)
        self._file = site.job.state / "journal-peer"
        self._peer = self._read()
        self._told: CopyTo | None = None
        self._version = -1
        """The snapshot at which the copies here were looked through: a step has trained some of them since."""
        self._news = asyncio.Event()

    def saw(self, run: RunRecord) -> None:
        """A run's record, as it is now."""
        if run.state is RunState.SETTLED and run.node == self._site.node:
            self._settled[run.run] = run
        else:
            self._settled.pop(run.run, None)

    def look(self) -> None:
        """Runs or groups have changed."""
        self._news.set()

    async def follow(self) -> None:
        """Have the gateway know where its copies go, for ever."""
        site = self._site
        if not site.has_copies:
            return
        unsubscribe = site.directory.subscribe(self._news.set)
        try:
            while True:
                self._news.clear()
                if site.directory.listed and self._runs.listed and self._groups.listed:
                    try:
                        await self._tell(self._order())
                        await self._look_through()
                    except GyreError as error:
                        site.warn(f"the copies of journals are not in order yet: {error}")
                        await asyncio.sleep(RETRY_S)
                        continue
                await self._news.wait()
        finally:
            unsubscribe()

    async def _tell(self, order: CopyTo) -> None:
        if order == self._told:
            return
        if self._told is None or order.node != self._told.node:
            if not order.node:
                self._site.warn("journals have no copy just now")
            elif self._told is None:
                self._site.say(f"journals are copied to {order.node}")
            else:
                self._site.warn(f"journals are copied to {order.node}")
        await self._site.gateway.ask(order, TELL_S, Ok)
        self._told = order

    def _order(self) -> CopyTo:
        site, nodes = self._site, self._site.directory.nodes
        leaving = {node for node, item in nodes.items() if not item.record.max_live}
        peer = choose_peer(site.node, self._peer, nodes, site.directory.draining | leaving)
        if peer is not None and peer != self._peer:
            self._peer = peer
            with suppress(OSError):  # else the next gyred chooses anew
                self._file.write_text(peer, encoding="utf-8")
        for run in [run for run in self._settled.values() if not is_untrained(run, self._group(run))]:
            del self._settled[run.run]
        closed = sorted((run.run, run.attempt) for run in self._settled.values())
        place = None if peer is None else site.place(peer, "gateway")
        return CopyTo(peer or NOWHERE, place, tuple(Attempt(*each) for each in closed))

    def _read(self) -> NodeId | None:
        with suppress(OSError):
            return NodeId(self._file.read_text(encoding="utf-8"))
        return None

    def _group(self, run: RunRecord) -> GroupRecord | None:
        found = self._groups.items.get(self._site.keys.group(run.group))
        return None if found is None else found.record

    async def _look_through(self) -> None:
        """Once a step: delete the copies here that are of no more use. Those of a node that is not there stay: they may be
        all that is left of its runs."""
        site, published = self._site, self._site.directory.snapshot
        if published is None or published.record.version == self._version:
            return
        for place in await asyncio.to_thread(self._held.places):
            run = await site.store.get(site.keys.run(place.run), RunRecord)
            group = None if run is None else await site.store.get(site.keys.group(run.record.group), GroupRecord)
            known = None if run is None else run.record, None if group is None else group.record
            if place.copy_of in site.directory.nodes and not is_of_use(place.copy_of, place.attempt, *known):
                await asyncio.to_thread(self._held.forget, place)
        self._version = published.record.version
