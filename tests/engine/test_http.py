"""The HTTP that engines are spoken to in, against a server that says just what a test wants, over a real socket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.engine import http
from gyre.engine.http import NoConnection, Origin

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT_S = 20.0
Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """`answering` writes what a request is answered; `requests` are what came, by connection."""

    def __init__(self) -> None:
        self.answering: Answering = says(OK)
        self.requests: list[list[bytes]] = []
        self.gone = asyncio.Event()
        """Whether a client has left."""
        self.url = ""
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came: list[bytes] = []
        self.requests.append(came)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"Content-Length: (\d+)", head)
                assert length is not None
                came.append(head + await reader.readexactly(int(length[1])))
                await self.answering(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


def says(*parts: bytes, pause_s: float = 0.0) -> Answering:
    async def answering(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return answering


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def origin(server: Server) -> AsyncIterator[Origin]:
    origin = Origin(f"{server.url}/under/", {"Authorization": "Bearer key"}, 5.0)
    yield origin
    origin.close()


async def ask(origin: Origin, *body: bytes, silence_s: float | None = None) -> tuple[int, bytes]:
    async with asyncio.timeout(LIMIT_S), origin.ask("POST", "/generate", body, silence_s) as answer:
        return answer.status, await answer.whole()


async def test_a_request_goes_out_whole_and_its_answer_comes_back(server: Server, origin: Origin) -> None:
    assert await ask(origin, b"{", b'"a":1', b"}") == (200, b"ok")
    head, body = server.requests[0][0].split(b"\r\n\r\n")
    assert head.startswith(b"POST /under/generate HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer key\r\n" in head
    assert body == b'{"a":1}'


async def test_a_connection_serves_one_request_after_another_and_no_two_at_once(server: Server, origin: Origin) -> None:
    for _ in range(3):
        await ask(origin)
    assert [len(came) for came in server.requests] == [3]
    server.answering = says(b"", OK, pause_s=0.05)
    await asyncio.gather(*(ask(origin) for _ in range(3)))
    assert sorted(len(came) for came in server.requests) == [1, 1, 4]


async def test_what_a_server_says_before_its_answer_is_no_answer(server: Server, origin: Origin) -> None:
    server.answering = says(b"HTTP/1.1 100 Continue\r\n\r\n", OK)
    assert await ask(origin) == (200, b"ok")
    assert await ask(origin) == (200, b"ok")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6), cuts=st.lists(st.integers(0, 300), max_size=6))
async def test_a_chunked_body_is_the_same_however_it_comes(
    server: Server, origin: Origin, chunks: list[bytes], cuts: list[int]
) -> None:
    wire = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    places = sorted({0, len(wire), *(cut % len(wire) for cut in cuts)})
    server.answering = says(*(wire[start:end] for start, end in pairwise(places)))
    assert await ask(origin) == (200, b"".join(chunks))


async def test_the_body_is_read_as_it_comes(server: Server, origin: Origin) -> None:
    more = asyncio.Event()

    async def answering(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"1\r\na\r\n")
        await more.wait()
        writer.write(b"1\r\nb\r\n0\r\n\r\n")

    server.answering = answering
    async with asyncio.timeout(LIMIT_S), origin.ask("POST", "/", ()) as answer:
        assert await answer.piece() == b"a"
        more.set()
        assert await answer.piece() == b"b"
        assert await answer.piece() == b""


async def test_to_leave_an_answer_before_its_end_closes_the_connection(server: Server, origin: Origin) -> None:
    server.answering = says(CHUNKED + b"1\r\na\r\n")
    async with asyncio.timeout(LIMIT_S), origin.ask("POST", "/", ()) as answer:
        assert await answer.piece() == b"a"
    await asyncio.wait_for(server.gone.wait(), LIMIT_S)


async def test_to_give_up_before_the_answer_begins_closes_it_too(server: Server, origin: Origin) -> None:
    server.answering = says()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), origin.ask("POST", "/", ()):
            pass
    await asyncio.wait_for(server.gone.wait(), LIMIT_S)


async def test_an_answer_that_has_said_all_ends_by_itself_and_its_connection_is_kept(
    server: Server, origin: Origin
) -> None:
    server.answering = says(CHUNKED + b"3\r\nall\r\n", b"0\r\n\r\n", pause_s=0.05)
    for _ in range(2):
        async with asyncio.timeout(LIMIT_S), origin.ask("POST", "/", ()) as answer:
            assert await answer.piece() == b"all"
            answer.said_all = True
        await asyncio.sleep(0.2)
    assert [len(came) for came in server.requests] == [2]


async def test_one_that_has_said_all_and_does_not_end_is_left(
    server: Server, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_END_S", 0.05)
    server.answering = says(CHUNKED + b"3\r\nall\r\n")
    async with asyncio.timeout(LIMIT_S), origin.ask("POST", "/", ()) as answer:
        await answer.piece()
        answer.said_all = True
    await asyncio.wait_for(server.gone.wait(), LIMIT_S)


async def test_what_came_before_a_connection_broke_can_be_read(server: Server, origin: Origin) -> None:
    async def answering(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"1\r\na\r\n")
        writer.close()

    server.answering = answering
    async with asyncio.timeout(LIMIT_S), origin.ask("POST", "/", ()) as answer:
        await asyncio.sleep(0.1)
        assert await answer.piece() == b"a"
        with pytest.raises(ConnectionError, match="closed the connection"):
            await answer.piece()


async def test_a_silent_server_is_given_up_and_one_that_speaks_now_and_then_is_not(
    server: Server, origin: Origin
) -> None:
    server.answering = says(CHUNKED, *[b"1\r\na\r\n"] * 4, b"0\r\n\r\n", pause_s=0.2)
    assert await ask(origin, silence_s=0.5) == (200, b"aaaa")
    server.answering = says(CHUNKED)
    with pytest.raises(TimeoutError, match="not a byte"):
        await ask(origin, silence_s=0.2)


@pytest.mark.parametrize("wire", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"])
async def test_what_is_not_http_is_a_lost_connection(server: Server, origin: Origin, wire: bytes) -> None:
    server.answering = says(wire)
    with pytest.raises(ConnectionError, match="not HTTP"):
        await ask(origin)


async def test_a_connection_that_its_server_closed_or_that_is_old_is_not_used_again(
    server: Server, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answering(writer: asyncio.StreamWriter) -> None:
        writer.write(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        writer.close()

    server.answering = answering
    assert await ask(origin) == (200, b"ok")
    server.answering = says(OK)
    await ask(origin)
    monkeypatch.setattr(http, "IDLE_S", 0.0)
    await asyncio.sleep(0.05)
    await ask(origin)
    assert [len(came) for came in server.requests] == [1, 1, 1]


async def test_where_nothing_listens_is_told_from_what_does_not_answer(server: Server, origin: Origin) -> None:
    await server.stop()
    with pytest.raises(NoConnection) as refusal:
        await ask(origin)
    assert refusal.value.refused


async def test_closing_drops_the_answers_that_are_under_way(server: Server, origin: Origin) -> None:
    server.answering = says(CHUNKED)
    async with asyncio.timeout(LIMIT_S), origin.ask("POST", "/", ()) as answer:
        origin.close()
        with pytest.raises(ConnectionError):
            await answer.piece()
    await asyncio.wait_for(server.gone.wait(), LIMIT_S)
