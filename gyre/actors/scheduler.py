"""The scheduler actor: campaigns for leadership, and while it leads, launches groups, settles them, and sets roles.

Every decision is a pure function (gyre.sched). This actor keeps a view of the cluster from watches of the store, and when
something happened has each part of a leader's work look at it: places, groups, roles. They write what the decisions say,
fenced by the token of the term.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gyre.actors.all_gateways import AllGateways
from gyre.actors.campaign import Campaign
from gyre.actors.groups import Groups
from gyre.actors.measures import Measures
from gyre.actors.messages import GatewayStatus, JobFailed, Ok
from gyre.actors.messages_core import Lead, Progressed, WhoLeads
from gyre.actors.messages_gyrectl import DrainNode, EndJob, PauseJob, PinCell, ResignLeader, SwitchCell
from gyre.actors.persons_orders import PersonsOrders
from gyre.actors.places import Places
from gyre.actors.roles import Roles
from gyre.actors.runtime import Actor, handles
from gyre.actors.site import Site
from gyre.actors.term import Term
from gyre.actors.view import View
from gyre.store.records import JobRecord, JobState, SnapshotRecord
from gyre.wire import record

WRITTEN_TICKS = 20
TICK_S = 0.5
"""Decisions follow events; this only bounds how long a measured rate or a passing second goes unnoticed."""


@record("scheduler.elected")
@dataclass(frozen=True)
class _Elected:
    token: int


@record("scheduler.tick")
@dataclass(frozen=True)
class _Tick:
    pass


class SchedulerActor(Actor):
    def __init__(self, site: Site) -> None:
        self._site = site
        self._campaign = Campaign(
            site,
            lambda token: self.ref.tell(_Elected(token)),
            lambda why: site.warn(f"not the leader any more: {why}"),  # at once, whatever this actor waits for
        )
        self.term = Term(site, self._campaign)
        self._failure = ""
        """Why the job cannot go on, until a leader has written it down."""
        self._view = View(site.store, site.keys)
        self._measures = Measures()
        self._places = Places(site, self._view, self.term)
        self._groups = Groups(site, self._view, self.term, self._measures)
        self._roles = Roles(site, self._view, self.term, self._measures)
        self._orders = PersonsOrders(site, self._view, self.term)
        self._gateways = AllGateways(site)
        self._gateway: GatewayStatus | None = None
        """All gateways together, as last heard."""
        self._ticks = 0
        self._following = False
        self._woken = False
        self._unsubscribe: Callable[[], None] = lambda: None

    async def pre_start(self) -> None:
        self.task(self._campaign.run())
        self.task(self._look_at_gateways())
        self._unsubscribe = self._site.directory.subscribe(self._wake)
        self.after(TICK_S, _Tick())

    async def post_stop(self) -> None:
        self._unsubscribe()
        if self._site.stopping:
            await self.term.update_job()
        await self._campaign.end()

    # ------------------------------------------------------------------------------------------ leadership

    @handles(_Elected)
    async def on_elected(self, message: _Elected) -> None:
        self.term.begin(message.token)
        self._places.begin()
        await self.term.ensure_job()
        if not self._following:
            self._following = True
            for mirror in self._view.mirrors:
                self.task(mirror.follow(self._wake))
        self._lead()

    def _lead(self) -> None:
        """Tell the core whose token fences what it writes; again and again, since it may not have heard."""
        core, token = self._site.directory.core, self.term.token
        if token and core is not None and core.record.node in self._site.directory.nodes:  # else it asks when it begins
            self._site.core.tell(Lead(token))

    @handles(WhoLeads)
    async def on_who_leads(self, _: WhoLeads) -> None:
        self._lead()
        await self._decide()

    @handles(ResignLeader, control=True)
    async def on_resign(self, message: ResignLeader) -> Ok:
        self.term.must_lead()
        self._site.say(f"the leader resigns, as it was told by {message.by}")
        self._campaign.resign()
        return Ok()

    # ------------------------------------------------------------------------------------------ deciding

    def _wake(self) -> None:
        """One decision for any number of changes that came together."""
        if not self._woken:
            self._woken = True
            self.after(0.0, Progressed())

    @handles(_Tick)
    async def on_tick(self, _: _Tick) -> None:
        self.after(TICK_S, _Tick())
        self._measures.look(self.now_s, self._gateway, self._view.roles.records, self._view.runs.records)
        self._measures.look_at_switches(self._view.switches.records)
        self._ticks += 1
        self._lead()
        if self._ticks % WRITTEN_TICKS == 0:  # so that a killed gyred loses little of the time that was worked
            await self.term.update_job()
        await self._decide()

    @handles(Progressed)
    async def on_progress(self, _: Progressed) -> None:
        self._woken = False
        await self._decide()

    @handles(JobFailed)
    async def on_failed(self, message: JobFailed) -> None:
        if not self._failure:
            self._failure = message.reason
            self._site.warn(f"the job fails: {message.reason}")
        await self._decide()

    async def _decide(self) -> None:
        site, directory = self._site, self._site.directory
        if not self.term.token or site.stopping or not directory.listed or not self._view.listed:
            return
        job = await site.store.get(site.keys.job, JobRecord)
        snapshot = await site.store.get(site.keys.snapshot, SnapshotRecord)
        if job is None or snapshot is None or job.record.state not in (JobState.RUNNING, JobState.PAUSED):
            return
        paused = job.record.state is JobState.PAUSED
        if self._failure:
            await self.term.end_job(JobState.FAILED, self._failure)
            return
        await self._places.look(self.now_s)
        if directory.core is None:
            return
        await self._groups.look(job)
        version = snapshot.record.version
        if self._groups.finished(version):
            await self.term.end_job(JobState.FINISHED, "")
            return
        if not paused:
            await self._groups.launch(job.record, version)
        await self._places.give_runs(self.now_s)
        await self._roles.look(self.now_s, self._gateway, paused=paused)

    async def _look_at_gateways(self) -> None:
        while True:
            if self.term.token:
                self._gateway = await self._gateways.look()
            await asyncio.sleep(TICK_S)

    # ------------------------------------------------------------------------------------------ a person's orders

    @handles(SwitchCell)
    async def on_switch(self, message: SwitchCell) -> Ok:
        self.term.must_lead()
        await self._roles.switch(message)
        return Ok()

    @handles(PinCell)
    async def on_pin(self, message: PinCell) -> Ok:
        self.term.must_lead()
        await self._orders.pin(message)
        return Ok()

    @handles(DrainNode)
    async def on_drain(self, message: DrainNode) -> Ok:
        self.term.must_lead()
        await self._orders.drain(message)
        return Ok()

    @handles(PauseJob)
    async def on_pause(self, message: PauseJob) -> Ok:
        self.term.must_lead()
        await self._orders.pause(message)
        self._wake()
        return Ok()

    @handles(EndJob)
    async def on_end_job(self, message: EndJob) -> Ok:
        self.term.must_lead()
        await self._orders.end_job(message)
        return Ok()
