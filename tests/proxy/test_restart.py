"""A gateway process that is killed comes back with its runs: same port, same trees, same answers; nothing is sampled twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from .conftest import until
from .scripted_engine import ScriptedEngine

RUNNER = Path(__file__).with_name("gateway_process.py")
ANSWER = "the quick brown fox jumps over the lazy dog"
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


class GatewayProcess:
    """The process, its engine in this one, and a client."""

    def __init__(
        self, folder: Path, model_dir: Path, engine: ScriptedEngine, http: aiohttp.ClientSession, **settings: Any
    ) -> None:
        self.engine = engine
        self.http = http
        self.folder = folder
        self.ready = folder / "ready.json"
        self.process: subprocess.Popen[bytes] | None = None
        self.base_url = ""
        self._control = ""
        self._config = {
            "journal_dir": str(folder / "journal"),
            "trajectories_dir": str(folder / "trajectories"),
            "model_dir": str(model_dir),
            "context_tokens": 100_000,
            "block_tokens": 4,
            "ready": str(self.ready),
            **settings,
        }

    async def start(self, *, route: bool = True) -> None:
        self.ready.unlink(missing_ok=True)
        log = (self.folder / "gateway.log").open("ab")
        process = self.process = subprocess.Popen(
            [sys.executable, str(RUNNER), json.dumps(self._config)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(RUNNER.parents[2])},
        )
        log.close()
        await until(lambda: self.ready.exists() or process.poll() is not None, 60)
        assert process.poll() is None, (self.folder / "gateway.log").read_text()
        found = json.loads(self.ready.read_text())
        self.base_url, self._control = found["base_url"], f"http://127.0.0.1:{found['control']}"
        if route:
            await self.route()

    async def route(self) -> None:
        engines = [{"cell": "a", "url": self.engine.url, "version": 0, "accepting": True, "slots": 64}]
        await self.order("set_routes", version=0, engines=engines)

    async def order(self, method: str, **body: Any) -> Any:
        async with self.http.post(f"{self._control}/{method}", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def open(self, run: str) -> str:
        await self.order(
            "open_run",
            run=run,
            group="g",
            attempt=1,
            key=f"key-{run}",
            profile="scripted",
            temperature=1.0,
            max_tokens=500,
        )
        return f"{self.base_url}/run/{run}/key-{run}"

    def end(self, number: int) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                os.kill(self.process.pid, number)
            self.process.wait(20)


@pytest.fixture
async def gateway(tmp_path: Path, model_dir: Path) -> AsyncIterator[GatewayProcess]:
    engine = ScriptedEngine(lambda head: ANSWER)
    await engine.start()
    async with aiohttp.ClientSession() as http:
        process = GatewayProcess(tmp_path, model_dir, engine, http)
        await process.start()
        try:
            yield process
        finally:
            process.end(signal.SIGKILL)
            await engine.stop()


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def script(head: str) -> str:
    if head.count("<tool_response>") == 0:
        return '<tool_call>\n{"name": "bash", "arguments": {"a":  1.0}}\n</tool_call>'
    return ANSWER


async def test_killed_in_the_middle_of_a_call_the_run_goes_on_and_no_token_counts_twice(
    gateway: GatewayProcess,
) -> None:
    base = await gateway.open("r")
    await gateway.open("idle")
    engine = gateway.engine
    engine.script = script
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=10) as client:

        async def call(*history: Any) -> Any:
            return await client.chat.completions.create(model="m", messages=list(history), tools=TOOLS)

        first = await call(user("go"))
        named = first.choices[0].message.tool_calls[0].id
        # As many harnesses send it back: the arguments are written anew.
        back = {"id": named, "type": "function", "function": {"name": "bash", "arguments": '{"a":1}'}}
        turn = [
            user("go"),
            {"role": "assistant", "content": None, "tool_calls": [back]},
            {"role": "tool", "tool_call_id": named, "content": "out"},
        ]
        engine.held.clear()
        # An unmodified client, with no more than its own retries.
        calling = asyncio.create_task(call(*turn))
        await until(lambda: bool(engine.live))
        (left_over,) = engine.live
        address = gateway.base_url
        gateway.end(signal.SIGKILL)
        engine.held.set()
        await gateway.start()
        assert gateway.base_url == address
        assert (await calling).choices[0].message.content == ANSWER
        assert "*" in engine.aborted
        assert left_over not in engine.live
        assert (await gateway.order("status"))["open_runs"] == 2
        # A retry from before the death has the same answer, by the same names.
        requests = len(engine.requests)
        assert await call(user("go")) == first
        assert len(engine.requests) == requests
        await call(*turn, {"role": "assistant", "content": ANSWER}, user("on"))
    trace = await gateway.order("close_run", run="r", attempt=1)
    sampled = len(script("")) + 2 * len(ANSWER) + 3 - 2 * (len("<tool_call>") - 1) - 1  # a tag is one token
    assert (trace["calls"], trace["sampled_tokens"], trace["counted_tokens"]) == (3, sampled, sampled)
    assert len(trace["lineages"]) == 1
    assert trace["interrupted_calls"] == 0
    # A closed run stays closed over the next death, and its trace is still to be had.
    gateway.end(signal.SIGKILL)
    await gateway.start()
    assert (await gateway.order("status"))["open_runs"] == 1
    assert await gateway.order("close_run", run="r", attempt=1) == trace
    for address, status in ((base, 410), (f"{base}-not", 401), (f"{gateway.base_url}/run/nobody/key-r", 401)):
        async with gateway.http.get(f"{address}/v1/models") as response:
            assert response.status == status, address


async def test_killed_or_ended_in_the_middle_of_a_stream_the_client_has_seen_nothing_that_it_cannot_retry(
    gateway: GatewayProcess,
) -> None:
    base = await gateway.open("r")
    engine = gateway.engine
    async with anthropic.AsyncAnthropic(base_url=base, api_key="x", max_retries=10) as client:

        async def streamed(text: str) -> str:
            async with client.messages.stream(model="m", max_tokens=100, messages=[user(text)]) as stream:
                return "".join([part async for part in stream.text_stream])

        engine.token_s = 0.1
        calling = asyncio.create_task(streamed("one"))
        await until(lambda: any(made >= 5 for made in engine.made.values()))
        gateway.end(signal.SIGKILL)
        engine.token_s = 0
        await gateway.start()
        assert await calling == ANSWER

        engine.token_s = 0.2
        requests = len(engine.requests)
        calling = asyncio.create_task(streamed("two"))
        await until(
            lambda: len(engine.requests) > requests and any(engine.made.get(rid, 0) >= 5 for rid in engine.live)
        )
        await asyncio.to_thread(gateway.end, signal.SIGTERM)
        assert gateway.process is not None
        assert gateway.process.returncode == 0
        await until(lambda: not engine.live)
        engine.token_s = 0
        await gateway.start()
        assert await calling == ANSWER
    # Ended in order, the tokens so far were in the journal, and the next gateway went on from them.
    first, second = engine.requests[requests:]
    assert len(second["input_ids"]) >= len(first["input_ids"]) + 5
    trace = await gateway.order("close_run", run="r", attempt=1)
    assert (trace["calls"], trace["sampled_tokens"]) == (2, 2 * (len(ANSWER) + 1))
