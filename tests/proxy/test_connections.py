"""How long a client may take to send and to read, and how many may be silent."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest

from gyre.proxy import bodies, connections

from .conftest import Proxy, StartProxy

ANSWER = "the quick brown fox jumps over the lazy dog"
HELLO = [{"role": "user", "content": "hello"}]
MIB = 2**20


async def test_a_client_that_does_not_read_a_large_answer_is_left_in_time(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.proxy.front.WRITE_S", 0.5)
    proxy = await start_proxy(lambda head: "0123456789" * 15)
    base = (await proxy.open("r")).removeprefix(proxy.gateway.base_url)
    # What a request says comes back in its answer: so a small answer is a large one.
    body = json.dumps({"max_tokens": 200, "messages": HELLO, "model": "m" * (20 * MIB)}).encode()
    head = f"POST {base}/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    port = int(proxy.gateway.base_url.rpartition(":")[2])
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1024)
    writer.write(head + body)
    await writer.drain()
    await asyncio.sleep(2)
    async with asyncio.timeout(20):
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(20 * MIB)
    assert (await proxy.close("r")).calls == 0
    writer.close()


async def test_a_body_that_never_ends_is_given_up(start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "READ_S", 0.3)
    proxy = await start_proxy(lambda head: "hi")
    await proxy.open("r")

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.02)

    async with proxy.http.post(f"{proxy.base('r')}/v1/responses", data=endless()) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "the body did not arrive whole in 0.3 s"


async def closed(client: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(0.3):
            return await client.read() == b""
    except TimeoutError:
        return False


@pytest.fixture
async def slow_proxy(start_proxy: StartProxy) -> Proxy:
    proxy = await start_proxy(lambda head: ANSWER, token_s=0.03)
    await proxy.open("r")
    return proxy


async def test_over_the_bound_the_longest_silent_connection_is_dropped_and_none_that_is_answered(
    slow_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_CONNECTIONS", 3)
    asking = asyncio.create_task(slow_proxy.chat("r", HELLO))
    await slow_proxy.until_sampled("a", 1)
    port = int(slow_proxy.gateway.base_url.rpartition(":")[2])
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
    assert [await closed(reader) for reader, _ in opened] == [True, True, False, False, False]
    assert (await asking)["content"] == ANSWER
    for _, writer in opened:
        writer.close()


async def test_a_silent_connection_is_closed_in_time_and_one_that_is_answered_is_not(
    slow_proxy: Proxy, start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_S", 0.3)
    port = int(slow_proxy.gateway.base_url.rpartition(":")[2])
    asking = asyncio.create_task(slow_proxy.chat("r", HELLO))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /run/r/key/v1/messages HTTP/1.1\r\nContent-")
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    assert not asking.done()
    assert (await asking)["content"] == ANSWER
    writer.close()
