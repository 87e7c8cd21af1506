"""HTTP/1.1 to one server, as plainly as an engine needs it: a request, and its answer's body as it comes.

A connection serves one request at a time and is kept for the next. An answer that its reader leaves before its end
closes its connection, by which the server knows that nobody listens. Nothing is sent twice: whoever asked decides that.
The parsing is llhttp's (httptools).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from gyre.engine.unheard import end_unheard

IDLE_S = 4.0
"""How long an unused connection is kept. Servers drop theirs after five seconds and more (uvicorn's five are the fewest):
a request that crosses with that is lost."""
_END_S = 1.0
"""How long an answer that has said all may take to end."""


class NoConnection(ConnectionError):
    """No connection could be made, so nothing was asked; `refused` where nothing listens there."""

    def __init__(self, error: OSError) -> None:
        super().__init__("no connection in time" if isinstance(error, TimeoutError) else str(error))
        self.refused = isinstance(error, ConnectionRefusedError)


class Origin:
    """The server at `url`. `headers` go with every request; `connect_s` bounds the wait for a connection."""

    def __init__(self, url: str, headers: dict[str, str], connect_s: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        named = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        self._connect_s = connect_s
        self._lines: set[_Line] = set()
        self._idle: list[_Line] = []

    def ask(self, method: str, path: str, body: Sequence[bytes], silence_s: float | None = None) -> Answer:
        """The answer to a request, to be entered. `body` comes in pieces."""
        length = sum(map(len, body))
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {length}\r\n\r\n"
        return Answer(self, (head.encode(), *body), silence_s)

    def close(self) -> None:
        """Drop every connection, those with an answer on them too."""
        self._idle.clear()
        for line in list(self._lines):
            line.drop()

    async def line(self) -> _Line:
        """A connection that is free: the one that was used last, of those that are still good, or a new one."""
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - IDLE_S
        while self._idle and self._idle[0].since_s < oldest_s:
            self._idle.pop(0).drop()
        while self._idle:
            line = self._idle.pop()
            if line.is_open:
                return line
        try:
            async with asyncio.timeout(self._connect_s):
                _, line = await loop.create_connection(
                    lambda: _Line(self), self._host, self._port, ssl=self._tls or None
                )
        except OSError as error:
            raise NoConnection(error) from error
        return line

    def made(self, line: _Line) -> None:
        self._lines.add(line)

    def free(self, line: _Line) -> None:
        self._idle.append(line)

    def lost(self, line: _Line) -> None:
        self._lines.discard(line)
        if line in self._idle:
            self._idle.remove(line)


class Answer:
    """What the server answers, from when its head is there. With `said_all` its reader has what it needs, and its end is
    not waited for.

    To enter it raises NoConnection where the server could not be asked, TimeoutError after `silence_s` without a byte of
    the answer, and ConnectionError where it breaks off; so does to read it.
    """

    def __init__(self, origin: Origin, request: Sequence[bytes], silence_s: float | None) -> None:
        self.status = 0
        self.said_all = False
        self._origin = origin
        self._request = request
        self._silence_s = silence_s
        self._line: _Line | None = None

    async def __aenter__(self) -> Self:
        line = self._line = await self._origin.line()
        try:
            line.send(self._request, self._silence_s)
            self._request = ()
            self.status = await line.head()
        except BaseException:
            line.drop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._line is not None
        self._line.leave(rest_is_nothing=self.said_all)

    async def piece(self) -> bytes:
        """What came of the body since the last piece; empty at its end."""
        assert self._line is not None
        return await self._line.piece()

    async def whole(self) -> bytes:
        pieces: list[bytes] = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)


class _Line(asyncio.Protocol):
    """One connection."""

    def __init__(self, origin: Origin) -> None:
        self.since_s = 0.0
        """When something came last."""
        self._origin = origin
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._status = 0
        """Of the answer; 0 before its head."""
        self._pieces: list[bytes] = []
        self._whole = True
        self._kept = False
        """Whether the server goes on to serve this connection behind the answer."""
        self._unread = False
        """Whether the rest of the answer is nobody's."""
        self._fault: OSError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._silence_s: float | None = None
        self._alarm: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------ the asker's side

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: Sequence[bytes], silence_s: float | None) -> None:
        assert self._transport is not None
        self._status, self._whole, self._unread = 0, False, False
        self._pieces.clear()
        self.since_s = self._loop.time()
        self._transport.writelines(request)
        self._silence_s = silence_s
        if silence_s is not None:
            self._alarm = self._loop.call_later(silence_s, self._look)

    async def head(self) -> int:
        """The answer's status."""
        while not self._status:
            await self._news()
        return self._status

    async def piece(self) -> bytes:
        while not self._pieces:
            if self._whole:
                return b""
            await self._news()
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        return piece

    def leave(self, *, rest_is_nothing: bool) -> None:
        """The asker is done. An answer that has more to say to nobody is cut off."""
        self._hush()
        if self._whole:
            self._rest()
        elif rest_is_nothing:
            self._unread = True
            self._alarm = self._loop.call_later(_END_S, self.drop)
        else:
            self.drop()

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _news(self) -> None:
        if self._fault is not None:
            raise self._fault
        self._waiter = self._loop.create_future()
        await self._waiter

    def _look(self) -> None:
        """Whether the server was silent for too long."""
        assert self._silence_s is not None
        left_s = self.since_s + self._silence_s - self._loop.time()
        if left_s > 0:
            self._alarm = self._loop.call_later(left_s, self._look)
        else:
            self._fail(TimeoutError(f"not a byte in {self._silence_s:g} s"))

    def _rest(self) -> None:
        if self._fault is None and self._kept:
            self._origin.free(self)
        else:
            self.drop()

    def _hush(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, fault: OSError) -> None:
        self._fault = self._fault or fault
        self._wake()
        self.drop()

    # ------------------------------------------------------------------------------------------ the connection's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        end_unheard(transport.get_extra_info("socket"))
        self._transport = transport
        self._origin.made(self)

    def data_received(self, data: bytes) -> None:
        self.since_s = self._loop.time()
        try:
            if self._whole:
                raise HttpParserError("it speaks without being asked")
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(ConnectionError(f"what it says is not HTTP: {error}"))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._origin.lost(self)
        self._hush()
        self._fail(ConnectionError(str(exc) if exc else "it closed the connection"))

    # ------------------------------------------------------------------------------------------ the parser's side

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # else it is no answer yet
            self._status = status

    def on_body(self, data: bytes) -> None:
        if not self._unread:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if not self._status:
            return
        self._whole, self._kept = True, self._parser.should_keep_alive()
        if self._unread:
            self._hush()
            self._rest()
