"""One connection as a sequence of blobs: 4 bytes of length (big-endian), then that many bytes.

While two processes greet each other, blobs are read one by one with `receive`. Then a `Reader` takes over and is called
with each. What is promised: a blob over the limit is not read; one who takes nothing of what is written for `STALL_S` is
cut off; `lost` is called once, with the reason.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Protocol, cast

from gyre.actors.tls import Tls

HANDSHAKE_S = 10.0
STALL_S = 30.0
MAX_GREETING_BYTES = 1024
_LENGTH_BYTES = 4
_UNREAD_BYTES = 64 * 1024
"""Of one who speaks on before it was greeted."""
_LINGER_S = 1.0
"""For the other side to read the last words before the connection goes."""
_BUFFER_BYTES = 4 * 1024 * 1024
"""Written and not yet taken by the kernel; above it writers wait."""


class Broken(Exception):
    """The other side does not keep to the protocol; the connection has to end."""


class Reader(Protocol):
    """Who is called for what comes over a connection."""

    def blob(self, data: bytearray) -> None:
        """Raises Broken."""
        ...

    def broken(self, reason: str) -> None:
        """The other side broke the protocol: say so to it and close."""
        ...

    def lost(self, reason: str) -> None: ...

    def writable(self) -> None:
        """It may be written to again."""
        ...


class Pipe(asyncio.Protocol):
    """`accepted` is called when it is there."""

    def __init__(self, accepted: Callable[[Pipe], None] = lambda _: None) -> None:
        self._accepted = accepted
        self._tls: Tls | None = None
        self.can_write = True
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._limit_bytes = MAX_GREETING_BYTES
        self._reader: Reader | None = None
        self._came = asyncio.Event()
        self._deaf = False
        self._reason = ""
        self._is_lost = False
        self._stall: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    @property
    def socket(self) -> socket.socket:
        return cast(socket.socket, self.transport.get_extra_info("socket"))

    @property
    def peer_certificate(self) -> dict[str, object]:
        """As of ssl.SSLSocket.getpeercert()."""
        assert self._tls is not None
        return self._tls.peer_certificate

    @property
    def reason(self) -> str:
        """Why it was lost."""
        return self._reason

    @property
    def buffered_bytes(self) -> int:
        """Written and not yet taken by the kernel."""
        return self.transport.get_write_buffer_size()

    async def secure(self, context: ssl.SSLContext, *, server: bool) -> None:
        """Go on under TLS. Raises ssl.SSLError, or ConnectionError when the other side leaves."""
        tls = self._tls = Tls(context, server=server)
        tls.feed(self._buffer)
        self._buffer.clear()
        try:
            while not tls.greet():
                self.transport.write(tls.out())
                await self._more()
                if self._is_lost:
                    raise ConnectionResetError(f"it left during the TLS handshake ({self._reason})")
        finally:
            self.transport.write(tls.out())  # an alert too
        self._take(b"")

    async def _more(self) -> None:
        """Until something has come, or the connection is lost."""
        self._came.clear()
        if not self._is_lost:
            self.transport.resume_reading()
            await self._came.wait()

    # ------------------------------------------------------------------ greeting

    async def receive(self) -> bytearray | None:
        """The next blob of the greeting; None when the other side has closed. Raises Broken."""
        while (data := self._next()) is None:
            if self._is_lost:
                return None
            await self._more()
        return data

    def take_over(self, reader: Reader, limit_bytes: int) -> None:
        """From now on `reader` is called."""
        self._reader = reader
        self._limit_bytes = limit_bytes
        if self._is_lost:
            asyncio.get_running_loop().call_soon(reader.lost, self._reason)
            return
        self.transport.resume_reading()
        self._read_on()

    # ------------------------------------------------------------------ writing

    def send(self, data: bytes) -> None:
        """Write one blob. Look at `can_write` first: what the other side does not take is kept in memory."""
        if self._deaf or self._is_lost:
            return
        data = len(data).to_bytes(_LENGTH_BYTES, "big") + data
        if self._tls is None:
            self.transport.write(data)
        else:
            self._tls.seal(data)
            self.transport.write(self._tls.out())

    def close(self, reason: str) -> None:
        """Read no more; end the connection as soon as what was written is taken, at the latest in a second."""
        if self._deaf or self._is_lost:
            return
        self._deaf = True
        self._reason = reason
        self.transport.resume_reading()  # and drop what comes: closing over unread bytes would lose our last words
        self._say_eof()
        self._closing = asyncio.get_running_loop().call_later(_LINGER_S, self.transport.abort)

    def _say_eof(self) -> None:
        if self.buffered_bytes == 0:
            try:
                self.transport.write_eof()
            except OSError:  # the other side has gone already
                self.transport.abort()

    def abort(self, reason: str) -> None:
        """End the connection now."""
        if not self._is_lost:
            self._reason = self._reason or reason
            self._deaf = True
            self.transport.abort()

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_BUFFER_BYTES)
        self._accepted(self)

    def data_received(self, data: bytes) -> None:
        if not self._deaf:
            self._take(data)

    def _take(self, data: bytes) -> None:
        if self._tls is None:
            self._buffer += data
        else:
            self._tls.feed(data)
            if self._tls.greeted:
                try:
                    self._buffer += self._tls.opened()
                except ssl.SSLError as error:
                    self.abort(said(error))
                    return
        if self._reader is not None:
            self._read_on()
        else:
            self._came.set()
            if len(self._buffer) > _UNREAD_BYTES:
                self.transport.pause_reading()

    def _read_on(self) -> None:
        reader = self._reader
        assert reader is not None
        try:
            while not self._deaf and (data := self._next()) is not None:
                reader.blob(data)
        except Broken as error:
            reader.broken(str(error))
        if self._deaf:
            self._buffer.clear()

    def _next(self) -> bytearray | None:
        buffer = self._buffer
        if len(buffer) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(buffer[:_LENGTH_BYTES], "big")
        if length > self._limit_bytes:
            raise Broken(f"a frame of {length} bytes is over the limit of {self._limit_bytes}")
        end = _LENGTH_BYTES + length
        if len(buffer) < end:
            return None
        data = buffer[_LENGTH_BYTES:end]
        del buffer[:end]
        return data

    def pause_writing(self) -> None:
        self.can_write = False
        self._watch_stall(self.buffered_bytes)

    def _watch_stall(self, before_bytes: int) -> None:
        def look() -> None:
            if self.buffered_bytes >= before_bytes:
                self.abort(f"it took nothing for {STALL_S:g} s")
            else:
                self._watch_stall(self.buffered_bytes)

        self._stall = asyncio.get_running_loop().call_later(STALL_S, look)

    def resume_writing(self) -> None:
        self.can_write = True
        if self._stall is not None:
            self._stall.cancel()
        if self._reader is not None:
            self._reader.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        for timer in (self._stall, self._closing):
            if timer is not None:
                timer.cancel()
        self._reason = self._reason or ("the peer closed it" if exc is None else said(exc))
        self._came.set()
        if self._reader is not None:
            self._reader.lost(self._reason)


def said(error: Exception) -> str:
    """A connection's error in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error) or type(error).__name__
