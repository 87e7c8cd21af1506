"""The node actor: it starts the runs that are given to its node, ends the node with its job, and answers gyrectl."""

from __future__ import annotations

import asyncio
import platform
from contextlib import suppress
from dataclasses import replace

from gyre import __version__
from gyre.actors.all_gateways import AllGateways
from gyre.actors.journal_copies import JournalCopies
from gyre.actors.messages import (
    AwaitEmpty,
    CloseRun,
    ClusterChanged,
    EndNode,
    GatewayStatus,
    GetCellStatus,
    GetGatewayStatus,
    Leave,
    Ok,
    Ping,
    RunEnded,
    RunFailed,
    RunMoved,
)
from gyre.actors.messages_core import GetProgress, Progress
from gyre.actors.messages_gyrectl import (
    CancelRun,
    CellStatus,
    DrainNode,
    EndJob,
    GetStatus,
    GetTrace,
    GetVersion,
    PauseJob,
    PinCell,
    ResignLeader,
    RestartRun,
    Status,
    StopJob,
    SwitchCell,
    Trace,
    Version,
)
from gyre.actors.messages_journals import Copies, GetCopies, Taken, TakeOver
from gyre.actors.messages_snapshots import HoldSnapshot
from gyre.actors.mirror import Mirror
from gyre.actors.run import RunActor, end_left_run
from gyre.actors.runtime import Actor, LocalRef, Ref, handles
from gyre.actors.shown import Shown
from gyre.actors.site import Site
from gyre.actors.supervision import Died
from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.harness.workspace import RunFolder
from gyre.ids import RunId
from gyre.sched.placement import NOWHERE
from gyre.store.protocol import Compare, Txn
from gyre.store.records import (
    GroupRecord,
    GroupState,
    JobRecord,
    JobState,
    Purpose,
    Role,
    RunRecord,
    RunState,
    SwitchRecord,
)
from gyre.store.typed import Versioned, put_record
from gyre.trajectory.records import RunTrace

GATEWAY_EVERY_S = 0.5
ORDER_S = 8.0
"""For the scheduler to answer a person's order; gyrectl waits a little longer."""
CLOSE_S = 300.0
COPIES_S = 3.0
"""For a gateway, of another node too, to tell of its copies; gyrectl waits a little longer."""


class NodeActor(Actor):
    """Starts queued runs, ends the node with its job, and answers gyrectl."""

    def __init__(self, site: Site, ended: asyncio.Event) -> None:
        self._site = site
        self._ended = ended
        self._live: dict[RunId, LocalRef] = {}
        self._runs = Mirror(site.store, f"{site.keys.root}runs/", RunRecord)
        self._groups = Mirror(site.store, f"{site.keys.root}groups/", GroupRecord)
        self._copies = JournalCopies(site, self._runs, self._groups)
        self._job = Mirror(site.store, site.keys.job, JobRecord)
        self._none_waits = asyncio.Event()
        """No run is queued for this node, as far as we have heard."""
        self._none_lives = asyncio.Event()
        self._none_lives.set()
        self._gateways = AllGateways(site)
        self._shown = Shown(site.store, site.keys)
        self._reason = ""
        self._progress = Progress(1, 0, 0, 0, 0, 0, step_due=False, train_tokens_s=0.0)

    async def pre_start(self) -> None:
        self.task(self._shown.follow())
        self.task(self._groups.follow(self._copies.look))
        self.task(self._copies.follow())
        self.task(self._runs.follow(self._look_at_runs))
        self.task(self._end_stale())
        self.task(self._make_ready())
        self.task(self._job.follow(self._check_job))
        self.task(self._poll_gateway())

    async def _make_ready(self) -> None:
        """Until the node can serve a run: a run's limit is for the run, not for our start."""
        try:
            await self._site.launcher.warm()
        except GyreError as error:  # it is tried again, and refused, with each run's start
            self._site.warn(f"the harness could not be made ready: {error}")
        await self._site.serving.wait()
        self._site.ready.set()
        self._start_runs()

    # ------------------------------------------------------------------------------------------ runs

    def _look_at_runs(self) -> None:
        """What has settled is over, what was given to another node is ended here, and there may be more to start."""
        for item in list(self._runs.items.values()):
            self._copies.saw(item.record)
            if item.record.state is RunState.SETTLED:
                self._runs.drop(item.key, item.mod_revision)
            elif item.record.node != self._site.node and (live := self._live.get(item.record.run)) is not None:
                live.tell(RunMoved())
        self._copies.look()
        if any(run.node == self._site.node and run.state is RunState.QUEUED for run in self._runs.records):
            self._none_waits.clear()
        else:
            self._none_waits.set()
        self._start_runs()

    def _start_runs(self) -> None:
        """Go on with what was live; start what is queued for this node, in launch order, while there is room."""
        if self._site.stopping:
            return
        mine = sorted(
            (run for run in self._runs.records if run.node == self._site.node),
            key=lambda run: (run.state is RunState.QUEUED, self._age(run)),
        )
        job = self._job_record()
        launching = (
            self._site.ready.is_set()
            and not self._site.leaving
            and not self._site.trouble
            and job is not None
            and job.state is not JobState.PAUSED
        )
        for run in mine:
            if run.run in self._live or (run.state is RunState.QUEUED and not launching):
                continue
            if len(self._live) >= self._site.spec.harness.max_live:
                return
            self._begin_run(run.run)

    @handles(ClusterChanged)
    async def changed(self, _: ClusterChanged) -> None:
        """Runs can begin here again."""
        self._start_runs()

    def _begin_run(self, run: RunId, *, cancelled: bool = False) -> None:
        actor = self._live[run] = self.spawn(f"run-{run}", lambda: RunActor(self._site, run, cancelled=cancelled))
        self._none_lives.clear()
        self.watch(actor)

    async def _end_stale(self) -> None:
        """What an earlier gyred left alive, and was given to another node since."""
        site = self._site
        for path in site.job.runs.glob("*/*/ticket.json"):
            run, attempt = RunId(path.parent.parent.name), int(path.parent.name)
            found = await site.store.get(site.keys.run(run), RunRecord)
            if found is None or found.record.node == site.node:
                continue
            site.say(f"{run}: {found.record.node or 'another node'} has it; attempt {attempt}, left here, is ended")
            await end_left_run(RunFolder.of(site.job.runs, run, attempt))
            with suppress(GyreError):
                await site.gateway.ask(CloseRun(run, attempt), CLOSE_S, RunTrace)

    def _age(self, run: RunRecord) -> tuple[int, str]:
        found = self._runs.items.get(self._site.keys.run(run.run))
        return (found.create_revision if found else 0, run.run)

    @handles(RunEnded)
    async def on_run_ended(self, message: RunEnded) -> None:
        """Our mirror may not know of it yet: its place is free at once, and its end is looked at when it comes."""
        self._runs.drop(self._site.keys.run(message.run), message.revision - 1)

    @handles(Died)
    async def on_run_gone(self, message: Died) -> None:
        """Only now: the run may have been given to this node again, and one actor has a name at a time."""
        for run in [run for run, actor in self._live.items() if actor.name == message.name]:
            del self._live[run]
        self._start_runs()
        if not self._live:
            self._none_lives.set()

    @handles(GetGatewayStatus)
    async def gateway_status(self, _: GetGatewayStatus) -> GatewayStatus:
        if self._site.gateway_status is None:
            raise Unavailable(f"the gateway of {self._site.node} has not answered yet")
        return self._site.gateway_status

    async def _poll_gateway(self) -> None:
        while True:
            try:
                status = await self._site.gateway.ask(GetGatewayStatus(), 10.0, GatewayStatus)
            except GyreError:
                status = None
            if status is not None:
                self._site.gateway_status = status
                for run, reason in status.failed_runs.items():
                    if (live := self._live.get(RunId(run))) is not None:
                        live.tell(RunFailed(reason))
            await asyncio.sleep(GATEWAY_EVERY_S)

    @handles(HoldSnapshot, concurrent=True)
    async def hold_snapshot(self, message: HoldSnapshot) -> Ok:
        await self._site.held.have(message.version, message.digest, message.node)
        return Ok()

    # ------------------------------------------------------------------------------------------ copies of journals

    @handles(TakeOver, concurrent=True)
    async def take_over(self, message: TakeOver) -> Taken:
        return await self._site.gateway.ask(message, ORDER_S, Taken)

    @handles(GetCopies, concurrent=True)
    async def copies(self, message: GetCopies) -> Copies:
        site = self._site
        if message.node != site.node:
            return await site.on(message.node, "node").ask(message, COPIES_S, Copies)
        return await site.gateway.ask(message, COPIES_S, Copies)

    # ------------------------------------------------------------------------------------------ the end

    def _check_job(self) -> None:
        job = self._job_record()
        if job is not None and job.state in (JobState.FINISHED, JobState.FAILED):
            self.ref.tell(EndNode(f"the job has {job.state.value}"))
        self._start_runs()

    def _job_record(self) -> JobRecord | None:
        found = self._job.items.get(self._site.keys.job)
        return found.record if found else None

    @handles(Leave, concurrent=True)
    async def leave(self, _: Leave) -> Ok:
        self._site.leaving = True
        await self._none_waits.wait()
        return Ok()

    @handles(AwaitEmpty, concurrent=True)
    async def await_empty(self, _: AwaitEmpty) -> Ok:
        await self._none_lives.wait()
        return Ok()

    @handles(StopJob, control=True)
    async def on_stop(self, message: StopJob) -> Ok:
        self.ref.tell(EndNode(message.reason))
        return Ok()

    @handles(EndNode, control=True)
    async def on_end(self, message: EndNode) -> None:
        if not self._site.stopping:
            self._site.say(f"ending: {message.reason}")
            self._site.stopping = True
            self._reason = message.reason
            self._ended.set()

    # ------------------------------------------------------------------------------------------ gyrectl

    @handles(SwitchCell, concurrent=True)
    async def switch(self, message: SwitchCell) -> Ok:
        return await self._site.scheduler.ask(message, ORDER_S, Ok)

    @handles(PinCell, concurrent=True)
    async def pin(self, message: PinCell) -> Ok:
        return await self._site.scheduler.ask(message, ORDER_S, Ok)

    @handles(DrainNode, concurrent=True)
    async def drain(self, message: DrainNode) -> Ok:
        return await self._site.scheduler.ask(message, ORDER_S, Ok)

    @handles(ResignLeader, concurrent=True)
    async def resign(self, message: ResignLeader) -> Ok:
        return await self._site.scheduler.ask(message, ORDER_S, Ok)

    @handles(PauseJob, concurrent=True)
    async def pause(self, message: PauseJob) -> Ok:
        return await self._site.scheduler.ask(message, ORDER_S, Ok)

    @handles(EndJob, concurrent=True)
    async def end_job(self, message: EndJob) -> Ok:
        return await self._site.scheduler.ask(message, ORDER_S, Ok)

    @handles(CancelRun, concurrent=True)
    async def cancel(self, message: CancelRun) -> Ok:
        site, run = self._site, message.run
        known = self._runs.items.get(site.keys.run(run))
        if (live := self._live.get(run)) is not None:
            live.tell(message)
        elif known is None:
            raise Refused(f"{run} is neither queued nor live")
        elif known.record.node not in (NOWHERE, site.node):
            return await site.on(known.record.node, "node").ask(message, ORDER_S, Ok)
        else:
            await self._take(known)
            self._begin_run(run, cancelled=True)
        site.say(f"{run}: cancelled by {message.by}")
        return Ok()

    @handles(RestartRun, concurrent=True)
    async def restart(self, message: RestartRun) -> Ok:
        """Given back, its record tells the run's actor to end what it has, and the leader to place it anew."""
        site, run = self._site, message.run
        known = self._runs.items.get(site.keys.run(run))
        if known is None or known.record.state is not RunState.LIVE:
            raise Refused(f"{run} is not live")
        if known.record.node != site.node:
            return await site.on(known.record.node, "node").ask(message, ORDER_S, Ok)
        again = replace(known.record, state=RunState.QUEUED, attempt=known.record.attempt + 1, node=NOWHERE)
        result = await site.store.commit(
            Txn((Compare.modified(known.key, known.mod_revision),), (put_record(known.key, again),))
        )
        if not result.succeeded:
            raise Refused(f"{run} has just changed; look again, and restart it again")
        site.say(f"{run}: begins again as attempt {again.attempt}, by {message.by}")
        return Ok()

    async def _take(self, known: Versioned[RunRecord]) -> None:
        """Make a run that waits without a node ours."""
        if known.record.node == NOWHERE:
            put = put_record(known.key, replace(known.record, node=self._site.node))
            result = await self._site.store.commit(Txn((Compare.modified(known.key, known.mod_revision),), (put,)))
            if not result.succeeded:
                raise Refused(f"{known.record.run} has just changed; look again, and cancel it again")

    @handles(GetVersion)
    async def version(self, _: GetVersion) -> Version:
        return Version(__version__, platform.python_version(), self._site.outside.unix_s())

    @handles(Ping)
    async def ping(self, _: Ping) -> Ok:
        return Ok()

    @handles(GetTrace, concurrent=True)
    async def trace(self, message: GetTrace) -> Trace:
        await self._shown.look()
        switches = sorted((item for item in self._shown.switches.records), key=lambda switch: switch.started_unix_s)
        if not message.switch and not switches:
            raise BadInput("switch", "", "no cell has switched yet")
        by_id = {switch.switch: switch.trace_id for switch in switches}
        wanted = by_id.get(switches[-1].switch if not message.switch else message.switch, message.switch)  # type: ignore[arg-type]
        spans = self._site.tracing.spans(wanted)
        if not spans:
            raise BadInput("switch", message.switch, "a switch or trace whose spans this node still has")
        return Trace(spans)

    @handles(GetStatus, concurrent=True)
    async def status(self, _: GetStatus) -> Status:
        site, job = self._site, self._job_record()
        store_answers = await self._shown.look()
        cells = await asyncio.gather(*(self._cell_status(site.cell(spec.cell)) for spec in site.directory.cells))
        gateway = await self._gateways.look()
        with suppress(GyreError):  # else as last heard
            self._progress = await site.core.ask(GetProgress(), 2.0, Progress)
        progress = self._progress
        steps = sorted(self._shown.steps.records, key=lambda step: step.step)
        known, snapshot = self._shown.listed, site.directory.snapshot
        step = len(steps) if known or snapshot is None else snapshot.record.version
        runs = self._runs.records
        heldout = [
            g
            for g in self._shown.groups.records
            if g.purpose is (Purpose.HELDOUT_AFTER if step else Purpose.HELDOUT_BEFORE)
        ]
        switches = self._shown.switches.records
        children = site.children.adopt()
        return Status(
            job=site.spec.job.name,
            state=job.state.value if job else "starting",
            phase=self._phase(job, step, bool(heldout)),
            reason=self._reason or (job.reason if job else ""),
            step=step,
            steps=site.spec.job.steps,
            version=progress.step - 1,
            mean_reward=steps[-1].mean_reward if steps else None,
            rewards=tuple(step.mean_reward for step in steps),
            heldout_before=job.heldout_before if job else None,
            heldout_after=job.heldout_after if job else None,
            heldout_done=sum(group.state is not GroupState.OPEN for group in heldout),
            heldout_total=site.spec.tasks.heldout,
            queued=sum(run.state is RunState.QUEUED for run in runs),
            live=sum(run.state is RunState.LIVE for run in runs),
            settled=len(self._runs.dropped),
            groups_ready=progress.planned_groups,
            micro_steps_done=progress.merged_micro_steps,
            micro_steps=progress.micro_steps,
            cells=tuple(cell for cell in cells if cell is not None),
            rollout_to_train=_switches(switches, Role.ROLLOUT, Role.TRAIN) if known else None,
            train_to_rollout=_switches(switches, Role.TRAIN, Role.ROLLOUT) if known else None,
            calls=gateway.calls if gateway else 0,
            sampled_tokens=gateway.sampled_tokens if gateway else 0,
            max_silence_s=gateway.max_silence_s if gateway else 0.0,
            pids={name: child.pid for name, child in children.items() if child.alive},
            base_url=gateway.base_url if gateway else "",
            active_s=site.active_s(),
            events=tuple(site.events)[-20:],
            store_answers=store_answers,
        )

    async def _cell_status(self, cell: Ref) -> CellStatus | None:
        try:
            return await cell.ask(GetCellStatus(), 2.0, CellStatus)
        except GyreError:
            return None

    def _phase(self, job: JobRecord | None, steps: int, measuring: bool) -> str:
        if self._site.stopping:
            return "stopping"
        if job is None or self._site.gateway_status is None:
            return "starting"
        if job.state is not JobState.RUNNING:
            return job.state.value
        if steps >= self._site.spec.job.steps:
            return "held-out after"
        if measuring and not steps and job.heldout_before is None:
            return "held-out before"
        return "training"


def _switches(switches: list[SwitchRecord], start: Role, end: Role) -> int:
    return sum(switch.start is start and switch.end is end for switch in switches)
