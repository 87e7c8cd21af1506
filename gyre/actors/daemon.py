"""What gyred runs: one node of a job, from the first actor to the last child; in a cluster, one job after the other.

A gyred that is told to end (StopJob, SIGTERM, the job's end) ends all of its children. SIGTERM of one among others is a
drain: others take its queued runs, those that live here have `node.drain_s` to come to their end, and what its engines
have of other nodes' runs goes on there with its KV; a second SIGTERM ends the waiting. One that dies leaves its children,
and the next one's actors adopt them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from gyre.actors.cell import CellActor
from gyre.actors.core import CoreActor
from gyre.actors.directory import Directory
from gyre.actors.gateway import GatewayActor
from gyre.actors.leaving import Told, end_when_told
from gyre.actors.membership import MembershipActor
from gyre.actors.node import NodeActor
from gyre.actors.node_config import NodeConfig
from gyre.actors.peers import Peers
from gyre.actors.remote import serve
from gyre.actors.run import end_left_runs
from gyre.actors.runtime import ActorSystem, Backoff, LocalRef
from gyre.actors.scheduler import SchedulerActor
from gyre.actors.site import Site
from gyre.actors.snapshot_service import SnapshotService
from gyre.actors.unfit import Unfit, leave_to_others
from gyre.actors.waiting import seen_waiting
from gyre.children import Children, boot_id, start_ticks
from gyre.config import JobSpec
from gyre.demo.builtin import model_dir
from gyre.errors import BadInput, NameTaken, Unavailable
from gyre.harness.confine import choose
from gyre.harness.launch import Launcher
from gyre.harness.profiles import Settings, profile
from gyre.harness.tasks import open_source
from gyre.ids import CellId
from gyre.jobdir import JobDir
from gyre.service import Service
from gyre.store.open import cluster_of, keys_for, open_store
from gyre.store.protocol import Compare, StoreLocked, Txn
from gyre.store.records import (
    CurrentJobRecord,
    JobRecord,
    JobState,
    SecretRecord,
    SnapshotRecord,
    current_key,
    secret_key,
)
from gyre.store.typed import TypedStore, put_record
from gyre.telemetry.tracing import Tracing

STOP_S = 2.0
"""For an actor to end what it is at; then it is cancelled, for it may wait for somebody who does not answer."""
STOP_ALL_S = 15.0
END_GRACE_S = 5.0
END_S = STOP_ALL_S + 2 * END_GRACE_S + 20.0
"""What the end takes at most once all is given away, and some room."""

log = logging.getLogger("gyred")


async def run_node(config: NodeConfig, service: Service) -> None:
    """Run the node until it is told to end; a lone one until its job has ended."""
    told = Told()
    life = asyncio.ensure_future(service.show_life())
    try:
        await _run_jobs(config, told, service)
    finally:
        life.cancel()


async def _run_jobs(config: NodeConfig, told: Told, service: Service) -> None:
    if config.membership is None:
        config.job.create()
        spec = JobSpec.from_json(config.job.job_file.read_text(encoding="utf-8"))
        await _run_job(config, config.job, spec, told, service)
        return
    config.job.root.mkdir(parents=True, exist_ok=True)
    cluster = cluster_of(config.store)
    assert cluster is not None
    with _alone(config.job.root):
        done = said = ""
        while not told.ended.is_set():
            current = await _next_job(config, cluster, done, told, service)
            if current is None:
                return
            job, spec = JobDir(config.job.root / "jobs" / current.name), JobSpec.from_json(current.spec)
            await _make_ready(config, job, current, cluster)
            try:
                await _run_job(config, job, spec, told, service)
                done = current.name
            except Unfit as unfit:
                if unfit.reason != said:
                    log.error("%s cannot work on %s: %s", config.name, current.name, unfit.reason)
                said = unfit.reason
                await _leave_to_others(config, cluster, spec, unfit, told, service)


async def _leave_to_others(
    config: NodeConfig, cluster: str, spec: JobSpec, unfit: Unfit, told: Told, service: Service
) -> None:
    store = TypedStore(open_store(config.store))
    assert config.membership is not None
    try:
        async with seen_waiting(config.name, config.membership, store, cluster):
            service.ready(f"cannot work on {spec.job.name}: {unfit.reason}")
            await leave_to_others(store, keys_for(config.store, spec.job.name), spec, unfit.reason, told)
    finally:
        await store.store.close()


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Hold the node's folder. Raises StoreLocked when another gyred does."""
    with (folder / "gyred.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreLocked(f"another gyred runs the node whose folder is {folder}") from None
        yield


async def _next_job(
    config: NodeConfig, cluster: str, done: str, told: Told, service: Service
) -> CurrentJobRecord | None:
    """The cluster's job, as soon as there is one that has not ended; None when gyred is told to end before."""
    store = TypedStore(open_store(config.store))
    key, membership = current_key(cluster), config.membership
    assert membership is not None

    async def wait() -> CurrentJobRecord:
        while True:
            listing = await store.range(key, CurrentJobRecord)
            for item in listing.items:
                found = await store.get(keys_for(config.store, item.record.name).job, JobRecord)
                over = found is not None and found.record.state in (JobState.FINISHED, JobState.FAILED)
                if item.record.name != done and not over:
                    return item.record
            await _clear_left(config)
            async with seen_waiting(config.name, membership, store, cluster):
                service.ready("waits for a job")
                await store.next_change(key, CurrentJobRecord, listing.revision + 1)

    waiting, ending = asyncio.ensure_future(wait()), asyncio.ensure_future(told.ended.wait())
    try:
        await asyncio.wait((waiting, ending), return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        for task in (waiting, ending):
            task.cancel()
        await asyncio.gather(waiting, ending, return_exceptions=True)
        await store.store.close()


async def _make_ready(config: NodeConfig, job: JobDir, current: CurrentJobRecord, cluster: str) -> None:
    """The job's folder on this node, with the secret that the cluster's processes share."""
    bound_bytes = config.membership.snapshot_memory_bytes if config.membership else 0
    if not job.job_file.exists() or not bound_bytes:
        job.clear_snapshots_in_memory()  # of a job whose folder was deleted, or of a bound that was there before
    await _clear_left(config, job)
    job.create()
    job.job_file.write_text(current.spec, encoding="utf-8")
    lines = (f"{key} = {json.dumps(value)}" for key, value in config.to_plain(job).items())
    job.node_file.write_text("\n".join(("[node]", *lines, "")), encoding="utf-8")
    store = TypedStore(open_store(config.store))
    try:
        key = secret_key(cluster)
        made = put_record(key, SecretRecord(secrets.token_hex(32)))
        await store.commit(Txn((Compare.created(key, 0),), (made,)))
        found = await store.get(key, SecretRecord)
        assert found is not None
        job.keep_secret(found.record.secret)
    finally:
        await store.store.close()


async def _clear_left(config: NodeConfig, but: JobDir | None = None) -> None:
    """What a gyred that was killed has left of jobs that the cluster works on no more: processes, and snapshots in memory."""
    for folder in (config.job.root / "jobs").glob("*"):
        if (job := JobDir(folder)) != but:
            await end_left_runs(job.runs)
            await Children(job.state).end_all(END_GRACE_S)
            await end_left_runs(job.runs)
            job.clear_snapshots_in_memory()


async def _run_job(config: NodeConfig, job: JobDir, spec: JobSpec, told: Told, service: Service) -> None:
    """Until the job has ended, or gyred is told to end. Raises NameTaken when another living gyred has the node's name,
    and Unfit when a cluster's node cannot work on this job."""
    store = open_store(config.store)
    tracing = Tracing("gyred", spec.telemetry.otlp_endpoint)
    own = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    job.gyred_file.write_text(json.dumps(own), encoding="utf-8")  # the store's lock is ours, so it is true
    try:
        try:
            site = await _site(config, job, spec, TypedStore(store), tracing)
        except BadInput as error:
            if config.membership is None:
                raise
            raise Unfit(error) from None
        ended = asyncio.Event()
        taken: list[NameTaken] = []

        def end_for(error: NameTaken) -> None:
            taken.append(error)
            site.stopping = True
            ended.set()

        drain_s = config.membership.drain_s if config.membership else 0.0
        signalled = asyncio.ensure_future(end_when_told(site, told, ended, service, drain_s, END_S))
        if not any(name.startswith("replica") and child.alive for name, child in site.children.adopt().items()):
            site.snapshots.folders.clear_unfinished()
        try:
            async with (
                asyncio.timeout(None) as limit,
                ActorSystem.running(config.name, stop_s=STOP_S) as system,
                AsyncExitStack() as stack,
            ):
                if site.peers is not None:
                    await stack.enter_async_context(site.peers)
                if await _people(site, system, ended, end_for):
                    async with serve(site.refs["node"], job.address("node"), site.secret):
                        service.ready(f"works on {spec.job.name}")
                        await ended.wait()
                limit.reschedule(asyncio.get_running_loop().time() + STOP_ALL_S)
                await stop_people(site)
        except TimeoutError:
            site.warn(f"not every actor has stopped within {STOP_ALL_S:g} s; the children are ended all the same")
        finally:
            signalled.cancel()
        await site.launcher.stop()
        await end_left_runs(job.runs)
        await site.children.end_all(END_GRACE_S)
        await end_left_runs(job.runs)  # those that were just being started
        job.clear_snapshots_in_memory()
        job.gyred_file.unlink(missing_ok=True)
    finally:
        tracing.close()
        await store.close()
    if taken:
        raise taken[0]


async def _site(config: NodeConfig, job: JobDir, spec: JobSpec, store: TypedStore, tracing: Tracing) -> Site:
    keys = keys_for(config.store, spec.job.name)
    children = Children(job.state)
    source = open_source(spec.tasks, spec.job.seed, config.base)
    sandbox = choose(spec.harness.confine)
    settings = Settings.of(spec, config.base)
    hidden = (job.root, job.sockets, *source.private_folders)
    before = await store.get(keys.job, JobRecord)
    membership = config.membership
    site = Site(
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
        cells=_cells(config, spec),
        directory=Directory(store, keys),
        home=_home(config.job.root),
    )
    if membership is not None:
        site.host, site.credentials = membership.host, membership.credentials
        site.snapshot_memory_bytes = membership.snapshot_memory_bytes

        def find(actor: str) -> LocalRef:
            ref = site.refs.get(actor)
            if ref is None:
                raise Unavailable(f"{actor!r} is not on {site.node} just now")
            return ref

        site.peers = Peers(config.name, membership.credentials, find, membership.address)
    return site


def _home(folder: Path) -> str:
    """Tells a gyred of this folder from every other that lives: its lock is ours, and a copy of it is another. After a
    start of the machine it is another too; whoever was there before is dead then."""
    status = folder.stat()
    return f"{boot_id()}/{status.st_dev}/{status.st_ino}"


def _cells(config: NodeConfig, spec: JobSpec) -> tuple[CellId, ...]:
    if config.membership is None:
        return tuple(CellId(f"c{index}") for index in range(spec.cells.count))
    return tuple(CellId(f"{config.name}-c{index}") for index in range(config.membership.cells))


async def _people(site: Site, system: ActorSystem, ended: asyncio.Event, on_taken: Callable[[NameTaken], None]) -> bool:
    """Spawn the node's actors; False: it was ended before it had joined. Membership comes first, for nobody acts under a
    name that is another's; then the scheduler: a leader makes the first snapshot, which the others start from."""
    restart = Backoff()

    def spawn_core(factory: Callable[[], CoreActor]) -> LocalRef:
        return system.spawn("core", factory, restart=restart)

    site.refs["member"] = system.spawn("member", lambda: MembershipActor(site, spawn_core, on_taken), restart=restart)
    if not await joined(site, ended):
        return False
    site.refs["snapshots"] = system.spawn("snapshots", lambda: SnapshotService(site.snapshots), restart=restart)
    site.refs["scheduler"] = system.spawn("scheduler", lambda: SchedulerActor(site), restart=restart)
    await first_snapshot(site)
    site.refs["gateway"] = system.spawn("gateway", lambda: GatewayActor(site), restart=restart)
    for cell in site.cells:
        site.refs[f"cell-{cell}"] = system.spawn(
            f"cell-{cell}", lambda cell=cell: CellActor(site, cell), restart=restart
        )
    site.refs["node"] = system.spawn("node", lambda: NodeActor(site, ended), restart=restart)
    return True


async def joined(site: Site, ended: asyncio.Event) -> bool:
    """Whether the node has joined; False when it was ended before."""
    waits = [asyncio.ensure_future(event.wait()) for event in (site.joined, ended)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return site.joined.is_set()


async def first_snapshot(site: Site) -> None:
    """Until there is one."""
    while not (listing := await site.store.range(site.keys.snapshot, SnapshotRecord)).items:
        await site.store.next_change(site.keys.snapshot, SnapshotRecord, listing.revision + 1)


async def stop_people(site: Site) -> None:
    """In the order in which nobody waits for one that has gone."""
    cells = [f"cell-{cell}" for cell in site.cells]
    for names in (("node",), cells, ("core", "scheduler"), ("gateway",), ("snapshots", "member")):
        await asyncio.gather(*(site.refs[name].stop(STOP_S) for name in names if name in site.refs))
