"""SIGKILL of each process of a job, in the middle of it: the job goes on, and nobody else is hurt."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from gyre.actors.messages_gyrectl import CellStatus, PinCell, Status
from gyre.cli import client
from gyre.ids import CellId
from gyre.store.records import Role

from .a_job import Job, gated


def cell(status: Status, which: str) -> CellStatus:
    return next(cell for cell in status.cells if cell.cell == which)


async def finish(job: Job, steps: int = 2) -> None:
    job.open_gate()
    assert await job.ended() == 0, job.tail()
    assert len((await job.books()).steps) == steps


async def test_an_engine_is_killed_with_calls_in_it_and_a_harness_is_killed(job: Job) -> None:
    job.start()
    await job.until_status("runs at the gate", gated)
    victim, pid = next(iter(job.harnesses("t*").items()))
    os.kill(pid, signal.SIGKILL)
    run = victim.split("/")[0]
    await job.until_logged(f"{run}: attempt 2 (")

    await client.order(job.dir, PinCell(CellId("c0"), Role.ROLLOUT))  # else it may leave while its engine is stopped
    status = await job.until_status("both engines", lambda now: all(c.role is Role.ROLLOUT for c in now.cells))
    for each in status.cells:
        os.kill(each.engine_pid, signal.SIGSTOP)  # so that calls stay in them
    job.open_gate()
    status = await job.until_status("calls in an engine", lambda now: any(c.in_flight for c in now.cells))
    serving = next(c for c in status.cells if c.in_flight)
    os.kill(serving.engine_pid, signal.SIGKILL)
    for each in status.cells:
        if each.cell != serving.cell:
            os.kill(each.engine_pid, signal.SIGCONT)
    await client.order(job.dir, PinCell(CellId("c0"), None))
    await finish(job)

    books = await job.check_books(2, hurt=[run])
    hurt = next(r for r in books.runs if r.run == run)
    assert (hurt.attempt, hurt.reason) == (2, "")
    assert f"engine-{serving.cell} (pid {serving.engine_pid}) ended: killed by SIGKILL" in job.log
    assert "the harness was killed from outside" in job.log


async def test_the_cores_replica_is_killed_with_merged_sums_and_a_satellites_with_claims(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(
        job={"steps": 3},
        scheduler={"min_work_switches": 1e-6},  # any work is worth a switch
        batch={"micro_step_tokens": 64, "claim_s": 600.0},
    )
    job.start()
    status = await job.until_status("merged sums", lambda now: gated(now) and now.micro_steps_done > 0)
    os.kill(status.pids["replica-c0"], signal.SIGKILL)
    await job.until_logged("merged micro-steps are done again")
    job.open_gate()

    status = await job.until_status("the second step", lambda now: now.step == 1 and cell(now, "c0").replica_pid > 0)
    os.kill(status.pids["replica-c0"], signal.SIGSTOP)  # what is to be trained waits for the satellite
    status = await job.until_status("a satellite in train", lambda now: cell(now, "c1").role is Role.TRAIN)
    await asyncio.sleep(0.5)
    os.kill(status.pids["replica-c1"], signal.SIGKILL)
    await job.until_logged("c1 gave back")
    os.kill(status.pids["replica-c0"], signal.SIGCONT)
    await finish(job, steps=3)
    await job.check_books(3)
    assert "replica-c0 (pid" in job.log
    assert "replica-c1 (pid" in job.log


async def test_gyred_is_killed_and_then_the_gateway_with_calls_in_it(make_job: Callable[..., Job]) -> None:
    job = make_job(job={"steps": 2}, batch={"staleness": 1}, harness={"max_live": 12})
    job.start()
    before = await job.until_status(
        "runs at the gate, and both cells there",
        lambda now: (
            now.phase == "training"
            and now.live == 6 == len(job.harnesses("t*"))
            and all(cell.role in (Role.ROLLOUT, Role.TRAIN) for cell in now.cells)
        ),
    )
    harnesses, gyred = job.harnesses("t*"), job.gyred()
    assert gyred
    os.kill(gyred, signal.SIGKILL)
    after = await job.until_status(
        "the next gyred, which has adopted all",
        lambda now: job.gyred() not in (0, gyred) and now.live == 6 and len(now.pids) == len(before.pids),
    )
    assert after.pids == before.pids
    assert job.harnesses("t*") == harnesses
    await job.until_logged("adopted the gateway")
    assert "gyred ended with signal 9" in job.said

    status = await job.until_status("both engines", lambda now: all(c.role is Role.ROLLOUT for c in now.cells))
    engines = [c.engine_pid for c in status.cells]
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    job.open_gate()
    await job.until_status("calls in the gateway", lambda now: sum(c.in_flight for c in now.cells) > 0)
    os.kill(status.pids["gateway"], signal.SIGKILL)
    for pid in engines:
        os.kill(pid, signal.SIGCONT)
    await finish(job)
    await job.check_books(2)
    assert f"the gateway (pid {status.pids['gateway']}) ended: killed by SIGKILL" in job.log
