"""Nodes come and go: what a leader writes of it, as gyre.sched.placement says.

The core is a cell of a node that is there; runs are given to nodes with room; what a node that is gone had (the core, its
runs, tokens that nobody has trained) is given to others: such tokens to the node that has their copy, and where there is
none they are sampled again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from gyre.actors.messages_journals import Attempt, Taken, TakeOver
from gyre.actors.site import Site
from gyre.actors.term import Term
from gyre.actors.view import View
from gyre.errors import GyreError
from gyre.ids import NodeId, RunId
from gyre.sched.placement import (
    Absence,
    Notice,
    Room,
    anyone_takes,
    choose_core,
    in_batches,
    left_by,
    placed,
    taken_up,
)
from gyre.store.election import Verdict
from gyre.store.protocol import Compare
from gyre.store.records import CoreRecord, GroupRecord, RunRecord, RunState
from gyre.store.typed import put_record

GRACE_S = 5.0
"""After a node's lease has ended, or a leader has begun, before what the node had is given to others."""
ASK_S = 2.0
PATIENCE_S = 30.0
"""For nodes to say what copies they have, before runs are run again that one of them may have."""


class Places:
    def __init__(self, site: Site, view: View, term: Term) -> None:
        self._site = site
        self._view = view
        self._term = term
        self._absence = Absence(GRACE_S)
        self._gone: frozenset[NodeId] = frozenset()
        self._notice = Notice()
        self._told: set[tuple[NodeId, bool]] = set()
        """Of which nodes it was said that their time to drain is over, and whether their runs have anywhere to go."""
        self._sought_s: float | None = None
        """Since when copies are sought that somebody who has not answered may have."""

    def begin(self) -> None:
        """A new term: what was seen of nodes before it says nothing."""
        self._absence.begin()
        self._notice.begin()

    async def look(self, now_s: float) -> None:
        """What a node that is gone had is given to others: the core, its runs, the tokens that nobody has trained."""
        site, directory = self._site, self._site.directory
        known = {spec.node for spec in directory.specs} | {run.node for run in self._view.runs.records}
        gone = self._absence.look(now_s, known, directory.nodes)
        for node in sorted(gone - self._gone):
            site.warn(f"{node} is gone; what it had is given to others")
        self._gone = gone
        await self._place_core()
        if not gone:
            return
        groups, records = (
            dict(self._view.groups.items),
            dict(self._view.runs.items),
        )  # as they are before anybody is asked
        left = left_by(
            gone,
            [seen.record for seen in groups.values()],
            {seen.record.run: seen.record for seen in records.values()},
        )
        kept = await self._kept([run for _, runs in left for run in runs], now_s)
        if kept is None:
            return
        for group, runs in (taken_up(group, runs, kept) for group, runs in left):
            group_seen = groups[site.keys.group(group.group)]
            seen = [records[site.keys.run(run.run)] for run in runs]
            compares = [Compare.modified(item.key, item.mod_revision) for item in (group_seen, *seen)]
            puts = [put_record(group_seen.key, group), *(put_record(site.keys.run(run.run), run) for run in runs)]
            if await self._term.commit(puts, compares) is Verdict.WRITTEN:
                again = sum(run.state is RunState.QUEUED for run in runs)
                if again < len(runs):
                    site.warn(f"{group.group}: {len(runs) - again} runs are trained from the copies of their journals")
                if again:
                    site.warn(f"{group.group}: {again} runs are run again, for their tokens are gone with their node")
                await self._see(group, runs)

    async def _kept(self, runs: Sequence[RunRecord], now_s: float) -> dict[RunId, NodeId] | None:
        """Which node has a copy of which of these runs; it makes them its own. None while one that may have some has
        not answered, and there is patience left."""
        site = self._site
        kept: dict[RunId, NodeId] = {}
        if not runs or not site.has_copies:
            self._sought_s = None
            return kept
        order = TakeOver(tuple(Attempt(run.run, run.attempt) for run in runs))
        nodes = list(site.directory.nodes)
        answers = await asyncio.gather(*(self._take_over(node, order) for node in nodes))
        for node, taken in zip(nodes, answers, strict=True):
            kept |= {each.run: node for each in taken.attempts} if taken is not None else {}
        if len(kept) == len(runs) or None not in answers:
            self._sought_s = None
            return kept
        self._sought_s = now_s if self._sought_s is None else self._sought_s
        return kept if now_s - self._sought_s > PATIENCE_S else None

    async def _take_over(self, node: NodeId, order: TakeOver) -> Taken | None:
        try:
            return await self._site.on(node, "node").ask(order, ASK_S, Taken)
        except GyreError:
            return None

    async def _place_core(self) -> None:
        site, held = self._site, self._site.directory.core
        roles = {cell: seen.record.observed for cell, seen in self._view.seen_roles.items()}
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
        if await self._term.commit((put,), (compare,)) is Verdict.WRITTEN and held is not None:
            site.warn(f"{chosen.cell} of {chosen.node} is the core from now on, in place of {held.record.cell}")

    async def give_runs(self, now_s: float) -> None:
        site = self._site
        rooms = site.directory.rooms
        due = self._notice.look(now_s, site.directory.drains.values())
        self._say_due(due, rooms)
        in_order = sorted(self._view.runs.items.values(), key=lambda item: (item.create_revision, item.key))
        for changed in in_batches(placed([item.record for item in in_order], rooms, self._gone, due)):
            seen = [self._view.runs.items[site.keys.run(run.run)] for run in changed]
            compares = [Compare.modified(item.key, item.mod_revision) for item in seen]
            if (
                await self._term.commit([put_record(site.keys.run(run.run), run) for run in changed], compares)
                is Verdict.WRITTEN
            ):
                await self._see(None, changed)

    async def _see(self, group: GroupRecord | None, runs: Sequence[RunRecord]) -> None:
        """What we have written is decided by at once, and not again by what was there before."""
        site, view = self._site, self._view
        if group is not None and (now := await site.store.get(site.keys.group(group.group), GroupRecord)) is not None:
            view.groups.put(now)
        for run in runs:
            if (written := await site.store.get(site.keys.run(run.run), RunRecord)) is not None:
                view.runs.put(written)

    def _say_due(self, due: frozenset[NodeId], rooms: Sequence[Room]) -> None:
        live = Counter(run.node for run in self._view.runs.records if run.state is RunState.LIVE)
        takes = anyone_takes(rooms)
        told = {(node, takes) for node in due if live[node]}
        for node, _ in sorted(told - self._told):
            what = "begin again elsewhere" if takes else "stay, for no other node takes runs"
            self._site.warn(f"{node} drains, and its time is over: {live[node]} live runs {what}")
        self._told = told
