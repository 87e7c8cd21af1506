"""The proxy over two real engine processes: what is sampled does not depend on where, and KV moves ahead of a call.

The model has the shape and tokenizer of the demo's policy and random weights, so that greedy answers are long.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from gyre.actors.messages import DrainEngine, EngineRoute, SetRoutes
from gyre.engine.access import http_key
from gyre.engine.client import EngineClient
from gyre.ids import CellId
from gyre.proxy.gateway import Gateway, GatewayConfig

from .conftest import Proxy, until

POLICY = Path(__file__).parents[2] / "gyre" / "demo" / "policy"
BLOCK_TOKENS = 8
ANSWER_TOKENS = 300


class Engine:
    """A process of the local engine. It has of a ScriptedEngine what `Proxy.route` needs."""

    def __init__(self, folder: Path, model: Path, secret: Path) -> None:
        self.ready = folder / "ready.json"
        self.key = http_key(secret.read_text())
        log = (folder / "log").open("wb")
        options = ["--version", "1", "--block-tokens", str(BLOCK_TOKENS), "--threads", "1"]
        files = ["--model", str(model), "--ready-file", str(self.ready), "--secret-file", str(secret)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gyre.engine.local", *options, *files],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        log.close()

    @property
    def url(self) -> str:
        return json.loads(self.ready.read_text())["url"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    shutil.copytree(POLICY, folder)
    noise = torch.Generator().manual_seed(7)
    weights = load_file(str(folder / "model.safetensors"))
    for name, tensor in weights.items():
        if tensor.ndim > 1:
            weights[name] = torch.randn(tensor.shape, generator=noise) * 1.5 * tensor.shape[-1] ** -0.5
    save_file(weights, str(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[dict[str, Engine]]:
    folder = tmp_path_factory.mktemp("engines")
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(16))
    secret.chmod(0o600)
    engines: dict[str, Engine] = {}
    for cell in ("a", "b"):
        (folder / cell).mkdir()
        engines[cell] = Engine(folder / cell, model, secret)
    try:
        yield engines
    finally:
        for engine in engines.values():
            if engine.process.poll() is None:
                os.kill(engine.process.pid, signal.SIGTERM)
            engine.process.wait(30)


@pytest.fixture
async def proxy(engines: dict[str, Engine], model: Path, tmp_path: Path) -> AsyncIterator[Proxy]:
    for engine in engines.values():
        await until(lambda engine=engine: engine.ready.exists() or engine.process.poll() is not None, 120)
        assert engine.ready.exists(), engine.ready.with_name("log").read_text()
    config = GatewayConfig(
        journal_dir=tmp_path / "journal",
        trajectories_dir=tmp_path / "trajectories",
        model_dir=model,
        context_tokens=2000,
        block_tokens=BLOCK_TOKENS,
        thinking=True,
        engine_key=engines["a"].key,
    )
    async with AsyncExitStack() as stack:
        gateway = Gateway(config)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        proxy = Proxy(gateway, engines, http, version=1)  # type: ignore[arg-type]
        await proxy.route()
        await flush(proxy)
        yield proxy


async def flush(proxy: Proxy) -> None:
    """Nothing cached anywhere, so that what is found on an engine was moved there."""
    for engine in proxy.engines.values():
        async with EngineClient(engine.url, key=engine.key) as client:
            await client.flush_cache()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


PROMPT = [user("write a b c in one line per word and count the words of the last line " * 4)]


async def greedy(proxy: Proxy, run: str) -> list[int]:
    """The tokens of the run's one call."""
    await proxy.chat(run, PROMPT)
    tree = proxy.session(run).tree
    return list(tree.output_ids(tree.calls[0]))


async def until_sampled(proxy: Proxy, tokens: int) -> str:
    """Until some call has so many tokens; returns its cell."""

    def sampled() -> list[str]:
        seats = proxy.gateway._engines._seats
        return [seat.cell for seat in seats if len(seat.sitter.output) >= tokens]  # type: ignore[attr-defined]

    await until(lambda: bool(sampled()))
    return sampled()[0]


@pytest.mark.parametrize("after_tokens", [5, 60, 150])
async def test_a_continued_answer_is_the_uninterrupted_one_and_its_prefix_is_not_computed_again(
    proxy: Proxy, after_tokens: int
) -> None:
    for run in ("plain", "moved"):
        await proxy.open(run, temperature=0.0, max_tokens=ANSWER_TOKENS)
    expected = await greedy(proxy, "plain")
    assert len(expected) == ANSWER_TOKENS
    await proxy.route(closed=("b",))
    await flush(proxy)
    calling = asyncio.create_task(greedy(proxy, "moved"))
    leaving = await until_sampled(proxy, after_tokens)
    await proxy.route(closed=())
    report = await proxy.gateway.drain(DrainEngine(CellId(leaving), True))
    assert await calling == expected
    assert report.requests == 1
    assert report.moved_blocks >= after_tokens // BLOCK_TOKENS
    assert report.moved_bytes > 0
    trace = await proxy.close("moved")
    assert (trace.continued_calls, trace.prefix_tokens_recomputed, trace.interrupted_calls) == (1, 0, 0)


async def test_a_run_that_was_between_calls_finds_its_prefix_on_the_next_cell(proxy: Proxy) -> None:
    await proxy.open("r", temperature=0.0, max_tokens=100)
    first = await proxy.chat("r", PROMPT)
    known = proxy.session("r").ends()[0].cached
    assert known is not None
    report = await proxy.gateway.drain(DrainEngine(known.cell, True))
    assert (report.requests, report.moved_blocks > 0) == (0, True)
    history = [*PROMPT, {"role": "assistant", "content": first["content"]}, user("do it")]
    status, answer = await proxy.post("r", "chat/completions", {"model": "m", "messages": history})
    assert status == 200
    tree = proxy.session("r").tree
    known = tree.prompt_tokens(tree.calls[0]) + tree.output_tokens(tree.calls[0])
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (known - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert (await proxy.close("r")).prefix_tokens_recomputed == 0


async def test_a_call_lives_through_a_change_of_weights_and_each_token_has_its_version(
    proxy: Proxy, model: Path
) -> None:
    await proxy.open("r", temperature=0.0, max_tokens=ANSWER_TOKENS)
    calling = asyncio.create_task(greedy(proxy, "r"))
    await until_sampled(proxy, 50)
    proxy.version = 2
    await proxy.route(versions={"a": 1, "b": 1})  # from here on no engine is at the authoritative version
    for cell in ("a", "b"):
        await proxy.gateway.drain(DrainEngine(CellId(cell), False))
    assert proxy.gateway.status().calls_waiting == 1
    for engine in proxy.engines.values():
        async with EngineClient(engine.url, key=engine.key) as client:
            await client.update_weights(str(model), 2)
    await proxy.route()
    output = await calling
    tree = proxy.session("r").tree
    versions = list(tree.output_versions(tree.calls[0]))
    assert (versions, set(versions)) == (sorted(versions), {1, 2})
    assert versions.count(1) >= 50
    trace = await proxy.close("r")
    assert (trace.lineages[0].lowest_version, trace.prefix_tokens_recomputed) == (1, 0)
    # The same weights under another version: the same greedy tokens, none of them from the old version's cache.
    await proxy.open("again", temperature=0.0, max_tokens=ANSWER_TOKENS)
    assert await greedy(proxy, "again") == output


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_when_its_client_goes_away_the_engine_stops_decoding(proxy: Proxy, path: str) -> None:
    await proxy.open("r", temperature=0.0, max_tokens=ANSWER_TOKENS)
    asked = {"input": PROMPT} if path == "responses" else {"messages": PROMPT, "max_tokens": ANSWER_TOKENS}
    asking = asyncio.create_task(proxy.post("r", path, {"model": "m", "stream": True, **asked}))
    cell = await until_sampled(proxy, 20)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    engine = proxy.engines[cell]
    async with EngineClient(engine.url, key=engine.key) as client, asyncio.timeout(10):
        while (await client.loads()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    session = proxy.session("r")
    await until(lambda: not proxy.gateway.status().calls_in_flight)
    (call,) = session.unfinished()
    assert 20 <= len(call.output) < ANSWER_TOKENS


async def test_an_engine_killed_in_an_answer_takes_no_token_with_it(proxy: Proxy) -> None:
    proxy.version = 2
    await proxy.route()
    for run in ("plain", "killed"):
        await proxy.open(run, temperature=0.0, max_tokens=ANSWER_TOKENS)
    expected = await greedy(proxy, "plain")
    calling = asyncio.create_task(greedy(proxy, "killed"))
    cell = await until_sampled(proxy, 50)
    process = proxy.engines[cell].process  # type: ignore[attr-defined]
    process.send_signal(signal.SIGKILL)
    assert await calling == expected
    trace = await proxy.close("killed")
    assert (trace.continued_calls, trace.interrupted_calls) == (1, 0)
    await proxy.gateway.set_routes(
        SetRoutes(2, tuple(EngineRoute(CellId(c), e.url, 2, c != cell, 4) for c, e in proxy.engines.items()))
    )
    assert (await proxy.chat("plain", [user("and")]))["role"] == "assistant"
