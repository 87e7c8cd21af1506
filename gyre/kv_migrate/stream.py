"""One connection as a stream of frames and of raw bytes, with or without TLS.

Raw bytes go from the sender's memory to the socket (`sendmsg`) and from the socket into the receiver's memory
(`recv_into`), without a copy in between; under TLS they pass through the cipher. A frame is four bytes of length and a
packed record. Every method may be cancelled at any moment; the stream is of no use after that.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Any, Protocol, cast

from gyre.errors import Refused
from gyre.wire import pack_any, unpack_any

_LENGTH = struct.Struct("!I")
_LONGEST_FRAME_BYTES = 16 << 20
_GATHER = 64
"""Pieces of memory in one call of the system."""
_TLS_BYTES = 256 << 10
_TURN_BYTES = 4 << 20
"""After so many bytes others on the event loop have their turn."""


class Stream:
    """Takes over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._turn_bytes = 0

    def close(self) -> None:
        self._socket.close()

    async def send(self, pieces: Sequence[memoryview]) -> None:
        """All the bytes of `pieces`, one after another."""
        first, offset = 0, 0
        while first < len(pieces):
            gathered = [pieces[first][offset:], *pieces[first + 1 : first + _GATHER]]
            try:
                sent = self._socket.sendmsg(gathered)
            except (BlockingIOError, InterruptedError):
                await self._writable()
                continue
            await self._take_turns(sent)
            offset += sent
            while first < len(pieces) and offset >= len(pieces[first]):
                offset -= len(pieces[first])
                first += 1

    async def receive_some(self, buffer: memoryview) -> int:
        """Fill the front of `buffer` with what is there, at least one byte; how many. Raises EOFError at the end."""
        count = await asyncio.get_running_loop().sock_recv_into(self._socket, buffer)
        if count == 0:
            raise EOFError("the peer closed the connection")
        await self._take_turns(count)
        return count

    async def receive(self, count: int) -> bytes:
        """Exactly so many bytes."""
        buffer = memoryview(bytearray(count))
        filled = 0
        while filled < count:
            filled += await self.receive_some(buffer[filled:])
        return bytes(buffer)

    async def send_frame(self, message: Any) -> None:
        data = pack_any(message)
        if len(data) > _LONGEST_FRAME_BYTES:
            raise Refused(f"a frame of {len(data)} bytes is over the limit {_LONGEST_FRAME_BYTES}")
        await self.send([memoryview(_LENGTH.pack(len(data)) + data)])

    async def receive_frame(self) -> Any:
        """Raises Refused for a frame over the limit, BadInput for one that holds no record."""
        (length,) = _LENGTH.unpack(await self.receive(_LENGTH.size))
        if length > _LONGEST_FRAME_BYTES:
            raise Refused(f"a frame of {length} bytes is over the limit {_LONGEST_FRAME_BYTES}")
        return unpack_any(await self.receive(length))

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self._socket, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_writer(self._socket)

    async def _take_turns(self, count: int) -> None:
        self._turn_bytes += count
        if self._turn_bytes >= _TURN_BYTES:
            self._turn_bytes = 0
            await asyncio.sleep(0)


class TlsStream(Stream):
    """The same under TLS. `greet` comes first."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        super().__init__(connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._scratch = memoryview(bytearray(_TLS_BYTES))

    async def greet(self) -> dict[str, Any]:
        """The other side's certificate. Raises ssl.SSLError when one of the two does not accept the other's."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._feed()
            except ssl.SSLError:
                await self._flush()  # the alert that says why
                raise
            else:
                await self._flush()
                return dict(self._tls.getpeercert() or {})

    async def send(self, pieces: Sequence[memoryview]) -> None:
        for piece in pieces:
            while piece:
                piece = piece[self._tls.write(piece[:_TLS_BYTES]) :]
                await self._flush()

    async def receive_some(self, buffer: memoryview) -> int:
        while True:
            try:
                count = cast(int, self._tls.read(len(buffer), buffer))  # so it is when there is a buffer
            except ssl.SSLWantReadError:
                await self._feed()
            except ssl.SSLZeroReturnError:
                raise EOFError("the peer closed the connection") from None
            else:
                if count == 0:
                    raise EOFError("the peer closed the connection")
                return count

    async def _feed(self) -> None:
        count = await super().receive_some(self._scratch)
        self._incoming.write(self._scratch[:count])

    async def _flush(self) -> None:
        if data := self._outgoing.read():
            await super().send([memoryview(data)])


class Greeting(Protocol):
    """Makes a stream of a fresh connection once each side has proved to the other that it belongs here.

    Raises Refused when the other side fails that, and OSError or EOFError when the connection ends before.
    """

    async def accept(self, connection: socket.socket) -> Stream:
        """As the one who was called."""
        ...

    async def introduce(self, connection: socket.socket) -> Stream:
        """As the caller."""
        ...
