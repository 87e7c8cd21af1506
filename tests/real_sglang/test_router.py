"""The real sglang-router between the gateway and two engines: which promises hold (docs/routing.md).

The workers are local engines, which sample the same tokens wherever they are asked; SGLang itself is behind it once.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine.conftest import EngineUnderTest
from engine.contract import LONG, Live, eventually, new_rid
from proxy.conftest import Proxy
from proxy.test_local_engine import ANSWER_TOKENS, BLOCK_TOKENS, Engine, until_sampled, user
from proxy.test_local_engine import engines as workers
from proxy.test_local_engine import model as model

from gyre.actors.messages import DrainEngine, EngineRoute, SetRoutes
from gyre.engine.client import EngineClient, EngineRefused, GenerateRequest, VersionSpan
from gyre.engine.ports import free_port
from gyre.ids import CellId
from gyre.proxy.gateway import Gateway, GatewayConfig

from .servers import KEY, MISSING, PYTHON, Server

__all__ = ["workers"]

FLEET = CellId("fleet")
OPTIONS = (
    *("--policy", "cache_aware", "--disable-retries", "--request-timeout-secs", "86400"),
    *("--cb-failure-threshold", "1", "--cb-timeout-duration-secs", "10"),
)
"""Those of docs/routing.md."""
_START_S = 120.0


@contextmanager
def sglang_router(folder: Path, key: str, *urls: str) -> Iterator[str]:
    """A router before the workers at `urls`; its address."""
    port = free_port("127.0.0.1")
    addresses = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port("127.0.0.1")))
    argv = (str(PYTHON), "-m", "sglang_router.launch_router", *addresses, *OPTIONS, "--api-key", key)
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(
            (*argv, "--worker-urls", *urls),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def until_it_serves(url: str, key: str) -> None:
    """It is up before it knows its workers."""

    async def serves() -> bool:
        try:
            async with aiohttp.ClientSession() as session:
                body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
                headers = {"Authorization": f"Bearer {key}"}
                async with session.post(f"{url}/generate", json=body, headers=headers) as answer:
                    return answer.status == 200
        except aiohttp.ClientError:
            return False

    await eventually(serves)


@pytest.fixture(scope="module")
def router(workers: dict[str, Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if MISSING:
        pytest.skip(MISSING)
    for engine in workers.values():
        while not engine.ready.exists():
            assert engine.process.poll() is None
    urls = (engine.url for engine in workers.values())
    with sglang_router(tmp_path_factory.mktemp("router"), workers["a"].key, *urls) as url:
        yield url


@pytest.fixture
async def proxy(router: str, workers: dict[str, Engine], model: Path, tmp_path: Path) -> AsyncIterator[Proxy]:
    """A gateway that knows the router, as one engine with many slots."""
    await until_it_serves(router, workers["a"].key)
    config = GatewayConfig(
        journal_dir=tmp_path / "journal",
        trajectories_dir=tmp_path / "trajectories",
        model_dir=model,
        context_tokens=2000,
        block_tokens=BLOCK_TOKENS,
        thinking=True,
        engine_key=workers["a"].key,
    )
    async with AsyncExitStack() as stack:
        gateway = Gateway(config)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        proxy = Proxy(gateway, workers, http, version=1)  # type: ignore[arg-type]
        await route(proxy, router, 1)
        yield proxy


async def route(proxy: Proxy, url: str, version: int, *, accepting: bool = True) -> None:
    await proxy.gateway.set_routes(SetRoutes(version, (EngineRoute(FLEET, url, version, accepting, slots=64),)))


async def open_runs(proxy: Proxy, *runs: str) -> None:
    for run in runs:
        await proxy.open(run, temperature=0.0, max_tokens=ANSWER_TOKENS)


async def live(workers: dict[str, Engine]) -> list[int]:
    """Requests at each worker that still lives, asked of itself."""
    found: list[int] = []
    for worker in workers.values():
        if worker.process.poll() is None:
            async with EngineClient(worker.url, key=worker.key) as client:
                loads = await client.loads()
                found.append(loads.running + loads.waiting)
    return found


async def nothing_live(workers: dict[str, Engine]) -> bool:
    return not any(await live(workers))


async def test_calls_are_spread_and_are_what_a_worker_samples_alone(proxy: Proxy, workers: dict[str, Engine]) -> None:
    runs = [f"r{place}" for place in range(6)]
    await open_runs(proxy, *runs)
    prompts = {run: [user(f"{place}, count the words of this line " * 3)] for place, run in enumerate(runs)}
    calls = [asyncio.create_task(proxy.chat(run, prompts[run])) for run in runs]
    spread: list[int] = []
    while not all(call.done() for call in calls):
        spread = max(spread, await live(workers), key=lambda counts: (min(counts, default=0), sum(counts)))
    assert min(spread) > 0
    for run in runs:
        await calls[runs.index(run)]
        tree = proxy.session(run).tree
        request = tree.calls[0]
        prompt, sampled = list(tree.prompt_ids(request)), list(tree.output_ids(request))
        assert set(tree.output_versions(request)) == {1}
        async with EngineClient(workers["a"].url, key=workers["a"].key) as client:
            assert await sampled_by(client, prompt, len(sampled)) == sampled


async def sampled_by(client: EngineClient, prompt: list[int], tokens: int) -> list[int]:
    request = GenerateRequest(new_rid(), prompt, tokens, temperature=0.0, ignore_eos=True, version=1)
    return [token async for chunk in client.generate(request) for token in chunk.token_ids]


async def test_a_stopped_call_lives_at_no_worker_and_goes_on_where_it_was(
    proxy: Proxy, workers: dict[str, Engine], router: str
) -> None:
    await open_runs(proxy, "whole", "stopped")
    prompt = [user("two, count the words of this line " * 3)]
    whole = await greedy(proxy, "whole", prompt)
    calling = asyncio.create_task(greedy(proxy, "stopped", prompt))
    await until_sampled(proxy, 40)
    await route(proxy, router, 1, accepting=False)
    async with asyncio.timeout(10):
        # A router takes no order to abort: the connection is ended instead, and the router ends its own.
        assert (await proxy.gateway.drain(DrainEngine(FLEET, move=False))).requests == 1
    async with asyncio.timeout(10):
        await eventually(lambda: nothing_live(workers))
    assert not calling.done()
    await route(proxy, router, 1)
    assert await calling == whole
    trace = await proxy.close("stopped")
    assert (trace.calls, trace.interrupted_calls, trace.continued_calls) == (1, 0, 1)


async def test_a_router_takes_no_order_that_is_the_owners(router: str, workers: dict[str, Engine]) -> None:
    """So a cell updates and asks the workers themselves."""
    async with EngineClient(router, key=workers["a"].key) as client:
        for asking in (client.info(), client.loads(), client.abort("r"), client.pause(), client.release_memory()):
            with pytest.raises(EngineRefused) as refusal:
                await asking
            assert refusal.value.status == 404


async def test_sglang_behind_it_lets_go_when_the_connection_ends(
    engine: EngineUnderTest, server: Server, tmp_path: Path
) -> None:
    async def running() -> bool:
        return (await engine.client.loads()).running == 1

    async def idle() -> bool:
        return (await engine.client.loads()).running == 0

    with sglang_router(tmp_path, KEY, server.url) as url:
        await until_it_serves(url, KEY)
        async with EngineClient(url, key=KEY) as client:
            behind = replace(engine, client=client)
            request = engine.request(new_rid(), 60, max_new_tokens=100, stream_interval=16)
            through = await behind.run(request)
            assert through.token_ids == (await engine.run(replace(request, rid=new_rid()))).token_ids
            assert through.last.version_spans == (VersionSpan(1, 0, 100),)
            assert len(through.chunks) > 2 + 100 // 16, "the router drops stream_interval: give SGLang its option"
            async with Live(behind, engine.request(new_rid(), 60, max_new_tokens=LONG), first=20):
                await eventually(running)
            await eventually(idle)


async def test_a_worker_that_is_killed_costs_no_token(proxy: Proxy, workers: dict[str, Engine]) -> None:
    """The last one here: it leaves one worker."""
    runs = [f"k{place}" for place in range(4)]
    await open_runs(proxy, "whole", *runs)
    prompt = [user("three, count the words of this line " * 3)]
    whole = await greedy(proxy, "whole", prompt)
    calls = [asyncio.create_task(greedy(proxy, run, prompt)) for run in runs]
    await until_sampled(proxy, 20)
    busiest = max(workers, key=(dict(zip(workers, await live(workers), strict=True))).__getitem__)
    workers[busiest].process.kill()
    assert await asyncio.gather(*calls) == [whole] * 4
    traces = [await proxy.close(run) for run in runs]
    assert sum(trace.continued_calls for trace in traces) >= 1
    assert [trace.interrupted_calls for trace in traces] == [0] * 4


async def greedy(proxy: Proxy, run: str, prompt: list[dict[str, Any]]) -> list[int]:
    """The tokens of the run's one call."""
    await proxy.chat(run, prompt)
    tree = proxy.session(run).tree
    return list(tree.output_ids(tree.calls[0]))
