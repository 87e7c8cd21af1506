"""A stream is held until its answer is whole: first its headers, then, when that takes long, behind a heartbeat."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from gyre.harness.profiles import profile
from gyre.harness.wire import Hold

from .conftest import Proxy, StartProxy

ANSWER = "0123456789" * 3
GO: list[Any] = [{"role": "user", "content": "go"}]


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    proxy = await start_proxy(lambda head: ANSWER, token_s=0.01)
    await proxy.open("r")
    return proxy


def hold(proxy: Proxy, run: str, headers_s: float, heartbeat_s: float) -> None:
    session = proxy.session(run)
    session.wire = replace(session.wire, hold=Hold(headers_s, heartbeat_s))


async def test_nothing_is_sent_before_the_answer_is_whole(proxy: Proxy) -> None:
    url = f"{proxy.base('r')}/v1/chat/completions"
    body = {"model": "m", "messages": GO, "stream": True}
    asking = asyncio.create_task(proxy.http.post(url, json=body).__aenter__())
    await proxy.until_sampled("a", 20)
    assert not asking.done()
    response = await asking
    assert response.status == 200
    assert ANSWER.encode() in await response.read()
    response.release()


async def test_official_clients_bear_a_heartbeat_and_then_get_the_answer(proxy: Proxy) -> None:
    hold(proxy, "r", 0.02, 0.02)
    base = proxy.base("r")
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=GO, stream=True)
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert said == ANSWER
    async with (
        anthropic.AsyncAnthropic(base_url=base, api_key="x", max_retries=0) as client,
        client.messages.stream(model="m", max_tokens=100, messages=[{"role": "user", "content": "on"}]) as stream,
    ):
        assert await stream.get_final_text() == ANSWER


async def test_heartbeats_are_comments_or_pings_and_a_fault_after_them_is_an_event(proxy: Proxy) -> None:
    for path, beat, fault in (
        ("chat/completions", b": held\n\n", b'data: {"error":{"message":"the run was closed"'),
        (
            "messages",
            b"event: ping\n",
            b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error"',
        ),
    ):
        run = path.partition("/")[0]
        await proxy.open(run)
        hold(proxy, run, 0.01, 0.01)
        body = {"model": "m", "messages": GO, "stream": True, "max_tokens": 99}
        async with proxy.http.post(f"{proxy.base(run)}/v1/{path}", json=body) as response:
            await proxy.until_sampled("a", 3)
            await proxy.close(run)
            text = await response.read()
        assert text.startswith(beat)
        assert fault in text


async def test_a_client_that_goes_away_from_a_stream_stops_the_engine(proxy: Proxy) -> None:
    body = {"model": "m", "messages": GO, "stream": True}
    asking = asyncio.create_task(proxy.post("r", "chat/completions", body))
    await proxy.until_sampled("a", 3)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(20):
        while proxy.engines["a"].live:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(next(iter(proxy.session("r")._calls.values())).output) < len(ANSWER)
    trace = await proxy.close("r")
    assert (trace.calls, trace.counted_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("harness", "asks_again_after_s"),
    [("claude-code", 290), ("codex", 300), ("opencode", 300), ("qwen-code", 120), ("mini-swe-agent", 600)],
)
def test_no_harness_is_shown_a_stream_that_it_would_give_up_before_its_answer(
    harness: str, asks_again_after_s: int
) -> None:
    """Claude Code gives a silent stream up, whatever its heartbeats; qwen-code takes one that is cut for an answer."""
    hold = profile(harness).wire.hold
    if harness in ("claude-code", "qwen-code"):
        assert hold.headers_s > asks_again_after_s  # it asks again, and joins its call, before it has any headers
    assert hold.heartbeat_s < asks_again_after_s / 2


async def test_what_no_engine_could_answer_in_time_may_be_asked_again(start_proxy: StartProxy) -> None:
    """A bare refusal ends some harnesses: they are told when to come again."""
    proxy = await start_proxy(lambda head: ANSWER, wait_s=0.05)
    await proxy.open("r")
    await proxy.route(closed=("a",))
    body = {"model": "m", "messages": GO, "max_tokens": 9}
    for path in ("chat/completions", "messages"):
        async with proxy.http.post(f"{proxy.base('r')}/v1/{path}", json=body) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
