"""A whole job whose replicas have two ranks each, one of which is killed: it trains what one rank alone trains on the same data."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.children import ProcessRef, start_ticks
from gyre.cli.client import read_spec

from .a_job import Job
from .undisturbed import check_training

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


async def test_a_job_on_replicas_of_two_ranks_trains_as_one_rank_does(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = make_job(cells={"count": 1, "train_ranks": 2})
    job.start()
    job.open_gate()
    status = await job.until_status("a step", lambda now: now.step == 1 and now.cells[0].replica_pid > 0)
    first = status.cells[0].replica_pid
    ranks = ranks_of(first)
    (victim,) = (rank for rank in ranks if rank.pid != first)
    os.kill(victim.pid, signal.SIGKILL)
    await job.until_logged(f"replica-c0 (pid {first}) ended: exit code 1")
    assert await job.ended() == 0, job.tail()
    books = await job.check_books(2)
    assert not any(rank.alive for rank in ranks)
    log = (job.dir.logs / "replica-c0.log").read_text()
    assert f"rank 1 (pid {victim.pid}) ended: killed by SIGKILL; the replica ends with it" in log

    spec = read_spec(job.dir)
    losses = check_training(books, spec, job.root, (job.dir,), job.dir, tmp_path / "one-rank")
    assert [step.metrics["loss"] for step in books.steps] == pytest.approx(losses, rel=1e-3, abs=1e-6)


def ranks_of(pid: int) -> tuple[ProcessRef, ...]:
    """The processes of the replica that this one is the first of."""
    ticks = start_ticks(pid)
    return () if ticks is None else ProcessRef(pid, ticks).session()
