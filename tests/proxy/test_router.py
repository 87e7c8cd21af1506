"""A router between the gateway and several engines, as one route: what still holds (docs/routing.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gyre.actors.messages import DrainEngine, EngineRoute, SetRoutes
from gyre.ids import CellId

from .conftest import Proxy, StartProxy, until
from .scripted_engine import ScriptedEngine

ANSWER = "the quick brown fox jumps over the lazy dog"
FLEET = CellId("fleet")


class Router:
    """Sends each request to the worker with the fewest, passes its stream on, and knows of nothing else."""

    def __init__(self, workers: dict[str, ScriptedEngine]) -> None:
        self._workers = workers
        self._in_flight = dict.fromkeys(workers, 0)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        name = min(self._in_flight, key=lambda name: (self._in_flight[name], name))
        self._in_flight[name] += 1
        try:
            headers = {"Content-Type": "application/json"}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{self._workers[name].url}/generate", data=body, headers=headers) as answer,
            ):
                response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response
        finally:
            self._in_flight[name] -= 1

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "scripted", "weight_version": "0"})


@pytest.fixture
async def fleet(start_proxy: StartProxy) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy whose two engines stand behind a router, and the router's address."""
    proxy = await start_proxy(lambda head: ANSWER, cells=("a", "b"), token_s=0.005)
    app = web.Application()
    router = Router(proxy.engines)
    app.router.add_post("/generate", router.generate)
    app.router.add_get("/model_info", router.info)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    await route(proxy, url)
    yield proxy, url
    await runner.cleanup()


async def route(proxy: Proxy, url: str, version: int = 0, *, accepting: bool = True) -> None:
    await proxy.gateway.set_routes(SetRoutes(version, (EngineRoute(FLEET, url, version, accepting, slots=64),)))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def live(proxy: Proxy) -> int:
    return sum(len(engine.live) for engine in proxy.engines.values())


async def test_calls_are_spread_by_the_router_and_each_is_whole(fleet: tuple[Proxy, str]) -> None:
    proxy, _ = fleet
    runs = [f"r{place}" for place in range(6)]
    for run in runs:
        await proxy.open(run)
    answers = await asyncio.gather(*(proxy.chat(run, [user(run)]) for run in runs))
    assert {answer["content"] for answer in answers} == {ANSWER}
    assert all(engine.requests for engine in proxy.engines.values())
    assert [(await proxy.close(run)).calls for run in runs] == [1] * 6


async def test_a_change_of_weights_stops_each_call_at_a_token_and_no_copy_of_it_lives_on(
    fleet: tuple[Proxy, str],
) -> None:
    proxy, url = fleet
    await proxy.open("r")
    calling = asyncio.create_task(proxy.chat("r", [user("go")]))
    await until(lambda: any(made >= 10 for engine in proxy.engines.values() for made in engine.made.values()))
    await route(proxy, url, accepting=False)
    async with asyncio.timeout(3):  # a router takes no order to abort: its connection is ended instead
        assert (await proxy.gateway.drain(DrainEngine(FLEET, move=False))).requests == 1
    await until(lambda: live(proxy) == 0)
    for engine in proxy.engines.values():
        engine.version = 1
    await route(proxy, url, version=1)
    assert (await calling)["content"] == ANSWER
    tree = proxy.session("r").tree
    versions = list(tree.output_versions(tree.calls[0]))
    assert (versions, set(versions)) == (sorted(versions), {0, 1})
    trace = await proxy.close("r")
    assert (trace.calls, trace.interrupted_calls, trace.continued_calls) == (1, 0, 1)


async def test_a_stop_sequence_ends_the_request_behind_the_router(fleet: tuple[Proxy, str]) -> None:
    proxy, _ = fleet
    await proxy.open("r")
    assert (await proxy.chat("r", [user("go")], stop=["brown"]))["content"] == "the quick "
    await until(lambda: live(proxy) == 0)
    assert max(made for engine in proxy.engines.values() for made in engine.made.values()) < len(ANSWER)


async def test_a_worker_that_dies_costs_no_token(fleet: tuple[Proxy, str]) -> None:
    proxy, _ = fleet
    await proxy.open("r")
    proxy.engines["a"].hang_up_after = 12
    assert (await proxy.chat("r", [user("go")]))["content"] == ANSWER
    trace = await proxy.close("r")
    assert (trace.continued_calls, trace.interrupted_calls) == (1, 0)
