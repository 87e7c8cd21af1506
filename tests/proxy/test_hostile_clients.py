"""Clients that mean harm, against a gateway in a process of its own: each gets its answer, and another run its own meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import pytest_asyncio

from .conftest import until
from .scripted_engine import ScriptedEngine
from .test_restart import ANSWER, GatewayProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
T = TypeVar("T")
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": HELLO},
    "responses": {"model": "m", "input": HELLO},
    "messages": {"model": "m", "max_tokens": 50, "messages": HELLO},
}
MORE_BYTES = 700 * 2**20
"""Memory that the worst request may take for a while, beside what an idle gateway has."""
MIB = 2**20


@dataclass
class Gateway:
    """The process, with a run of the hostile harness and one of another."""

    process: GatewayProcess
    bad: str
    good: str
    asked: int = 0
    idle_bytes: int = 0
    clients: list[socket.socket] = field(default_factory=list)

    async def answered(self) -> None:
        """The other run asks something new, and is answered."""
        self.asked += 1
        body = {"model": "m", "messages": [{"role": "user", "content": f"question {self.asked}"}]}
        async with asyncio.timeout(30), self.process.http.post(f"{self.good}/chat/completions", json=body) as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["message"]["content"] == ANSWER

    async def unhurt_while(self, harm: Awaitable[T]) -> T:
        """The result of `harm`; the other run is answered all the time until then, and afterwards."""
        doing = asyncio.ensure_future(harm)
        async with asyncio.timeout(120):
            while not doing.done():
                await self.answered()
                await asyncio.sleep(0.02)
        await self.answered()
        assert self.bytes("VmHWM") < self.idle_bytes + MORE_BYTES
        return doing.result()

    def bytes(self, name: str) -> int:
        assert self.process.process is not None
        status = Path(f"/proc/{self.process.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:"))

    async def post(self, path: str, data: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.process.http.post(f"{self.bad}/{path}", data=data, headers=named) as response:
            return response.status, await response.json()

    def connect(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", int(self.process.base_url.rpartition(":")[2])))
        self.clients.append(client)
        client.setblocking(False)
        return client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosted(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> AsyncIterator[Gateway]:
    engine = ScriptedEngine(lambda head: ANSWER)
    await engine.start()
    async with aiohttp.ClientSession() as http:
        process = GatewayProcess(tmp_path_factory.mktemp("gateway"), model_dir, engine, http)
        await process.start()
        gateway = Gateway(process, await process.open("bad") + "/v1", await process.open("good") + "/v1")
        try:
            await gateway.answered()
            gateway.idle_bytes = gateway.bytes("VmHWM")
            yield gateway
        finally:
            process.end(signal.SIGKILL)
            await engine.stop()


@pytest.fixture
def gateway(hosted: Gateway) -> Iterator[Gateway]:
    yield hosted
    hosted.process.engine.token_s = 0
    for client in hosted.clients:
        client.close()
    hosted.clients.clear()


def assert_form(path: str, answer: dict[str, Any], kind: str = "invalid_request_error") -> None:
    """The fault is in the form of the dialect that has `path`."""
    assert answer["error"]["type"] == kind, answer
    assert ("code" in answer["error"]) == (path != "messages"), answer
    assert (answer.get("type") == "error") == (path == "messages"), answer


# ------------------------------------------------------------------------------------------ bodies


def said(path: str, text: str) -> bytes:
    key = "input" if path == "responses" else "messages"
    return json.dumps({**BODIES[path], key: [{"role": "user", "content": text}]}).encode()


@pytest.mark.parametrize("path", list(BODIES))
async def test_fifty_megabytes_of_text_are_too_long_a_prompt(gateway: Gateway, path: str) -> None:
    data = said(path, "hello wor " * (5 * MIB))
    status, answer = await gateway.unhurt_while(gateway.post(path, data))
    assert status == 400
    assert_form(path, answer)
    assert ("prompt is too long: " if path == "messages" else "maximum context length") in answer["error"]["message"]


async def test_fifty_megabytes_of_values_are_refused_before_they_are_made(gateway: Gateway) -> None:
    for values in (b"[],", b'{"a":1},', b"1.5,"):
        data = json.dumps(BODIES["messages"]).encode()[:-1] + b', "x": ['
        data += values * (50 * MIB // len(values)) + b"0]}"
        status, answer = await gateway.unhurt_while(gateway.post("messages", data))
        assert status == 400
        assert_form("messages", answer)


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_body_over_the_limit_is_too_large(gateway: Gateway, path: str) -> None:
    status, answer = await gateway.unhurt_while(gateway.post(path, said(path, "x" * (65 * MIB))))
    assert status == 413
    assert_form(path, answer, "request_too_large" if path == "messages" else "invalid_request_error")


async def test_many_large_bodies_at_once_wait_for_each_other(gateway: Gateway) -> None:
    many = [gateway.post("messages", said("messages", "hello wor " * (2 * MIB))) for _ in range(12)]
    answers = await gateway.unhurt_while(asyncio.gather(*many))
    assert {status for status, _ in answers} == {400}


async def test_many_small_bodies_that_unpack_to_large_ones_wait_for_each_other(gateway: Gateway) -> None:
    data = gzip.compress(said("messages", "a" * (60 * MIB)))
    many = [gateway.post("messages", data, Content_Encoding="gzip") for _ in range(8)]
    answers = await gateway.unhurt_while(asyncio.gather(*many))
    assert {status for status, _ in answers} == {400}


def ten_thousand(path: str) -> bytes:
    """A history of ten thousand messages of which the run said none, with many tools."""
    schema = {"type": "object", "properties": {"a": {"type": "number"}}}
    names = [f"tool{place}" for place in range(24)]
    described = "A tool. " * 300
    if path == "messages":
        turn: list[Any] = [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "tool1", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "out"}]},
        ]
        tools: list[Any] = [{"name": name, "description": described, "input_schema": schema} for name in names]
        return json.dumps({**BODIES[path], "messages": HELLO + turn * 5000, "tools": tools}).encode()
    if path == "responses":
        turn = [
            {"type": "function_call", "call_id": "c", "name": "tool1", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "out"},
        ]
        tools = [{"type": "function", "name": name, "description": described, "parameters": schema} for name in names]
        return json.dumps({**BODIES[path], "input": HELLO + turn * 5000, "tools": tools}).encode()
    call = {"id": "c", "type": "function", "function": {"name": "tool1", "arguments": '{"a": 1}'}}
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "out"},
    ]
    tools = [
        {"type": "function", "function": {"name": name, "description": described, "parameters": schema}}
        for name in names
    ]
    return json.dumps({**BODIES[path], "messages": HELLO + turn * 5000, "tools": tools}).encode()


@pytest.mark.parametrize("path", list(BODIES))
async def test_ten_thousand_messages_are_rendered_aside(gateway: Gateway, path: str) -> None:
    status, answer = await gateway.unhurt_while(gateway.post(path, ten_thousand(path)))
    assert status == 400  # over the context, which is known when they are rendered
    assert_form(path, answer)


async def test_what_is_no_json_is_said_in_one_line(gateway: Gateway) -> None:
    hostile = [b'{"model": "\xff\xfe"}', b"[" * 100_000, b'{"a": ' * 10_000, b"\0" * 100, b"\xff\xfe{\0}\0", b'"x"']
    for path, body in BODIES.items():
        deep = json.dumps(body).encode()[:-1] + b', "metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}"
        for data in (*hostile, deep):
            status, answer = await gateway.post(path, data)
            assert status == 400, data[:20]
            assert_form(path, answer)
            assert "\n" not in answer["error"]["message"]
    await gateway.answered()


NEGATIVE = [
    ("chat/completions", "max_tokens"),
    ("chat/completions", "max_completion_tokens"),
    ("responses", "max_output_tokens"),
    ("messages", "max_tokens"),
]


async def test_fewer_tokens_than_one_are_refused(gateway: Gateway) -> None:
    for path, field_name in NEGATIVE:
        for value in (-1, 0, -(2**70)):
            status, answer = await gateway.post(path, json.dumps({**BODIES[path], field_name: value}).encode())
            assert status == 400
            assert_form(path, answer)
            assert answer["error"]["message"] == f"{field_name}: {value} is not allowed; at least 1"


# ------------------------------------------------------------------------------------------ paths

RUNS = [
    "%2e%2e",
    "..%2fgood",
    "good%2Fkey-good",
    "%00",
    "good%00",
    "%ff%fe",
    "g%C3%B6%C3%B6d",
    "%F0%9F%90%8D",
    "x" * 20_000,
    "%2e%2e%2f" * 50,
    "good%0d%0aX-Gyre:%20a",
    "con:stream",
    "*",
]


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_run_that_is_a_trick_is_unknown(gateway: Gateway, path: str) -> None:
    kind = "authentication_error" if path == "messages" else "invalid_request_error"
    before = sorted(entry.name for entry in (gateway.process.folder / "journal").rglob("*"))
    for run in RUNS:
        answer = await raw(gateway, f"POST /run/{run}/key-good/v1/{path}", json.dumps(BODIES[path]).encode())
        assert answer[0] == 401, run
        assert_form(path, answer[1], kind)
    assert sorted(entry.name for entry in (gateway.process.folder / "journal").rglob("*")) == before
    await gateway.answered()


async def test_a_line_longer_than_any_is_answered_in_a_form_that_all_read(gateway: Gateway) -> None:
    for start in (f"POST /run/{'x' * 100_000}/k/v1/messages", "NONSENSE \x01", "POST"):
        status, answer = await raw(gateway, start, b"{}")
        assert status == 400
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    await gateway.answered()


async def raw(gateway: Gateway, start: str, body: bytes) -> tuple[int, dict[str, Any]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.process.base_url.rpartition(":")[2]))
    head = f"{start} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    status, _, rest = answer.partition(b"\r\n")
    return int(status.split()[1]), json.loads(rest.partition(b"\r\n\r\n")[2])


# ------------------------------------------------------------------------------------------ slow clients


def head_of(gateway: Gateway, base: str, path: str, body: bytes) -> bytes:
    return f"POST {base.removeprefix(gateway.process.base_url)}/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()


async def test_a_client_that_sends_a_byte_at_a_time_waits_for_itself_and_the_run_may_be_closed_meanwhile(
    gateway: Gateway,
) -> None:
    loop = asyncio.get_running_loop()
    body = json.dumps(BODIES["messages"]).encode()
    client = gateway.connect()
    base = await gateway.process.open("slow") + "/v1"
    await loop.sock_sendall(client, head_of(gateway, base, "messages", body))

    async def trickle() -> None:
        for byte in body[:-1]:
            await loop.sock_sendall(client, bytes([byte]))
            await asyncio.sleep(0.02)

    await gateway.unhurt_while(trickle())
    trace = await gateway.process.order("close_run", run="slow", attempt=1)
    assert (trace["calls"], trace["failure"]) == (0, "")
    await loop.sock_sendall(client, body[-1:])
    async with asyncio.timeout(20):
        answer = await loop.sock_recv(client, 65536)
    assert answer.startswith(b"HTTP/1.1 410 ")
    await gateway.answered()


async def test_a_client_that_reads_a_byte_at_a_time_has_its_answer_in_the_end(gateway: Gateway) -> None:
    loop = asyncio.get_running_loop()
    body = json.dumps({**BODIES["responses"], "stream": True}).encode()
    client = gateway.connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    await loop.sock_sendall(client, head_of(gateway, gateway.bad, "responses", body) + body)
    read = bytearray()

    async def sip() -> None:
        for _ in range(50):
            read.extend(await loop.sock_recv(client, 1))
            await asyncio.sleep(0.02)

    await gateway.unhurt_while(sip())
    async with asyncio.timeout(20):
        while not (b"event: response.completed" in read and read.endswith(b"\n\n")):
            more = await loop.sock_recv(client, 65536)
            assert more
            read += more


# ------------------------------------------------------------------------------------------ silent clients


async def test_a_thousand_silent_connections_hurt_nobody(gateway: Gateway) -> None:
    before = gateway.bytes("VmRSS")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    try:
        for _ in range(10):
            for _ in range(100):
                gateway.connect()
            await gateway.answered()
        assert gateway.bytes("VmRSS") < before + 100 * MIB
        # Half a request is silence too.
        for client in gateway.clients[:500]:
            client.send(b"POST /run/bad/key-bad/v1/messages HTTP/1.1\r\nContent-")
        for _ in range(20):
            await gateway.answered()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ------------------------------------------------------------------------------------------ clients that go away


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
async def test_a_client_that_goes_away_stops_the_engine(gateway: Gateway, path: str, stream: bool) -> None:
    engine = gateway.process.engine
    engine.token_s = 0.02
    body = {**json.loads(said(path, f"stream: {stream}")), "stream": stream}
    asking = asyncio.create_task(gateway.post(path, json.dumps(body).encode()))
    await until(lambda: any(engine.made.get(rid, 0) >= 3 for rid in engine.live))
    (rid,) = engine.live
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not engine.live)
    assert engine.made[rid] < len(ANSWER)
