"""The node: what gyred runs. It builds the node's actors, starts the runs that are queued for it, and answers gyrectl.

A gyred that is told to end (StopJob, SIGTERM, the job's end) ends all of its children. One that dies leaves them, and the
next one's actors adopt them.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import tomllib
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gyre import __version__
from gyre.actors.cell import CellActor
from gyre.actors.core import CoreActor
from gyre.actors.gateway import GatewayActor
from gyre.actors.messages import (
    EndNode,
    GatewayStatus,
    GetCellStatus,
    GetGatewayStatus,
    GetProgress,
    Ok,
    Ping,
    Progress,
    RunEnded,
    RunFailed,
)
from gyre.actors.messages_gyrectl import (
    CancelRun,
    CellStatus,
    GetStatus,
    GetTrace,
    GetVersion,
    PauseJob,
    PinCell,
    ResignLeader,
    Status,
    StopJob,
    SwitchCell,
    Trace,
    Version,
)
from gyre.actors.mirror import Mirror
from gyre.actors.remote import serve
from gyre.actors.run import RunActor, end_left_runs
from gyre.actors.runtime import Actor, ActorSystem, Backoff, LocalRef, handles
from gyre.actors.scheduler import SchedulerActor
from gyre.actors.site import Site
from gyre.children import Children, start_ticks
from gyre.config import JobSpec
from gyre.demo.builtin import model_dir
from gyre.errors import BadInput, GyreError, Refused
from gyre.harness.confine import choose
from gyre.harness.launch import Launcher
from gyre.harness.profiles import Settings, profile
from gyre.harness.tasks import open_source
from gyre.ids import NodeId, RunId
from gyre.jobdir import JobDir
from gyre.store.open import open_store
from gyre.store.records import (
    GroupRecord,
    GroupState,
    JobRecord,
    JobState,
    Keys,
    Purpose,
    Role,
    RunRecord,
    RunState,
    SnapshotRecord,
    StepRecord,
    SwitchRecord,
)
from gyre.store.typed import TypedStore
from gyre.telemetry.tracing import Tracing
from gyre.train.whole_folder import clear_unfinished

GATEWAY_EVERY_S = 0.5
STOP_S = 2.0
"""For an actor to end what it is at; then it is cancelled, for it may wait for somebody who does not answer."""
STOP_ALL_S = 15.0
END_GRACE_S = 5.0
ORDER_S = 8.0
"""For the scheduler to answer a person's order; gyrectl waits a little longer."""


class _NodeSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    dir: Path
    base: Path
    store: str


class _NodeFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    node: _NodeSection


@dataclass(frozen=True)
class NodeConfig:
    """What gyred is told in its file: who it is, where the job's folder is, which store."""

    name: NodeId
    job: JobDir
    base: Path
    store: str

    @staticmethod
    def load(path: Path) -> NodeConfig:
        """Raises BadInput, naming the key, for a file that cannot be used."""
        try:
            section = _NodeFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).node
        except OSError as error:
            raise BadInput("--config", str(path), f"it must be a file that can be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput("--config", str(path), f"it must be TOML ({error})") from error
        except ValidationError as error:
            first = error.errors()[0]
            raise BadInput(".".join(map(str, first["loc"])), first["input"], first["msg"]) from error
        return NodeConfig(NodeId(section.name), JobDir(section.dir), section.base, section.store)


async def run_node(config: NodeConfig) -> None:
    """Run the node until its job has ended or it is told to end."""
    job = config.job
    job.create()
    spec = JobSpec.from_json(job.job_file.read_text(encoding="utf-8"))
    store = open_store(config.store)
    tracing = Tracing("gyred", spec.telemetry.otlp_endpoint)
    own = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    job.gyred_file.write_text(json.dumps(own), encoding="utf-8")  # the store's lock is ours, so it is true
    try:
        site = await _site(config, spec, TypedStore(store), tracing)
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, _end_by_signal, site, ended)
        if not any(name.startswith("replica") and child.alive for name, child in site.children.adopt().items()):
            clear_unfinished(job.snapshots)
        try:
            async with asyncio.timeout(None) as limit, ActorSystem.running(config.name, stop_s=STOP_S) as system:
                await _people(site, system, ended)
                async with serve(site.refs["node"], job.address("node"), site.secret):
                    await ended.wait()
                limit.reschedule(asyncio.get_running_loop().time() + STOP_ALL_S)
                for names in (("node",), [f"cell-{cell}" for cell in site.cells], ("core", "scheduler"), ("gateway",)):
                    await asyncio.gather(*(site.refs[name].stop(STOP_S) for name in names))
        except TimeoutError:
            site.say(f"not every actor has stopped within {STOP_ALL_S:g} s; the children are ended all the same")
        await site.launcher.stop()
        await end_left_runs(job.runs)
        await site.children.end_all(END_GRACE_S)
        await end_left_runs(job.runs)  # those that were just being started
        job.gyred_file.unlink(missing_ok=True)
    finally:
        tracing.close()
        await store.close()


def _end_by_signal(site: Site, ended: asyncio.Event) -> None:
    if not site.stopping:
        site.say("ending: gyred was sent a signal to end")
    site.stopping = True
    ended.set()


async def _site(config: NodeConfig, spec: JobSpec, store: TypedStore, tracing: Tracing) -> Site:
    job, keys = config.job, Keys(spec.job.name)
    children = Children(job.state)
    source = open_source(spec.tasks, spec.job.seed, config.base)
    sandbox = choose(spec.harness.confine)
    settings = Settings.of(spec, config.base)
    hidden = (job.root, job.sockets, *source.private_folders)
    before = await store.get(keys.job, JobRecord)
    return Site(
        node=config.name,
        spec=spec,
        job=job,
        base=config.base,
        model_dir=model_dir(spec.model.path, config.base),
        keys=keys,
        store=store,
        children=children,
        tracing=tracing,
        secret=job.secret(),
        source=source,
        sandbox=sandbox,
        hidden=hidden,
        launcher=Launcher(children, job.state, profile(spec.harness.profile), settings, sandbox, hidden),
        active_before_s=before.record.active_s if before else 0.0,
    )


async def _people(site: Site, system: ActorSystem, ended: asyncio.Event) -> None:
    """Spawn the node's actors. The scheduler comes first: it makes the first snapshot, which the others start from."""
    restart = Backoff()
    site.refs["scheduler"] = system.spawn("scheduler", lambda: SchedulerActor(site), restart=restart)
    await _first_snapshot(site)
    site.refs["gateway"] = system.spawn("gateway", lambda: GatewayActor(site), restart=restart)
    site.refs["core"] = system.spawn("core", lambda: CoreActor(site), restart=restart)
    for cell in site.cells:
        site.refs[f"cell-{cell}"] = system.spawn(
            f"cell-{cell}", lambda cell=cell: CellActor(site, cell), restart=restart
        )
    site.refs["node"] = system.spawn("node", lambda: NodeActor(site, ended), restart=restart)


async def _first_snapshot(site: Site) -> None:
    listing = await site.store.range(site.keys.snapshot, SnapshotRecord)
    if not listing.items:
        async with aclosing(site.store.watch(site.keys.snapshot, SnapshotRecord, listing.revision + 1)) as changes:
            async for change in changes:
                if change.now is not None:
                    return


class NodeActor(Actor):
    """Starts queued runs, ends the node with its job, and answers gyrectl."""

    def __init__(self, site: Site, ended: asyncio.Event) -> None:
        self._site = site
        self._ended = ended
        self._live: dict[RunId, LocalRef] = {}
        root = site.keys.root
        self._runs = Mirror(site.store, f"{root}runs/", RunRecord)
        self._groups = Mirror(site.store, f"{root}groups/", GroupRecord)
        self._steps = Mirror(site.store, f"{root}steps/", StepRecord)
        self._switches = Mirror(site.store, f"{root}switches/", SwitchRecord)
        self._job = Mirror(site.store, site.keys.job, JobRecord)
        self._reason = ""
        self._progress = Progress(1, 0, 0, 0, 0, 0, step_due=False, train_tokens_s=0.0)

    async def pre_start(self) -> None:
        for mirror in (self._groups, self._steps, self._switches):
            self.task(mirror.follow(lambda: None))
        self.task(self._runs.follow(self._start_runs))
        self.task(self._make_ready())
        self.task(self._job.follow(self._check_job))
        self.task(self._poll_gateway())

    async def _make_ready(self) -> None:
        """Until the node can serve a run: a run's limit is for the run, not for our start."""
        try:
            await self._site.launcher.warm()
        except GyreError as error:  # it is tried again, and refused, with each run's start
            self._site.say(f"the harness could not be made ready: {error}")
        await self._site.serving.wait()
        self._site.ready.set()
        self._start_runs()

    # ------------------------------------------------------------------------------------------ runs

    def _start_runs(self) -> None:
        """Go on with what was live; start what is queued for this node, in launch order, while there is room."""
        for run in [run for run in self._runs.records if run.state is RunState.SETTLED]:
            self._runs.drop(self._site.keys.run(run.run))
        if self._site.stopping:
            return
        mine = sorted(
            (run for run in self._runs.records if run.node == self._site.node),
            key=lambda run: (run.state is RunState.QUEUED, self._age(run)),
        )
        job = self._job_record()
        launching = self._site.ready.is_set() and job is not None and job.state is not JobState.PAUSED
        for run in mine:
            if run.run in self._live or (run.state is RunState.QUEUED and not launching):
                continue
            if len(self._live) >= self._site.spec.harness.max_live:
                return
            self._live[run.run] = self.spawn(f"run-{run.run}", lambda run=run: RunActor(self._site, run.run))

    def _age(self, run: RunRecord) -> tuple[int, str]:
        found = self._runs.items.get(self._site.keys.run(run.run))
        return (found.create_revision if found else 0, run.run)

    @handles(RunEnded)
    async def on_run_ended(self, message: RunEnded) -> None:
        self._live.pop(message.run, None)
        self._runs.drop(self._site.keys.run(message.run))  # it has settled, though our mirror may not know it yet
        self._start_runs()

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

    # ------------------------------------------------------------------------------------------ the end

    def _check_job(self) -> None:
        job = self._job_record()
        if job is not None and job.state in (JobState.FINISHED, JobState.FAILED):
            self.ref.tell(EndNode(f"the job has {job.state.value}"))
        self._start_runs()

    def _job_record(self) -> JobRecord | None:
        found = self._job.items.get(self._site.keys.job)
        return found.record if found else None

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

    @handles(ResignLeader, concurrent=True)
    async def resign(self, message: ResignLeader) -> Ok:
        return await self._site.scheduler.ask(message, ORDER_S, Ok)

    @handles(PauseJob, concurrent=True)
    async def pause(self, message: PauseJob) -> Ok:
        return await self._site.scheduler.ask(message, ORDER_S, Ok)

    @handles(CancelRun)
    async def cancel(self, message: CancelRun) -> Ok:
        run, known = message.run, self._runs.items.get(self._site.keys.run(message.run))
        if (live := self._live.get(run)) is not None:
            live.tell(message)
        elif known is not None and known.record.state is RunState.QUEUED and known.record.node == self._site.node:
            self._live[run] = self.spawn(f"run-{run}", lambda: RunActor(self._site, run, cancelled=True))
        else:
            raise Refused(f"{run} is not queued or live on this node")
        self._site.say(f"{run}: cancelled by gyrectl")
        return Ok()

    @handles(GetVersion)
    async def version(self, _: GetVersion) -> Version:
        return Version(__version__, platform.python_version(), self._site.outside.unix_s())

    @handles(Ping)
    async def ping(self, _: Ping) -> Ok:
        return Ok()

    @handles(GetTrace)
    async def trace(self, message: GetTrace) -> Trace:
        switches = sorted((item for item in self._switches.records), key=lambda switch: switch.started_unix_s)
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
        site, job, gateway = self._site, self._job_record(), self._site.gateway_status
        cells = await asyncio.gather(*(self._cell_status(cell_ref) for cell_ref in map(site.cell, site.cells)))
        with suppress(GyreError):  # else as last heard
            self._progress = await site.core.ask(GetProgress(), 2.0, Progress)
        progress = self._progress
        steps = sorted(self._steps.records, key=lambda step: step.step)
        runs = self._runs.records
        heldout = [
            g for g in self._groups.records if g.purpose is (Purpose.HELDOUT_AFTER if steps else Purpose.HELDOUT_BEFORE)
        ]
        children = site.children.adopt()
        return Status(
            job=site.spec.job.name,
            state=job.state.value if job else "starting",
            phase=self._phase(job, len(steps), bool(heldout)),
            reason=self._reason or (job.reason if job else ""),
            step=len(steps),
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
            rollout_to_train=sum(s.end is Role.TRAIN and s.start is Role.ROLLOUT for s in self._switches.records),
            train_to_rollout=sum(s.end is Role.ROLLOUT and s.start is Role.TRAIN for s in self._switches.records),
            calls=gateway.calls if gateway else 0,
            sampled_tokens=gateway.sampled_tokens if gateway else 0,
            max_silence_s=gateway.max_silence_s if gateway else 0.0,
            pids={name: child.pid for name, child in children.items() if child.alive},
            base_url=gateway.base_url if gateway else "",
            active_s=site.active_s(),
            events=tuple(site.events)[-20:],
        )

    async def _cell_status(self, cell: LocalRef) -> CellStatus | None:
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
