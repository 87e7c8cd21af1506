"""gyrectl's side of a job: where it is found, how its nodes are asked, how its records are read.

A job is found by its folder, on the machine of one of its nodes: gyred is asked over its socket there. Or by its
cluster's file (gyre.cli.cluster_file), from any machine. What is said over the connection is the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import tomllib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from gyre.actors.messages import Ok, Place
from gyre.actors.messages_gyrectl import (
    GetStatus,
    GetTrace,
    GetVersion,
    SpanRecord,
    Status,
    StopJob,
    Trace,
    Version,
)
from gyre.actors.messages_journals import Copies, GetCopies
from gyre.actors.remote import RemoteRef, connect
from gyre.children import ProcessRef
from gyre.cli.cluster_file import ClusterFile
from gyre.cli.cluster_job import ClusterJob
from gyre.cli.report import Books, Report, read_books, summarise
from gyre.config import JobSpec
from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.ids import NodeId
from gyre.jobdir import JobDir
from gyre.store.open import cluster_of, keys_for, open_store
from gyre.store.records import JobRecord, JobState, Keys, WaitingRecord, waiting_prefix
from gyre.store.typed import TypedStore

T = TypeVar("T")

Job = JobDir | ClusterJob

ASK_S = 5.0
ORDER_S = 10.0
"""For an order that the leader carries out before it answers."""
CLUSTER = "GYRE_CLUSTER"
"""The variable that names the cluster's file where no option does."""


def find_job(folder: Path | None, cluster: Path | None = None) -> Job:
    """The job in `folder`, or that of the cluster in the file `cluster` or $GYRE_CLUSTER, or the newest one under `runs/`.

    Raises BadInput when there is none.
    """
    if folder is not None and cluster is not None:
        raise BadInput("--cluster", str(cluster), "either a job's folder (--dir) or a cluster is named")
    if folder is None and cluster is None and (named := os.environ.get(CLUSTER)):
        cluster = Path(named)
    if cluster is not None:
        return ClusterJob(ClusterFile.load(cluster))
    if folder is None:
        found = sorted(Path("runs").glob("*/job.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise BadInput("--dir", "runs/", f"no job was found there; name the job's folder, or a cluster ({CLUSTER})")
        folder = found[-1].parent
    job = JobDir(folder.resolve())
    if not job.job_file.is_file():
        raise BadInput("--dir", str(folder), "it must be a job's folder (one that holds job.json)")
    return job


def find_folder(folder: Path | None, cluster: Path | None) -> JobDir:
    """The job in its folder, for who reads its journals. Raises Refused for a cluster's file."""
    job = find_job(folder, cluster)
    if isinstance(job, ClusterJob):
        raise Refused(
            f"journals are read where they lie, on a node of {job.file.cluster}: name the job's folder there (--dir)"
        )
    return job


def called(job: Job) -> str:
    """The job, in a line for people."""
    return f"the job of the cluster {job.file.cluster}" if isinstance(job, ClusterJob) else f"the job in {job.root}"


def read_spec(job: JobDir) -> JobSpec:
    """The job as it was begun. Raises BadInput when its file is not what `gyrectl up` wrote."""
    try:
        return JobSpec.from_json(job.job_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise BadInput("job.json", str(job.job_file), f"it must be a job as gyrectl up wrote it ({first})") from error


async def spec_of(job: Job) -> JobSpec:
    """As `read_spec`, wherever the job is found."""
    if isinstance(job, JobDir):
        return read_spec(job)
    store = TypedStore(open_store(store_url(job), read_only=True), away_s=0.0)
    try:
        return JobSpec.from_json((await job.current(store)).spec)
    finally:
        await store.store.close()


async def status(job: Job) -> Status:
    """The running job's status. Raises Unavailable when its gyred does not answer."""
    async with asking(job) as node:
        return await node.ask(GetStatus(), ASK_S, Status)


async def stop(job: JobDir, reason: str) -> None:
    async with asking(job) as node:
        await node.ask(StopJob(reason), ASK_S, Ok)


async def trace(job: Job, switch: str) -> tuple[SpanRecord, ...]:
    """The spans of a switch; of a cluster's, from every node that has some. Raises BadInput where nobody has."""
    if isinstance(job, JobDir):
        async with asking(job) as node:
            return (await node.ask(GetTrace(switch), ASK_S, Trace)).spans
    async with reading(job) as (store, keys):
        nodes = await job.nodes(store, keys)
    answers = await job.ask_all([Place(node.node, node.address) for node in nodes], GetTrace(switch), ASK_S, Trace)
    spans = {span.span_id: span for told in answers.values() if isinstance(told, Trace) for span in told.spans}
    if not spans:
        async with job.gyred(nodes):  # says why nobody answers, if nobody does
            raise BadInput("switch", switch, "a switch or trace whose spans a node still has")
    return tuple(spans.values())


async def order(job: Job, message: object) -> None:
    """Have the job's gyred do something. Raises Refused with the reason, Unavailable when it does not answer."""
    async with asking(job) as node:
        await node.ask(message, ORDER_S, Ok)


async def copies(job: Job, node: NodeId) -> Copies | None:
    """How the copies of a node's journals stand; None where its gateway does not answer, or has none."""
    try:
        async with asking(job) as asked:
            return await asked.ask(GetCopies(node), ASK_S, Copies)
    except GyreError:
        return None


async def version(job: JobDir) -> Version:
    async with asking(job) as node:
        return await node.ask(GetVersion(), ASK_S, Version)


def is_lone(job: Job) -> bool:
    """Whether the job has one node, whose gyred alone writes to its store."""
    return cluster_of(store_url(job)) is None


def gyred_of(job: JobDir) -> ProcessRef | None:
    """The process that runs this job now, whoever started it."""
    try:
        found = json.loads(job.gyred_file.read_text(encoding="utf-8"))
        process = ProcessRef(int(found["pid"]), int(found["start_ticks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return process if process.alive else None


async def is_running(job: Job) -> bool:
    """Whether a gyred is there that works on it: on this node, or of a cluster's file on any."""
    if isinstance(job, JobDir):
        return gyred_of(job) is not None
    async with reading(job) as (store, keys):
        found = await store.get(keys.job, JobRecord)
        over = found is not None and found.record.state in (JobState.FINISHED, JobState.FAILED)
        return not over and bool(await job.nodes(store, keys))


def store_url(job: Job) -> str:
    """The state store of the job: what its node's file names."""
    if isinstance(job, ClusterJob):
        return job.file.store
    try:
        return str(tomllib.loads(job.node_file.read_text(encoding="utf-8"))["node"]["store"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput("node.toml", str(job.node_file), f"it must be as gyrectl up wrote it ({error!r})") from error


@asynccontextmanager
async def reading(job: Job) -> AsyncGenerator[tuple[TypedStore, Keys]]:
    """The job's store, to read from, whether the job runs or has ended. Raises Unavailable when that takes too long."""
    url = store_url(job)
    if isinstance(job, JobDir) and url.startswith("sqlite:") and not job.store.exists():
        raise Unavailable(f"{job.root} has no store yet")
    store = TypedStore(open_store(url, read_only=True), away_s=0.0)
    try:
        async with asyncio.timeout(ORDER_S):
            name = read_spec(job).job.name if isinstance(job, JobDir) else (await job.current(store)).name
            yield store, keys_for(url, name)
    except TimeoutError:
        raise Unavailable(f"the state store has not answered within {ORDER_S:g} s; gyrectl doctor says more") from None
    finally:
        await store.store.close()


async def waiting(job: Job) -> list[WaitingRecord]:
    """The nodes of the job's cluster that are there and work on no job."""
    url = store_url(job)
    if (cluster := cluster_of(url)) is None:
        return []
    store = TypedStore(open_store(url, read_only=True), away_s=0.0)
    try:
        return [item.record for item in (await store.range(waiting_prefix(cluster), WaitingRecord)).items]
    finally:
        await store.store.close()


@asynccontextmanager
async def asking(job: Job) -> AsyncGenerator[RemoteRef]:
    """The node actor of one of the job's gyreds: this node's, or of a cluster's file one that lets us in."""
    if isinstance(job, ClusterJob):
        async with reading(job) as (store, keys):
            nodes = await job.nodes(store, keys)
        async with job.gyred(nodes) as node:
            yield node
        return
    async with connect(job.address("node"), job.secret()) as node:
        try:
            yield node
        except Unavailable as error:
            if (job.sockets / "node.sock").exists():
                raise
            raise Unavailable(
                f"the job in {job.root} is not running; gyrectl report --dir tells how far it is"
            ) from error


async def books(job: Job) -> Books:
    """The job's records, read from its store (which may be in use)."""
    async with reading(job) as (store, keys):
        return await read_books(store.store, keys)


async def report(job: Job) -> Report:
    return summarise(await books(job), (await spec_of(job)).job.seed)
