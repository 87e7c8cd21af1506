"""The scheduler actor: campaigns for leadership, and while it leads, launches groups, settles them, and sets roles.

Every decision is a pure function (gyre.sched); this actor keeps the cluster's view from watches of the store, asks them
when something happened, and writes what they say. Every write is fenced by the leader's token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gyre.actors.all_gateways import AllGateways
from gyre.actors.campaign import Campaign
from gyre.actors.measures import Measures
from gyre.actors.messages import (
    GatewayStatus,
    GetProgress,
    JobFailed,
    Lead,
    Ok,
    Progress,
    Progressed,
    WhoLeads,
)
from gyre.actors.messages_gyrectl import DrainNode, EndJob, PauseJob, PinCell, ResignLeader, SwitchCell
from gyre.actors.mirror import Mirror
from gyre.actors.places import Places
from gyre.actors.runtime import Actor, handles
from gyre.actors.site import Site
from gyre.errors import Refused, Unavailable
from gyre.ids import CellId, RunId
from gyre.sched.launch import Launch, LaunchPlan, batch_of, is_finished, mean, next_launches, run_id
from gyre.sched.orders import refuse_pin, refuse_switch
from gyre.sched.placement import NOWHERE
from gyre.sched.policy import CellView, ClusterView, PolicyParams, decide
from gyre.sched.revival import Revival
from gyre.store.election import Verdict, fenced_txn, publish_snapshot_txn, verdict
from gyre.store.protocol import Compare, Delete, Put
from gyre.store.records import (
    CellRoleRecord,
    DrainRecord,
    GroupRecord,
    GroupState,
    JobRecord,
    JobState,
    PinRecord,
    Purpose,
    Role,
    RunRecord,
    RunState,
    SnapshotRecord,
    SwitchRecord,
)
from gyre.store.typed import Versioned, put_record
from gyre.train.snapshot import make_first_snapshot
from gyre.wire import record

T = TypeVar("T")

WRITTEN_TICKS = 20
TICK_S = 0.5
"""Decisions follow events; this only bounds how long a measured rate or a passing second goes unnoticed."""


@record("scheduler.elected")
@dataclass(frozen=True)
class _Elected:
    token: int


@record("scheduler.deposed")
@dataclass(frozen=True)
class _Deposed:
    why: str


@record("scheduler.tick")
@dataclass(frozen=True)
class _Tick:
    pass


class SchedulerActor(Actor):
    def __init__(self, site: Site) -> None:
        self._site = site
        spec = site.spec
        self._plan = LaunchPlan(
            steps=spec.job.steps,
            batch_groups=spec.batch.groups,
            group_size=spec.batch.group_size,
            staleness=spec.batch.staleness,
            heldout=spec.tasks.heldout,
        )
        self._term = 0
        """The token of the election that was taken up last."""
        self._campaign = Campaign(
            site, lambda token: self.ref.tell(_Elected(token)), lambda why: self.ref.tell(_Deposed(why))
        )
        self._failure = ""
        """Why the job cannot go on, until a leader has written it down."""
        root = site.keys.root
        self._groups = Mirror(site.store, f"{root}groups/", GroupRecord)
        self._runs = Mirror(site.store, f"{root}runs/", RunRecord)
        self._roles = Mirror(site.store, site.keys.roles, CellRoleRecord)
        self._switches = Mirror(site.store, f"{root}switches/", SwitchRecord)
        self._pins = Mirror(site.store, f"{root}pins/", PinRecord)
        self._places = Places(site, self._groups, self._runs, self._roles, self._commit)
        self._gateways = AllGateways(site)
        self._gateway: GatewayStatus | None = None
        """All gateways together, as last heard."""
        self._switched: dict[CellId, int] = {}
        """By cell, the epoch of a switch that a person ordered: the policy waits until the cell has come to rest."""
        self._revival = Revival()
        self._params = PolicyParams(**spec.scheduler.model_dump())
        self._measures = Measures()
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
        if self._token and self._site.stopping:
            await self._update_job()
        await self._campaign.end()

    # ------------------------------------------------------------------------------------------ leadership

    @handles(_Elected)
    async def on_elected(self, message: _Elected) -> None:
        self._term = message.token
        self._places.begin()
        await self._ensure_job()
        if not self._following:
            self._following = True
            for mirror in self._mirrors:
                self.task(mirror.follow(self._wake))
        self._lead()

    @property
    def _token(self) -> int:
        """Fences what is written now. 0 while we do not lead or cannot prove it, also for a handler that waited for long."""
        return self._term if self._term == self._campaign.token else 0

    @property
    def _mirrors(self) -> tuple[Mirror[Any], ...]:
        return (self._groups, self._runs, self._roles, self._switches, self._pins)

    def _lead(self) -> None:
        """Tell the core whose token fences what it writes; again and again, since it may not have heard."""
        core = self._site.directory.core
        if core is not None and core.record.node in self._site.directory.nodes:  # else it asks us when it begins
            self._site.core.tell(Lead(self._token))

    @handles(WhoLeads)
    async def on_who_leads(self, _: WhoLeads) -> None:
        if self._token:
            self._lead()
            await self._decide()

    @handles(_Deposed)
    async def on_deposed(self, message: _Deposed) -> None:
        self._site.say(f"not the leader any more: {message.why}")

    @handles(ResignLeader, control=True)
    async def on_resign(self, _: ResignLeader) -> Ok:
        self._must_lead()
        self._site.say("the leader resigns, as it was told")
        self._campaign.resign()
        return Ok()

    def _must_lead(self) -> None:
        if not self._token:
            raise Unavailable("this node's scheduler does not lead just now; ask again in a few seconds")

    async def _ensure_job(self) -> None:
        """The job's record and its first snapshot, on the first day of the job."""
        site = self._site
        if await site.store.get(site.keys.job, JobRecord) is None:
            job = JobRecord(
                site.spec.job.name,
                site.spec.to_json(),
                JobState.RUNNING,
                "",
                0,
                0,
                None,
                None,
                site.outside.unix_s(),
                0.0,
            )
            absent = (Compare.created(site.keys.job, 0),)
            await self._commit((put_record(site.keys.job, job),), absent)
        if await site.store.get(site.keys.snapshot, SnapshotRecord) is None and (token := self._token):
            _, digest = make_first_snapshot(site.model_dir, site.job.snapshots)
            first = SnapshotRecord(0, digest, site.node)
            await site.store.commit(publish_snapshot_txn(site.keys, token, None, first))

    def _wake(self) -> None:
        """One decision for any number of changes that came together."""
        if not self._woken:
            self._woken = True
            self.after(0.0, Progressed())

    async def _commit(
        self, puts: Sequence[Put], compares: Sequence[Compare] = (), deletes: Sequence[Delete] = ()
    ) -> Verdict:
        """One fenced transaction; stops leading when it turns out that another leads."""
        if not (token := self._token):
            return Verdict.DEPOSED
        result = await self._site.store.commit(fenced_txn(self._site.keys, token, compares, puts, deletes))
        outcome = verdict(result, token)
        if outcome is Verdict.DEPOSED and self._term == token:
            self._term = 0
        return outcome

    # ------------------------------------------------------------------------------------------ deciding

    @handles(_Tick)
    async def on_tick(self, _: _Tick) -> None:
        self.after(TICK_S, _Tick())
        self._measures.look(self.now_s, self._gateway, self._roles.records, self._runs.records)
        self._measures.look_at_switches(self._switches.records)
        self._ticks += 1
        if self._token:
            self._lead()
        if self._ticks % WRITTEN_TICKS == 0:  # so that a killed gyred loses little of the time that was worked
            await self._update_job()
        await self._decide()

    @handles(Progressed)
    async def on_progress(self, _: Progressed) -> None:
        self._woken = False
        await self._decide()

    @handles(JobFailed)
    async def on_failed(self, message: JobFailed) -> None:
        if not self._failure:
            self._failure = message.reason
            self._site.say(f"the job fails: {message.reason}")
        await self._decide()

    async def _decide(self) -> None:
        site = self._site
        if not self._token or site.stopping or not site.directory.listed:
            return
        if not all(mirror.listed for mirror in self._mirrors):
            return
        job = await site.store.get(site.keys.job, JobRecord)
        snapshot = await site.store.get(site.keys.snapshot, SnapshotRecord)
        if job is None or snapshot is None or job.record.state not in (JobState.RUNNING, JobState.PAUSED):
            return
        paused = job.record.state is JobState.PAUSED
        if self._failure:
            await self._end_job(JobState.FAILED, self._failure)
            return
        await self._places.look(self.now_s)
        if site.directory.core is None:
            return
        self._drop_consumed()
        await self._settle_groups()
        await self._note_heldout(job)
        groups = self._groups.records
        version = snapshot.record.version
        if is_finished(self._plan, version, groups):
            await self._end_job(JobState.FINISHED, "")
            return
        launches = next_launches(self._plan, version, job.record.launched_groups, job.record.consumed_groups, groups)
        if launches and not paused:
            await self._launch(launches, version)
        await self._places.give_runs()
        await self._set_roles(paused=paused)

    # ------------------------------------------------------------------------------------------ nodes come and go

    async def _look_at_gateways(self) -> None:
        while True:
            if self._token:
                self._gateway = await self._gateways.look()
            await asyncio.sleep(TICK_S)

    # ------------------------------------------------------------------------------------------ groups

    def _drop_consumed(self) -> None:
        """What has been trained is decided about no more: a long job costs no more per decision than a short one."""
        for group in [group for group in self._groups.records if group.state is GroupState.CONSUMED]:
            for run in group.runs:
                found = self._run(run)
                if found is not None and found.trace is not None:
                    self._measures.trained(found.trace)
                self._runs.drop(self._site.keys.run(run))
            self._groups.drop(self._site.keys.group(group.group))

    def _has_settled(self, group: GroupRecord) -> bool:
        """As far as we have heard: of the group's settling we may hear before we hear of its runs'."""
        return group.state is not GroupState.OPEN and self._runs_settled(group)

    def _runs_settled(self, group: GroupRecord) -> bool:
        runs = [self._run(run) for run in group.runs]
        return all(run is not None and run.state is RunState.SETTLED for run in runs)

    async def _settle_groups(self) -> None:
        for seen in list(self._groups.items.values()):
            group = seen.record
            if group.state is GroupState.OPEN and self._runs_settled(group):
                settled = replace(group, state=GroupState.SETTLED)
                await self._write(self._groups, seen, settled)

    def _run(self, run: RunId) -> RunRecord | None:
        found = self._runs.items.get(self._site.keys.run(run))
        return None if found is None else found.record

    async def _write(self, mirror: Mirror[T], seen: Versioned[T], new: T) -> bool:
        """Replace one mirrored record, unless somebody was quicker."""
        outcome = await self._commit((put_record(seen.key, new),), (Compare.modified(seen.key, seen.mod_revision),))
        if outcome is Verdict.WRITTEN:
            now = await self._site.store.get(seen.key, type(new))
            if now is not None:
                mirror.put(now)
        return outcome is Verdict.WRITTEN

    async def _note_heldout(self, job: Versioned[JobRecord]) -> None:
        """The mean held-out reward, once every run of its purpose has settled."""
        for purpose, known in (
            (Purpose.HELDOUT_BEFORE, job.record.heldout_before),
            (Purpose.HELDOUT_AFTER, job.record.heldout_after),
        ):
            groups = [group for group in self._groups.records if group.purpose is purpose]
            if (
                known is not None
                or len(groups) < max(1, self._plan.heldout)
                or not all(self._has_settled(group) for group in groups)
            ):
                continue
            reward = mean([reward for group in groups for reward in self._rewards(group)])
            if reward is None:
                await self._end_job(
                    JobState.FAILED, "no held-out run could be scored; see the runs' reasons in the log"
                )
                return
            field = "heldout_before" if purpose is Purpose.HELDOUT_BEFORE else "heldout_after"
            await self._update_job(**{field: reward})
            self._site.say(f"held-out reward {'before' if field.endswith('before') else 'after'}: {reward:.3f}")

    def _rewards(self, group: GroupRecord) -> list[float]:
        runs = [self._run(run) for run in group.runs]
        return [run.reward for run in runs if run is not None and run.reward is not None]

    async def _launch(self, launches: Sequence[Launch], version: int) -> None:
        site = self._site
        for launch in launches:
            runs = tuple(run_id(launch.group, member) for member in range(launch.runs))
            group = GroupRecord(
                launch.group,
                site.task(launch.purpose, launch.index).id,
                launch.purpose,
                launch.index,
                runs,
                GroupState.OPEN,
                version,
                0,
            )
            queued = [
                RunRecord(run, launch.group, RunState.QUEUED, 1, NOWHERE, None, None, "", None, 0.0, 0.0)
                for run in runs
            ]
            puts = [put_record(site.keys.group(launch.group), group)]
            puts += [put_record(site.keys.run(run.run), run) for run in queued]
            compares = [Compare.created(site.keys.group(launch.group), 0)]
            if launch.purpose is Purpose.TRAIN:
                job = await site.store.get(site.keys.job, JobRecord)
                assert job is not None
                if job.record.launched_groups != launch.index:
                    return
                puts.append(put_record(site.keys.job, replace(job.record, launched_groups=launch.index + 1)))
                compares.append(Compare.modified(site.keys.job, job.mod_revision))
            if await self._commit(puts, compares) is not Verdict.WRITTEN:
                return
            written = await site.store.get(site.keys.group(launch.group), GroupRecord)
            if written is not None:
                self._groups.put(written)

    async def _update_job(self, **changes: Any) -> None:
        site = self._site
        while self._token:
            job = await site.store.get(site.keys.job, JobRecord)
            assert job is not None
            put = put_record(site.keys.job, replace(job.record, active_s=site.active_s(), **changes))
            if await self._commit((put,), (Compare.modified(site.keys.job, job.mod_revision),)) is not Verdict.OUTDATED:
                return

    async def _end_job(self, state: JobState, reason: str) -> None:
        await self._update_job(state=state, reason=reason)
        if self._token:
            self._site.say(f"the job has {state.value}{': ' + reason if reason else ''}")

    # ------------------------------------------------------------------------------------------ roles

    def _view(self, roles: Mapping[CellId, CellRoleRecord], progress: Progress, *, paused: bool) -> ClusterView:
        spec, gateway = self._site.spec, self._gateway
        in_flight = gateway.in_flight if gateway else {}
        runs, pins = self._runs.records, self._pinned()
        past = batch_of(progress.step, spec.batch.groups).stop
        later = [
            trace
            for group in self._groups.records
            if group.purpose is Purpose.TRAIN and group.state is GroupState.SETTLED and group.index >= past
            for run in group.runs
            if (found := self._run(run)) is not None and (trace := found.trace) is not None
        ]
        return ClusterView(
            cells=tuple(
                CellView(
                    cell=cell,
                    core=cell == self._site.core_cell,
                    role=seen.observed,
                    desired=seen.desired,
                    slots=spec.cells.slots,
                    live=in_flight.get(cell, 0),
                    pinned=seen.desired if cell in self._switched else pins.get(cell),
                )
                for cell, seen in roles.items()
            ),
            queued=0 if paused else sum(run.state is RunState.QUEUED for run in runs),
            live=sum(run.state is RunState.LIVE for run in runs),
            ready_runs=progress.untrained_runs,
            ready_tokens=progress.untrained_tokens,
            later_tokens=sum(item.tokens for trace in later for item in trace.lineages),
            batch_complete=progress.planned_groups >= spec.batch.groups,
            step_waits=progress.step_due,
            batch_runs=spec.batch.groups * spec.batch.group_size,
            staleness=spec.batch.staleness,
            train_tokens_s=progress.train_tokens_s,
            rollout_tokens_s=self._measures.rollout_tokens_s,
            run_train_tokens=self._measures.run_train_tokens,
            run_sampled_tokens=self._measures.run_sampled_tokens,
            switch_s=self._measures.switch_s,
        )

    def _seen_roles(self) -> dict[CellId, Versioned[CellRoleRecord]]:
        return {self._site.keys.cell_of(key): seen for key, seen in self._roles.items.items()}

    def _pinned(self) -> dict[CellId, Role]:
        return {pin.cell: pin.role for pin in self._pins.records}

    async def _set_roles(self, *, paused: bool) -> None:
        there = {spec.cell for spec in self._site.directory.cells}
        roles = {cell: seen for cell, seen in self._seen_roles().items() if cell in there}
        if len(roles) < len(there):
            return  # the cells have not reported yet
        try:
            progress = await self._site.core.ask(GetProgress(), 5.0, Progress)
        except Unavailable:  # it starts again; the next tick asks it again
            return
        failed = [cell for cell, seen in roles.items() if seen.record.observed is Role.FAILED]
        back = [cell for cell, seen in roles.items() if seen.record.came_back]
        due = self._revival.due([*failed, *back], self.now_s)
        for cell in due:
            if cell in failed:
                await self._order(cell, roles[cell], Role.ROLLOUT, "it failed and is tried again")
        if self._revival.hopeless(failed, len(roles)):
            await self._end_job(
                JobState.FAILED, f"no cell works; the logs of the engines in {self._site.job.logs} say why"
            )
            return
        records = {cell: seen.record for cell, seen in roles.items()}
        for cell, epoch in list(self._switched.items()):
            if records[cell].epoch != epoch or records[cell].rested >= epoch:
                del self._switched[cell]
        plan, pinned = decide(self._view(records, progress, paused=paused), self._params), self._pinned()
        for cell, desired in plan.desired.items():
            if roles[cell].record.desired is not desired or (cell in due and cell in back):
                await self._order(cell, roles[cell], desired, "it is pinned" if cell in pinned else plan.reason)

    async def _order(self, cell: CellId, seen: Versioned[CellRoleRecord], desired: Role, reason: str) -> bool:
        site = self._site
        with site.tracing.span("decide", cell=cell, desired=desired.value, reason=reason) as span:
            order = replace(
                seen.record,
                desired=desired,
                epoch=seen.record.epoch + 1,
                token=self._token,
                traceparent=span.traceparent,
            )
            written = await self._write(self._roles, seen, order)
            if written:
                site.say(f"{cell}: {seen.record.observed.value} -> {desired.value} ({reason})")
            return written

    # ------------------------------------------------------------------------------------------ a person's orders

    @handles(SwitchCell)
    async def on_switch(self, message: SwitchCell) -> Ok:
        self._must_lead()
        cell, roles = message.cell, self._seen_roles()
        records = {name: seen.record for name, seen in roles.items()}
        water_level = sum(run.state in (RunState.QUEUED, RunState.LIVE) for run in self._runs.records)
        if why := refuse_switch(cell, message.role, records, self._pinned(), water_level):
            raise Refused(why)
        if not await self._order(cell, roles[cell], message.role, "ordered by gyrectl"):
            raise Refused(f"{cell} has just changed; look again, and order it again")
        self._switched[cell] = records[cell].epoch + 1
        return Ok()

    @handles(PinCell)
    async def on_pin(self, message: PinCell) -> Ok:
        self._must_lead()
        cell, role, pins = message.cell, message.role, self._pinned()
        key = self._site.keys.pin(cell)
        if role is None:
            if cell not in pins:
                raise Refused(f"{cell} is not pinned")
            outcome = await self._commit((), deletes=(Delete(key),))
            if outcome is Verdict.WRITTEN:
                self._pins.items.pop(key, None)
        else:
            records = {name: seen.record for name, seen in self._seen_roles().items()}
            if why := refuse_pin(cell, role, records, pins):
                raise Refused(why)
            outcome = await self._commit((put_record(key, PinRecord(cell, role)),))
            if outcome is Verdict.WRITTEN and (now := await self._site.store.get(key, PinRecord)) is not None:
                self._pins.put(now)
        if outcome is not Verdict.WRITTEN:
            raise Unavailable("another leads now; ask again")
        self._site.say(f"{cell}: {'unpinned' if role is None else f'pinned to {role.value}'}, by gyrectl")
        return Ok()

    @handles(DrainNode)
    async def on_drain(self, message: DrainNode) -> Ok:
        self._must_lead()
        node, key = message.node, self._site.keys.drain(message.node)
        if message.draining is (node in self._site.directory.draining):
            raise Refused(f"{node} is {'draining already' if message.draining else 'not draining'}")
        if message.draining:
            outcome = await self._commit((put_record(key, DrainRecord(node)),))
        else:
            outcome = await self._commit((), deletes=(Delete(key),))
        if outcome is not Verdict.WRITTEN:
            raise Unavailable("another leads now; ask again")
        self._site.say(f"{node}: {'draining' if message.draining else 'takes runs again'}, by gyrectl")
        return Ok()

    @handles(PauseJob)
    async def on_pause(self, message: PauseJob) -> Ok:
        self._must_lead()
        job = await self._site.store.get(self._site.keys.job, JobRecord)
        before, after = (JobState.RUNNING, JobState.PAUSED) if message.paused else (JobState.PAUSED, JobState.RUNNING)
        if job is None or job.record.state is not before:
            raise Refused(f"the job is {job.record.state.value if job else 'not begun'}, not {before.value}")
        await self._update_job(state=after)
        self._must_lead()
        self._site.say(f"the job is {after.value}, by gyrectl")
        self._wake()
        return Ok()

    @handles(EndJob)
    async def on_end_job(self, message: EndJob) -> Ok:
        self._must_lead()
        job = await self._site.store.get(self._site.keys.job, JobRecord)
        if job is None or job.record.state not in (JobState.RUNNING, JobState.PAUSED):
            raise Refused(f"the job is {job.record.state.value if job else 'not begun'}")
        await self._end_job(JobState.FAILED, message.reason)
        self._must_lead()
        return Ok()
