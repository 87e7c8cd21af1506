"""`gyrectl actor`: asks the processes of a job by themselves, in a job that has two of them and the remains of a third."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gyre.actors.remote import serve
from gyre.actors.runtime import Actor, ActorSystem, LocalRef, handles
from gyre.cli.actor_cli import ask_all
from gyre.errors import Unavailable
from gyre.jobdir import JobDir

LIMIT_S = 60.0


@dataclass(frozen=True)
class Work:
    """-> Work, or nothing for a long time."""

    stuck: bool = False


class Worker(Actor):
    @handles(Work)
    async def work(self, message: Work) -> Work:
        if message.stuck:
            await asyncio.sleep(1000)
        return message


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[tuple[JobDir, dict[str, LocalRef]]]:
    job = JobDir(tmp_path / "job")
    job.create()
    job.job_file.write_text("{}")
    refs: dict[str, LocalRef] = {}
    async with AsyncExitStack() as stack:
        for name in ("node", "gateway"):
            system = await stack.enter_async_context(ActorSystem.running(name, stop_s=0.1))
            refs[name] = system.spawn("worker", Worker, mailbox_messages=3)
            await refs[name].ask(Work(), LIMIT_S, Work)
            await stack.enter_async_context(serve(refs[name], job.address(name), job.secret()))
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(job.sockets / "replica-c0.sock"))
        yield job, refs
        (job.sockets / "replica-c0.sock").unlink()


async def gyrectl(*arguments: str) -> tuple[int | None, str, str]:
    argv = (sys.executable, "-m", "gyre.cli.gyrectl", "actor", *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, out.decode(), err.decode()


async def test_every_process_is_asked_gyred_first_and_one_that_is_dead_is_named(
    job: tuple[JobDir, dict[str, LocalRef]],
) -> None:
    folder, refs = job
    refs["gateway"].tell(Work(stuck=True))
    found, silent = await ask_all(folder)
    assert list(found) == ["node", "gateway"]
    assert [actor.name for listed in found.values() for actor in listed.actors] == ["node/worker", "gateway/worker"]
    assert "cannot be reached" in silent["replica-c0"]


async def test_the_list_and_one_actor_are_shown_for_people_and_programs(
    job: tuple[JobDir, dict[str, LocalRef]],
) -> None:
    folder, refs = job
    refs["gateway"].tell(Work(stuck=True))
    await asyncio.sleep(0.05)
    refs["gateway"].tell(Work())
    where = ("--dir", str(folder.root))
    code, out, err = await gyrectl("list", *where)
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("gateway/worker")]
    assert "running" in line
    assert "Work" in line
    assert "1/3" in line
    assert "replica-c0" in err
    code, out, _ = await gyrectl("show", "gateway/worker", "--json", *where)
    shown = json.loads(out)
    assert (code, shown["in_hand"], shown["waiting"], shown["totals"]["handled"]) == (0, "Work", 1, 1)
    code, out, _ = await gyrectl("show", "gateway/worker", *where)
    assert (code, "gateway/worker (Worker): running" in out) == (0, True)
    code, _, err = await gyrectl("show", "nobody", *where)
    assert code == 2
    assert "one of these is allowed: gateway/worker, node/worker" in err


async def test_the_figures_are_metrics_by_process_and_kind(job: tuple[JobDir, dict[str, LocalRef]]) -> None:
    folder, _ = job
    code, out, _ = await gyrectl("metrics", "--dir", str(folder.root))
    samples = {
        (sample.name, sample.labels["process"], sample.labels["kind"]): sample.value
        for family in text_string_to_metric_families(out)
        for sample in family.samples
    }
    assert code == 0
    assert samples["gyre_actors", "node", "Worker"] == 1
    assert samples["gyre_actor_handled_total", "gateway", "Worker"] == 1
    assert samples["gyre_actor_mailbox_messages", "gateway", "Worker"] == 0
    code, out, _ = await gyrectl("metrics", "--json", "--dir", str(folder.root))
    assert code == 0
    assert {name: [total["kind"] for total in totals] for name, totals in json.loads(out).items()} == {
        "node": ["Worker"],
        "gateway": ["Worker"],
    }


async def test_a_job_that_does_not_run_is_said_so(tmp_path: Path) -> None:
    job = JobDir(tmp_path / "job")
    job.create()
    with pytest.raises(Unavailable, match="is not running"):
        await ask_all(job)
