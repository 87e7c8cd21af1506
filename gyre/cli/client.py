"""gyrectl's side of a node: find the job's folder, ask its gyred, read its books."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from gyre.actors.messages import Ok
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
from gyre.actors.remote import connect
from gyre.children import ProcessRef
from gyre.cli.report import Books, Report, read_books, summarise
from gyre.config import JobSpec
from gyre.errors import BadInput, GyreError, Unavailable
from gyre.ids import NodeId
from gyre.jobdir import JobDir
from gyre.store.open import cluster_of, keys_for, open_store
from gyre.store.records import Keys
from gyre.store.typed import TypedStore

T = TypeVar("T")

ASK_S = 5.0
ORDER_S = 10.0
"""For an order that the leader carries out before it answers."""


def find_job(folder: Path | None) -> JobDir:
    """The job in `folder`, or the newest one under `runs/`. Raises BadInput when there is none."""
    if folder is None:
        found = sorted(Path("runs").glob("*/job.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise BadInput("--dir", "runs/", "no job was found there; name the job's folder")
        folder = found[-1].parent
    job = JobDir(folder.resolve())
    if not job.job_file.is_file():
        raise BadInput("--dir", str(folder), "it must be a job's folder (one that holds job.json)")
    return job


def read_spec(job: JobDir) -> JobSpec:
    """The job as it was begun. Raises BadInput when its file is not what `gyrectl up` wrote."""
    try:
        return JobSpec.from_json(job.job_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise BadInput("job.json", str(job.job_file), f"it must be a job as gyrectl up wrote it ({first})") from error


async def status(job: JobDir) -> Status:
    """The running job's status. Raises Unavailable when its gyred does not answer."""
    return await _ask(job, GetStatus(), Status)


async def stop(job: JobDir, reason: str) -> None:
    await _ask(job, StopJob(reason), Ok)


async def trace(job: JobDir, switch: str) -> tuple[SpanRecord, ...]:
    return (await _ask(job, GetTrace(switch), Trace)).spans


async def order(job: JobDir, message: object) -> None:
    """Have the job's gyred do something. Raises Refused with the reason, Unavailable when it does not answer."""
    await _ask(job, message, Ok, ORDER_S)


async def copies(job: JobDir, node: NodeId) -> Copies | None:
    """How the copies of a node's journals stand; None where its gateway does not answer, or has none."""
    try:
        return await _ask(job, GetCopies(node), Copies)
    except GyreError:
        return None


async def version(job: JobDir) -> Version:
    return await _ask(job, GetVersion(), Version)


def is_lone(job: JobDir) -> bool:
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


def store_url(job: JobDir) -> str:
    """The state store of the job: what its node's file names."""
    try:
        return str(tomllib.loads(job.node_file.read_text(encoding="utf-8"))["node"]["store"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput("node.toml", str(job.node_file), f"it must be as gyrectl up wrote it ({error!r})") from error


@asynccontextmanager
async def reading(job: JobDir) -> AsyncGenerator[tuple[TypedStore, Keys]]:
    """The job's store, to read from, whether the job runs or has ended. Raises Unavailable when that takes too long."""
    url = store_url(job)
    if url.startswith("sqlite:") and not job.store.exists():
        raise Unavailable(f"{job.root} has no store yet")
    store = open_store(url, read_only=True)
    try:
        async with asyncio.timeout(ORDER_S):
            yield TypedStore(store), keys_for(url, read_spec(job).job.name)
    except TimeoutError:
        raise Unavailable(f"the state store has not answered within {ORDER_S:g} s; gyrectl doctor says more") from None
    finally:
        await store.close()


async def _ask(job: JobDir, message: object, reply: type[T], limit_s: float = ASK_S) -> T:
    async with connect(job.address("node"), job.secret()) as node:
        try:
            return await node.ask(message, limit_s, reply)
        except Unavailable as error:
            if (job.sockets / "node.sock").exists():
                raise
            raise Unavailable(
                f"the job in {job.root} is not running; gyrectl report --dir tells how far it is"
            ) from error


async def books(job: JobDir) -> Books:
    """The job's records, read from its store (which may be in use)."""
    async with reading(job) as (store, keys):
        return await read_books(store.store, keys)


async def report(job: JobDir) -> tuple[JobDir, Report]:
    return job, summarise(await books(job), read_spec(job).job.seed)
