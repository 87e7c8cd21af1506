"""A large request is worked on aside: meanwhile its run goes on, may be asked again, left, and closed."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from typing import Any

import pytest

from gyre.proxy import front
from gyre.proxy.aside import LARGE_BYTES
from gyre.proxy.journal_writer import read_journal
from gyre.proxy.session import Session
from gyre.trajectory.journal import CallStarted

from .conftest import Proxy, StartProxy, until

LARGE: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello wor " * (LARGE_BYTES // 10 + 1)}],
}
SMALL = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    proxy = await start_proxy(lambda head: f"said {len(head)}", context_tokens=1_000_000)
    await proxy.open("r")
    return proxy


class Gate:
    """Holds each call that begins, in whatever thread, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = 0
        self.opened = threading.Event()
        begin = Session.begin

        def held(session: Session, *args: Any) -> Any:
            self.reached += 1
            assert threading.current_thread() is not threading.main_thread()
            assert self.opened.wait(30)
            return begin(session, *args)

        monkeypatch.setattr(Session, "begin", held)


async def test_it_is_answered_as_any_other(proxy: Proxy) -> None:
    message = await proxy.chat("r", LARGE["messages"])
    turn = {"role": "assistant", "content": message["content"]}
    await proxy.chat("r", [*LARGE["messages"], turn, {"role": "user", "content": "on"}])
    trace = await proxy.close("r")
    assert (trace.calls, len(trace.lineages)) == (2, 1)


async def test_the_same_request_twice_at_once_is_one_call(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    asking = [asyncio.create_task(proxy.post("r", "chat/completions", LARGE)) for _ in range(3)]
    await until(lambda: gate.reached > 0)
    await asyncio.sleep(0.3)
    gate.opened.set()
    first, *others = await asyncio.gather(*asking)
    assert first[0] == 200
    assert others == [first, first]
    assert (gate.reached, len(proxy.engines["a"].requests)) == (1, 1)


async def test_a_client_that_goes_away_meanwhile_leaves_a_call_that_a_retry_finds(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    asking = asyncio.create_task(proxy.post("r", "chat/completions", LARGE))
    await until(lambda: gate.reached > 0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    gate.opened.set()
    await until(lambda: len(proxy.session("r").unfinished()) == 1)
    assert not proxy.engines["a"].requests
    assert (await proxy.post("r", "chat/completions", LARGE))[0] == 200
    assert gate.reached == 1
    (folder,) = (proxy.gateway.config.journal_dir / "open").glob("*/*")
    assert sum(isinstance(record, CallStarted) for record in read_journal(folder)) == 1


async def test_a_run_that_is_closed_meanwhile_says_so(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    asking = asyncio.create_task(proxy.post("r", "messages", {**LARGE, "max_tokens": 9}))
    await until(lambda: gate.reached > 0)
    closing = asyncio.create_task(proxy.close("r"))
    await asyncio.sleep(0.1)
    gate.opened.set()
    trace = await closing
    assert (trace.calls, trace.failure, trace.interrupted_calls) == (0, "", 0)
    status, answer = await asking
    assert (status, answer["error"]["message"]) == (410, "the run was closed")


async def test_a_prompt_that_cannot_fit_is_not_rendered(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x" * 33_000_000}]}
    status, answer = await proxy.post("r", "messages", body)
    assert (status, answer["error"]["message"]) == (400, "prompt is too long: 8250000 tokens > 1000000 maximum")
    assert not gate.reached
    assert len(json.dumps(answer)) < 1000
    assert (await proxy.post("r", "messages/count_tokens", {"model": "m", "messages": SMALL}))[1]["input_tokens"] > 0


async def test_packed_bodies_are_read_two_at_a_time_and_unpacked_aside(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, unpack = front.read_body, front.unpacked
    opened = threading.Event()
    bodies = 0

    async def counted(*args: Any) -> bytes:
        nonlocal bodies
        bodies += 1
        return await read(*args)

    def held(*args: Any) -> bytes:
        assert threading.current_thread() is not threading.main_thread()
        assert opened.wait(30)
        return unpack(*args)

    monkeypatch.setattr(front, "read_body", counted)
    monkeypatch.setattr(front, "unpacked", held)
    data = gzip.compress(json.dumps({"model": "m", "messages": SMALL}).encode())

    async def asked() -> int:
        url = f"{proxy.base('r')}/v1/chat/completions"
        async with proxy.http.post(url, data=data, headers={"Content-Encoding": "gzip"}) as response:
            return response.status

    asking = [asyncio.create_task(asked()) for _ in range(6)]
    await until(lambda: bodies == 2)
    await asyncio.sleep(0.3)
    assert bodies == 2
    opened.set()
    assert set(await asyncio.gather(*asking)) == {200}
    assert bodies == 6
