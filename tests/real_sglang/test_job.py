"""A whole job on two cells whose engines are SGLang: they outlive gyred, runs go from one to the other at each switch, and
their KV goes ahead."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import aiohttp
import pytest
from job.a_job import SCRIPT, Job, gated
from job.conftest import make_job as make_job

from gyre.actors.messages_gyrectl import CellStatus, PinCell, Status
from gyre.cli import client
from gyre.ids import CellId
from gyre.kv_migrate.choice import Kind
from gyre.store.records import Role

from .pair import is_scheduler, session
from .servers import MISSING, PYTHON_WITH_GYRE

ENGINE = {
    "kind": "sglang",
    "python": str(PYTHON_WITH_GYRE),
    "device": "cpu",
    "dtype": "float32",
    "moves_kv": True,
    "kv_transport": Kind.TCP,
}
LONG = " and then tell what you have found there" * 8
"""So that a run's prefix is of many blocks."""


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    if MISSING:
        pytest.skip(MISSING)
    job = make_job(
        engine=ENGINE,
        model={"context_tokens": 1024},
        cells={"count": 2, "slots": 4, "kv_silence_s": 5.0},  # a busy machine may stand still for a while
        limits={"run_s": 900.0},
    )
    first, score, at_gate, *_, second, third, submit = SCRIPT
    job.script = [{"ask": f"{first['ask']}{LONG}"}, score, *[at_gate] * 40, second, third, submit]
    return job


async def test_runs_go_on_through_every_switch_and_the_death_of_gyred_and_of_an_engine(job: Job) -> None:
    job.start()
    await job.until_status("runs at the gate", gated)
    await pin(job, "c0", Role.ROLLOUT)  # in the middle of a switch an engine would not be adopted
    await pin(job, "c1", Role.ROLLOUT)
    cells = (await job.until_status("runs at the gate", gated)).cells
    assert {cell.kv_carrier for cell in cells} == {"tcp: tcp was asked for"}
    engines = {cell.cell: cell.engine_pid for cell in cells}
    assert all("sglang.launch_server" in job.processes()[pid] for pid in engines.values()), job.processes()
    os.kill(job.gyred(), signal.SIGKILL)
    for which, pid in engines.items():
        await job.until_logged(f"adopted engine-{which} (pid {pid})")
    await job.until_status("gyred again", gated)
    for leaving in ("c1", "c0") * 2:
        await pin(job, leaving, Role.TRAIN)
        await pin(job, leaving, Role.ROLLOUT)
    # The runs' next calls are in the engine that has their prefixes when it leaves.
    with stopped(await schedulers(job, "c1")):
        job.open_gate("t*")
        await job.until_status("calls in c1", lambda now: cell(now, "c1").in_flight > 0)
        await client.order(job.dir, PinCell(CellId("c1"), Role.TRAIN))
        await job.until_status("c1 to leave", lambda now: cell(now, "c1").role is Role.DRAINING)
    await job.until_status("c1 in training", lambda now: cell(now, "c1").role is Role.TRAIN)
    told = await metrics(job)
    assert told["gyre_prefix_tokens_recomputed_total"] == 0, told
    assert told['gyre_kv_moved_blocks_total{for="resting"}'] > 0, told

    # In the second step an engine dies with calls in it.
    await unpin(job)
    await job.until_status("runs of the second step at the gate", lambda now: now.step == 1 and gated(now))
    await pin(job, "c0", Role.ROLLOUT)
    await pin(job, "c1", Role.ROLLOUT)
    with stopped([*await schedulers(job, "c0"), *await schedulers(job, "c1")]):
        job.open_gate()
        status = await job.until_status("calls in an engine", lambda now: any(c.in_flight for c in now.cells))
        serving = next(c for c in status.cells if c.in_flight)
        os.kill(serving.engine_pid, signal.SIGKILL)
    await unpin(job)
    assert await job.ended() == 0, job.tail()
    books = await job.check_books(2)
    for which in ("c0", "c1"):
        departures = [switch for switch in books.switches if (switch.cell, switch.desired) == (which, Role.TRAIN)]
        assert sum(switch.moved_blocks for switch in departures) > 0, departures
    assert any(switch.moved_requests for switch in books.switches)
    assert serving.engine_pid == engines[serving.cell], "it outlived gyred, and every switch"
    assert f"engine-{serving.cell} (pid {serving.engine_pid}) ended: killed by SIGKILL" in job.log


def cell(status: Status, which: str) -> CellStatus:
    return next(cell for cell in status.cells if cell.cell == which)


async def pin(job: Job, which: str, role: Role) -> None:
    """Order the cell to a role, and wait until it has it."""
    await client.order(job.dir, PinCell(CellId(which), role))
    await job.until_status(f"{which} in {role}", lambda now: cell(now, which).role is role)


async def unpin(job: Job) -> None:
    for each in ("c0", "c1"):
        await client.order(job.dir, PinCell(CellId(each), None))


async def schedulers(job: Job, which: str) -> list[int]:
    """The processes of the cell's engine that sample; the one that answers HTTP is another."""
    status = await job.until_status(f"the engine of {which}", lambda now: cell(now, which).engine_pid > 0)
    of_engine = session(os.getsid(cell(status, which).engine_pid))
    found = [process for process, command in of_engine.items() if is_scheduler(command)]
    assert found
    return found


@contextmanager
def stopped(processes: list[int]) -> Generator[None]:
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


async def metrics(job: Job) -> dict[str, float]:
    """The gateway's."""
    status = await job.until_status("the gateway", lambda now: bool(now.base_url))
    headers = {"Authorization": f"Bearer {(job.dir.state / 'metrics.key').read_text()}"}
    async with aiohttp.ClientSession() as http, http.get(f"{status.base_url}/metrics", headers=headers) as answer:
        assert answer.status == 200
        lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
