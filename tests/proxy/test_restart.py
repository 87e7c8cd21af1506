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

    def __init__(self, folder: Path, model_dir: Path, engine: ScriptedEngine, http: aiohttp.ClientSession) -> None:
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
        engines = [{"cell": "a", "url": self.engine.url, "version": 0, "accepting": True}]
        await self.order("set_routes", version=0, engines=engines)

    async def order(self, method: str, **body: Any) -> Any:
        async with self.http.post(f"{self._control}/{method}", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def open(self, run: str) -> str:
        await self.order(
            "open_run", run=run, attempt=1, key=f"key-{run}", profile="scripted", temperature=1.0, max_tokens=500
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


async def test_killed_in_the_middle_of_a_call_the_retry_gets_the_answer_and_no_token_counts_twice(
    gateway: GatewayProcess,
) -> None:
    base = await gateway.open("r")
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=8) as client:
        first = await client.chat.completions.create(model="m", messages=[user("one")])
        said = first.choices[0].message.content
        assert said == ANSWER
        gateway.engine.held.clear()
        history = [user("one"), {"role": "assistant", "content": said}, user("two")]
        # An unmodified client, with no more than its own retries.
        calling = asyncio.create_task(client.chat.completions.create(model="m", messages=history))
        await until(lambda: bool(gateway.engine.live))
        left_over = next(iter(gateway.engine.live))
        gateway.end(signal.SIGKILL)
        port = gateway.base_url
        gateway.engine.held.set()
        await gateway.start()
        assert gateway.base_url == port
        answer = await calling
        assert answer.choices[0].message.content == ANSWER
        history += [{"role": "assistant", "content": ANSWER}, user("three")]
        await client.chat.completions.create(model="m", messages=history)
    assert "*" in gateway.engine.aborted
    assert left_over not in gateway.engine.live
    trace = await gateway.order("close_run", run="r", attempt=1)
    assert (trace["calls"], trace["sampled_tokens"], trace["counted_tokens"]) == (3, *[3 * (len(ANSWER) + 1)] * 2)
    assert len(trace["lineages"]) == 1
    assert trace["interrupted_calls"] == 0


async def test_killed_in_the_middle_of_a_stream_the_client_has_seen_nothing_that_it_cannot_retry(
    gateway: GatewayProcess,
) -> None:
    base = await gateway.open("r")
    gateway.engine.token_s = 0.02
    async with anthropic.AsyncAnthropic(base_url=base, api_key="x", max_retries=8) as client:

        async def streamed() -> str:
            async with client.messages.stream(model="m", max_tokens=100, messages=[user("go")]) as stream:
                return "".join([text async for text in stream.text_stream])

        calling = asyncio.create_task(streamed())
        await until(lambda: any(made >= 10 for made in gateway.engine.made.values()))
        gateway.end(signal.SIGKILL)
        await gateway.start()
        assert await calling == ANSWER
    trace = await gateway.order("close_run", run="r", attempt=1)
    assert (trace["calls"], trace["sampled_tokens"]) == (1, len(ANSWER) + 1)


async def test_a_restored_run_knows_its_answers_tool_calls_and_retries(gateway: GatewayProcess) -> None:
    base = await gateway.open("r")
    gateway.engine.script = lambda head: (
        "done" if "<tool_response>" in head else '<tool_call>\n{"name": "bash", "arguments": {"a":  1.0}}\n</tool_call>'
    )
    await gateway.open("idle")
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=8) as client:
        first = await client.chat.completions.create(model="m", messages=[user("go")], tools=TOOLS)
        gateway.end(signal.SIGKILL)
        await gateway.start()
        assert (await gateway.order("status"))["open_runs"] == 2
        again = await client.chat.completions.create(model="m", messages=[user("go")], tools=TOOLS)
        assert again == first
        calls = first.choices[0].message.tool_calls
        assert calls is not None
        back = {"id": calls[0].id, "type": "function", "function": {"name": "bash", "arguments": '{"a":1}'}}
        history = [
            user("go"),
            {"role": "assistant", "content": None, "tool_calls": [back]},
            {"role": "tool", "tool_call_id": calls[0].id, "content": "out"},
        ]
        await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
    assert len(gateway.engine.requests) == 2
    trace = await gateway.order("close_run", run="r", attempt=1)
    assert (trace["calls"], len(trace["lineages"])) == (2, 1)
    # A closed run stays closed over the next death, and its trace is still to be had.
    gateway.end(signal.SIGKILL)
    await gateway.start()
    assert (await gateway.order("status"))["open_runs"] == 1
    assert await gateway.order("close_run", run="r", attempt=1) == trace


async def test_a_gateway_that_is_ended_lets_go_of_the_engine_and_its_harness_finds_the_next_one(
    gateway: GatewayProcess,
) -> None:
    base = await gateway.open("r")
    gateway.engine.token_s = 0.02
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=8) as client:
        calling = asyncio.create_task(client.chat.completions.create(model="m", messages=[user("go")]))
        await until(lambda: any(made >= 10 for made in gateway.engine.made.values()))
        await asyncio.to_thread(gateway.end, signal.SIGTERM)
        assert gateway.process is not None
        assert gateway.process.returncode == 0
        await until(lambda: not gateway.engine.live)
        gateway.engine.token_s = 0
        await gateway.start()
        assert (await calling).choices[0].message.content == ANSWER
    # The tokens so far were in the journal: the next gateway went on from them.
    first, second = gateway.engine.requests
    assert len(second["input_ids"]) >= len(first["input_ids"]) + 10
    trace = await gateway.order("close_run", run="r", attempt=1)
    assert trace["sampled_tokens"] == len(ANSWER) + 1
