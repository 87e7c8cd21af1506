"""Nodes come and go: what a leader writes of it, as gyre.sched.placement says.

The core is a cell of a node that is there; runs are given to nodes with room; what a node that is gone had (the core, its
runs, tokens that nobody has trained) is given to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gyre.actors.mirror import Mirror
from gyre.actors.site import Site
from gyre.ids import NodeId
from gyre.sched.placement import Absence, Room, choose_core, in_batches, lost_with, placed
from gyre.store.election import Verdict
from gyre.store.protocol import Compare, Delete, Put
from gyre.store.records import CellRoleRecord, CoreRecord, DrainRecord, GroupRecord, RunRecord
from gyre.store.typed import put_record

GRACE_S = 5.0
"""After a node's lease has ended, or a leader has begun, before what the node had is given to others."""


class Commit(Protocol):
    async def __call__(
        self, puts: Sequence[Put], compares: Sequence[Compare] = (), deletes: Sequence[Delete] = ()
    ) -> Verdict:
        """One transaction, fenced by the leader's token."""
        ...


class Places:
    def __init__(
        self,
        site: Site,
        groups: Mirror[GroupRecord],
        runs: Mirror[RunRecord],
        roles: Mirror[CellRoleRecord],
        drains: Mirror[DrainRecord],
        commit: Commit,
    ) -> None:
        self._site = site
        self._groups = groups
        self._runs = runs
        self._roles = roles
        self._drains = drains
        self._commit = commit
        self._absence = Absence(GRACE_S)
        self._gone: frozenset[NodeId] = frozenset()

    def begin(self) -> None:
        """A new term: what was seen of nodes before it says nothing."""
        self._absence.begin()

    async def look(self, now_s: float) -> None:
        """What a node that is gone had is given to others: the core, its runs, the tokens that nobody has trained."""
        site, directory = self._site, self._site.directory
        known = {spec.node for spec in directory.specs} | {run.node for run in self._runs.records}
        gone = self._absence.look(now_s, known, directory.nodes)
        for node in sorted(gone - self._gone):
            site.say(f"{node} is gone; what it had is given to others")
        self._gone = gone
        await self._place_core()
        if not gone:
            return
        records = {run.run: run for run in self._runs.records}
        for group, runs in lost_with(gone, self._groups.records, records):
            site.say(f"{group.group}: {len(runs)} runs are run again, for their tokens are gone with their node")
            group_seen = self._groups.items[site.keys.group(group.group)]
            seen = [self._runs.items[site.keys.run(run.run)] for run in runs]
            compares = [Compare.modified(item.key, item.mod_revision) for item in (group_seen, *seen)]
            puts = [put_record(group_seen.key, group), *(put_record(site.keys.run(run.run), run) for run in runs)]
            await self._commit(puts, compares)

    async def _place_core(self) -> None:
        site, held = self._site, self._site.directory.core
        roles = {site.keys.cell_of(key): seen.record.observed for key, seen in self._roles.items.items()}
        chosen = choose_core(
            held.record.cell if held else None,
            site.directory.cells,
            self._gone,
            held.record.node if held else None,
            roles,
        )
        if chosen is None:
            return
        key = site.keys.core
        compare = Compare.modified(key, held.mod_revision if held else 0)
        put = put_record(key, CoreRecord(chosen.cell, chosen.node))
        if await self._commit((put,), (compare,)) is Verdict.WRITTEN and held is not None:
            site.say(f"{chosen.cell} of {chosen.node} is the core from now on, in place of {held.record.cell}")

    async def give_runs(self) -> None:
        site = self._site
        draining = {drain.node for drain in self._drains.records}
        rooms = [Room(node, item.record.max_live, node in draining) for node, item in site.directory.nodes.items()]
        in_order = sorted(self._runs.items.values(), key=lambda item: (item.create_revision, item.key))
        for changed in in_batches(placed([item.record for item in in_order], rooms, self._gone)):
            seen = [self._runs.items[site.keys.run(run.run)] for run in changed]
            compares = [Compare.modified(item.key, item.mod_revision) for item in seen]
            if (
                await self._commit([put_record(site.keys.run(run.run), run) for run in changed], compares)
                is Verdict.WRITTEN
            ):
                for run in changed:
                    now = await site.store.get(site.keys.run(run.run), RunRecord)
                    if now is not None:
                        self._runs.put(now)
