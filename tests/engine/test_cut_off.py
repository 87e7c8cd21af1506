"""An engine and its client that are cut off from one another without a word: the connection ends by itself at both ends."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
from typing import Any

import pytest
from aiohttp import web

from gyre.engine.client import EngineAbsent, EngineClient, EngineGone, EngineUnreached
from gyre.engine.local.__main__ import _listen
from gyre.engine.records import GenerateRequest
from gyre.engine.unheard import UNHEARD_S, end_unheard

SO_ATTACH_FILTER = 26
LIMIT_S = 60.0


def cut(connection: Any) -> None:
    """From now on nothing that is sent to this socket arrives, nor is it acknowledged."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
    program = struct.pack("HL", 1, ctypes.addressof(nothing))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


@pytest.mark.parametrize("streams", [True, False])
async def test_the_request_of_a_client_that_acknowledges_nothing_is_ended(streams: bool) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        began.set()
        try:
            while True:
                if streams:
                    await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    app = web.Application()
    app.router.add_get("/generate", generate)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listener = _listen("127.0.0.1", 0)
    assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * UNHEARD_S
    end_unheard(listener, 0.5)  # the test need not wait for so long
    await web.SockSite(runner, listener).start()
    try:
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"GET /generate HTTP/1.1\r\nHost: engine\r\n\r\n")
            async with asyncio.timeout(LIMIT_S):
                await began.wait()
                cut(client)
                await ended.wait()
    finally:
        await runner.cleanup()


async def test_an_engine_of_which_nothing_is_heard_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.engine.http.end_unheard", lambda connection: end_unheard(connection, 0.5))

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        cut(request.transport.get_extra_info("socket"))
        await asyncio.sleep(LIMIT_S)
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client, asyncio.timeout(LIMIT_S):
            with pytest.raises(EngineGone) as gone:
                await anext(client.generate(GenerateRequest("r", [1], 1)))
    finally:
        await runner.cleanup()
    assert not isinstance(gone.value, EngineUnreached)


async def test_an_engine_whose_process_has_ended_is_told_from_one_that_may_live() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with EngineClient(f"http://127.0.0.1:{port}", control_s=0.2) as client:
            with pytest.raises(EngineGone) as silent:
                await client.abort("r")
    assert not isinstance(silent.value, EngineUnreached)  # it took the connection, and maybe the order
    async with EngineClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(EngineAbsent):
            await client.abort("r")


async def test_an_engine_that_takes_no_connection_has_been_asked_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        try:
            for one in waiting:  # no room is left for another
                one.setblocking(False)
                one.connect_ex(address)
            async with EngineClient(f"http://127.0.0.1:{address[1]}", connect_s=0.2) as client:
                with pytest.raises(EngineUnreached) as unreached:
                    await client.abort("r")
        finally:
            for one in waiting:
                one.close()
    assert not isinstance(unreached.value, EngineAbsent)
