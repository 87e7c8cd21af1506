"""A wire tap between a harness and the gateway: it passes every byte on, and reads along.

Being below HTTP it changes nothing that a harness could notice: no header, no chunk, no reset of a connection.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_REQUEST = re.compile(rb"(GET|HEAD|POST) \S*?/run/[^/ ]+/[^/ ]+/(\S*) HTTP/1\.1\r\n")
_ERRORS = re.compile(rb'event: error|event: response\.failed|data: \{"error"')
_RETRIES = re.compile(rb"(?i)x-stainless-retry-count: ([1-9]\d*)")


@dataclass
class Heard:
    """What went over the wire in one run."""

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    error_events: int = 0
    announced_retries: int = 0
    """Requests whose client says that they are a retry."""
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def plain(self) -> dict[str, object]:
        return {
            "requests": dict(self.requests),
            "statuses": dict(self.statuses),
            "error_events": self.error_events,
            "announced_retries": self.announced_retries,
        }


class Tap:
    """Listens on loopback and forwards to `port` there. `heard()` gives what passed since it was last asked."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._sent: list[bytearray] = []
        self._received: list[bytearray] = []
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()

    def heard(self) -> Heard:
        heard = Heard()
        for data in self._sent:
            heard.requests.update(f"{m[1].decode()} {m[2].decode()}" for m in _REQUEST.finditer(data))
            heard.announced_retries += len(_RETRIES.findall(data))
            heard.sent += data
        for data in self._received:
            heard.statuses.update(found.decode() for found in _STATUS.findall(data))
            heard.error_events += len(_ERRORS.findall(data))
            heard.received += data
        self._sent.clear()
        self._received.clear()
        return heard

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        sent, received = bytearray(), bytearray()
        self._sent.append(sent)
        self._received.append(received)
        await asyncio.gather(_copy(reader, far_writer, sent), _copy(far_reader, writer, received))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copy: bytearray) -> None:
    """Until the end or the reset of `reader`'s connection, which the other side is given as it came."""
    try:
        while data := await reader.read(1 << 16):
            copy += data
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except (ConnectionError, OSError, RuntimeError):
        writer.transport.abort()
