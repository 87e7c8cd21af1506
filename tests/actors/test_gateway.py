"""The gateway actor and a real gateway process: whichever of the two ends, the proxy knows its routes and runs again."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gyre import pki
from gyre.actors.gateway import GatewayActor
from gyre.actors.messages import (
    CloseRun,
    DrainEngine,
    DrainReport,
    EngineRoute,
    GatewayStatus,
    GetGatewayStatus,
    GetLineages,
    JobFailed,
    Lineages,
    Ok,
    OpenRun,
    Place,
    RouteChanged,
)
from gyre.actors.messages_journals import Attempt, Copies, CopyTo, GetCopies, Taken, TakeOver
from gyre.actors.remote import connect
from gyre.actors.runtime import Actor, ActorSystem, Backoff, handles
from gyre.actors.site import Site
from gyre.children import Child
from gyre.config import ServerSection
from gyre.credentials import Credentials
from gyre.demo import builtin
from gyre.engine.access import http_key
from gyre.errors import Refused
from gyre.ids import CellId, GroupId, NodeId, RunId
from gyre.proxy.journal_writer import look_at_journal
from gyre.trajectory.records import RunTrace

from .stand_ins import DEADLINE_S, SPEC, a_site, first_records, follow, lead, until

RUN = OpenRun(RunId("r1"), GroupId("g1"), 1, "a-key", "scripted", 1.0, 16)
ROUTE = EngineRoute(CellId("c0"), "http://127.0.0.1:9", 0, accepting=False, slots=4)


class Scheduler(Actor):
    def __init__(self, told: list[JobFailed]) -> None:
        self._told = told

    @handles(JobFailed)
    async def failed(self, message: JobFailed) -> None:
        self._told.append(message)


@asynccontextmanager
async def a_gateway(
    tmp_path: Path, server: ServerSection | None = None, node: str = ""
) -> AsyncIterator[tuple[Site, list[JobFailed]]]:
    """The gateway of a lone node, or of `node` among others, whose authority lies beside its folder."""
    tmp_path.mkdir(exist_ok=True)
    site = a_site(tmp_path, SPEC.model_copy(update={"server": server or SPEC.server}))
    if node:
        folder = tmp_path.parent / "pki"
        pki.issue(folder, node, pki.Kind.NODE, 2, ("127.0.0.1",))
        site.node = NodeId(node)
        site.credentials = Credentials(folder / "ca.pem", folder / f"{node}.pem", folder / f"{node}.key")
    site.model_dir = builtin.model_dir("builtin:tiny", tmp_path)
    await first_records(site)
    failed: list[JobFailed] = []
    try:
        async with ActorSystem.running("test") as system:
            await lead(site)
            await follow(site, system)
            site.refs["scheduler"] = system.spawn("scheduler", lambda: Scheduler(failed))
            restart = Backoff(initial_s=0.01)
            site.refs["gateway"] = system.spawn("gateway", lambda: GatewayActor(site), restart=restart)
            yield site, failed
    finally:
        await site.children.end_all(5.0)
        await site.store.store.close()


def process(site: Site) -> Child:
    return site.children.adopt()["gateway"]


async def status(site: Site) -> GatewayStatus:
    return await site.gateway.ask(GetGatewayStatus(), DEADLINE_S, GatewayStatus)


async def killed(site: Site, child: Child) -> Child:
    """Kill the process; returns the next one."""
    child.signal(signal.SIGKILL)
    await until(lambda: (now := site.children.adopt().get("gateway")) is not None and now.pid != child.pid)
    return process(site)


def knows_all(found: GatewayStatus) -> bool:
    return found.open_runs == 1 and set(found.in_flight) == {"c0"}


async def until_known(site: Site) -> GatewayStatus:
    """Until the process has been told everything."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if knows_all(found := await status(site)):
                return found
            await asyncio.sleep(0.02)


async def test_the_process_dies_and_the_actor_fails_and_nothing_is_forgotten(tmp_path: Path) -> None:
    async with a_gateway(tmp_path) as (site, failed):
        await site.gateway.ask(RouteChanged(ROUTE), DEADLINE_S, Ok)
        await site.gateway.ask(RUN, DEADLINE_S, Ok)
        first, before = process(site), await status(site)
        assert knows_all(before)
        second = await killed(site, first)
        await killed(site, second)  # before it could be told anything
        assert (await until_known(site)).base_url == before.base_url

        site.gateway.tell(RouteChanged(replace(ROUTE, cell=[])))  # type: ignore[arg-type]  # a fault of ours
        await asyncio.sleep(0.1)
        kept = process(site)
        assert knows_all(await until_known(site))
        assert process(site).pid == kept.pid, "the process outlives its actor"
        await killed(site, kept)
        assert (await until_known(site)).base_url == before.base_url
        assert failed == []


async def test_an_order_to_drain_a_cell_that_has_opened_again_is_refused(tmp_path: Path) -> None:
    async with a_gateway(tmp_path) as (site, _):
        await site.gateway.ask(RouteChanged(replace(ROUTE, accepting=True)), DEADLINE_S, Ok)
        with pytest.raises(Refused, match="has opened again"):
            await site.gateway.ask(DrainEngine(ROUTE.cell, False), DEADLINE_S, DrainReport)
        await site.gateway.ask(RouteChanged(ROUTE), DEADLINE_S, Ok)
        assert (await site.gateway.ask(DrainEngine(ROUTE.cell, False), DEADLINE_S, DrainReport)).requests == 0


async def test_a_run_that_was_never_let_in_closes_empty(tmp_path: Path) -> None:
    async with a_gateway(tmp_path) as (site, _):
        trace = await site.gateway.ask(CloseRun(RunId("never"), 3), DEADLINE_S, RunTrace)
        assert (trace.run, trace.attempt, trace.calls, trace.lineages) == ("never", 3, 0, ())


async def test_a_run_that_closed_as_the_process_died_is_no_fault(tmp_path: Path) -> None:
    async with a_gateway(tmp_path) as (site, _):
        await site.gateway.ask(RouteChanged(ROUTE), DEADLINE_S, Ok)
        await site.gateway.ask(RUN, DEADLINE_S, Ok)
        first = await site.gateway.ask(CloseRun(RUN.run, 1), DEADLINE_S, RunTrace)
        site.open_runs[RUN.run] = RUN  # as if the answer had been lost with the process
        await killed(site, process(site))
        assert await site.gateway.ask(CloseRun(RUN.run, 1), DEADLINE_S, RunTrace) == first
        assert RUN.run not in site.open_runs


async def test_an_engine_is_asked_with_a_key_of_the_jobs_secret_and_never_with_the_secret(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    async def engine(request: web.Request) -> web.StreamResponse:
        seen.append((request.path, request.headers.get("Authorization", "")))
        if request.path == "/generate":
            await asyncio.sleep(DEADLINE_S)  # for as long as the gateway that asks lives
        return web.Response()

    app = web.Application()
    app.router.add_post("/{path:.*}", engine)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        route = replace(ROUTE, url=f"http://127.0.0.1:{runner.addresses[0][1]}", accepting=True)
        async with a_gateway(tmp_path) as (site, _), aiohttp.ClientSession() as http:
            await site.gateway.ask(RouteChanged(route), DEADLINE_S, Ok)
            await site.gateway.ask(RUN, DEADLINE_S, Ok)
            url = f"{(await status(site)).base_url}/run/{RUN.run}/{RUN.key}/v1/chat/completions"
            body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            call = asyncio.create_task(http.post(url, json=body))
            await until(lambda: bool(seen))
            await killed(site, process(site))
            # The next process ends what the one before has left with the engine.
            await until(lambda: any(path == "/abort_request" for path, _ in seen))
            await asyncio.gather(call, return_exceptions=True)
            assert {sent for _, sent in seen} == {f"Bearer {http_key(site.secret)}"}
            assert all(site.secret not in sent for _, sent in seen)
    finally:
        await runner.cleanup()


async def test_metrics_are_for_who_can_read_the_jobs_state(tmp_path: Path) -> None:
    async with a_gateway(tmp_path) as (site, _), aiohttp.ClientSession() as http:
        url = f"{(await status(site)).base_url}/metrics"
        file = site.job.secret_file.with_name("metrics.key")
        assert file.stat().st_mode & 0o077 == 0
        for key, expected in ((file.read_text(), 200), (site.secret, 401), ("", 401)):
            async with http.get(url, headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == expected
                assert ("gyre_open_runs" in await response.text()) == (expected == 200)


async def test_a_process_that_cannot_run_fails_the_job_with_its_reason(tmp_path: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with a_gateway(tmp_path, ServerSection(port=port)) as (_, failed):
            await until(lambda: bool(failed))
            assert f"server.port: {port}" in failed[0].reason


async def test_a_closed_run_is_another_nodes_when_its_own_is_dead(tmp_path: Path) -> None:
    pki.init(tmp_path / "pki", "tests", 10)
    async with a_gateway(tmp_path / "a", node="node-a") as (a, _), a_gateway(tmp_path / "b", node="node-b") as (b, _):
        await until(lambda: "gateway" in b.far_addresses())
        place = Place("node-b/gateway", b.far_addresses()["gateway"])
        await a.gateway.ask(CopyTo(b.node, place, ()), DEADLINE_S, Ok)
        run = Attempt(RUN.run, RUN.attempt)
        await a.gateway.ask(RUN, DEADLINE_S, Ok)
        assert await b.gateway.ask(TakeOver((run,)), DEADLINE_S, Taken) == Taken(()), "it is not closed"
        child = await killed(a, process(a))
        assert child.alive, "it is told anew where its copies go"
        await a.gateway.ask(CloseRun(RUN.run, 1), DEADLINE_S, RunTrace)
        there = b.job.copies / "node-a" / "closed" / "r1.1"
        assert look_at_journal(there) == look_at_journal(a.job.journal / "closed" / "r1.1")
        assert await a.gateway.ask(GetCopies(a.node), DEADLINE_S, Copies) == Copies(b.node, 0, 0, "")

        await a.refs.pop("gateway").stop(DEADLINE_S)
        await a.children.end_all(5.0)
        shutil.rmtree(a.job.root)
        assert await b.gateway.ask(TakeOver((run,)), DEADLINE_S, Taken) == Taken((run,))
        async with connect(b.child_address("gateway"), b.secret) as replicas_way:
            assert await replicas_way.ask(GetLineages(RUN.run, 1, ()), DEADLINE_S, Lineages) == Lineages(())


async def test_while_the_peers_gateway_is_stopped_runs_go_on_and_its_next_one_has_all(tmp_path: Path) -> None:
    pki.init(tmp_path / "pki", "tests", 10)
    async with a_gateway(tmp_path / "a", node="node-a") as (a, _), a_gateway(tmp_path / "b", node="node-b") as (b, _):
        await until(lambda: "gateway" in b.far_addresses())
        before = b.far_addresses()["gateway"]
        await a.gateway.ask(CopyTo(b.node, Place("node-b/gateway", before), ()), DEADLINE_S, Ok)
        process(b).signal(signal.SIGSTOP)
        await a.gateway.ask(RUN, DEADLINE_S, Ok)
        await a.gateway.ask(CloseRun(RUN.run, 1), DEADLINE_S, RunTrace)
        status = await a.gateway.ask(GetCopies(a.node), DEADLINE_S, Copies)
        assert (status.peer, status.behind_runs) == (b.node, 1)
        assert status.why

        await killed(b, process(b))
        await until(lambda: b.far_addresses()["gateway"] != before)
        place, closed = Place("node-b/gateway", b.far_addresses()["gateway"]), (Attempt(RUN.run, 1),)
        await a.gateway.ask(CopyTo(b.node, place, closed), DEADLINE_S, Ok)
        await until((b.job.copies / "node-a" / "closed" / "r1.1").is_dir)
