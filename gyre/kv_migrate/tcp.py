"""The transport over TCP streams of our own: from the source's memory to the socket, and into the staging memory.

A large transfer takes several streams. Each fetches spans; one whose connection breaks is made anew and goes on at the
byte where it was, as long as something comes and the deadline has not passed.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Self

from gyre.errors import Unavailable
from gyre.kv_migrate.asking import Check, Line, Lines, finish, listen, open_transfer
from gyre.kv_migrate.choice import Kind
from gyre.kv_migrate.conversation import Fetch, Granted
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.pacing import Turn, at_once
from gyre.kv_migrate.serving import Server
from gyre.kv_migrate.silence import Silence
from gyre.kv_migrate.spans import Spans
from gyre.kv_migrate.staging import Staging
from gyre.kv_migrate.stream import Greeting
from gyre.kv_migrate.transport import BlockSource, Received, check_room

_RECEIVE_BYTES = 256 << 10
"""At once: what has just come is checksummed while it is still in the processor's cache."""


class TcpTransport:
    """A Transport. Open it with `open`, close it with `close`.

    With `silence_s`, a source from which nothing comes for so long is given up before the deadline. `epoch` is that of a
    source whose blocks are good whichever process gives them.
    """

    share_bytes = 256 << 20

    def __init__(
        self,
        greeting: Greeting,
        listener: socket.socket,
        silence_s: float | None = None,
        epoch: int | None = None,
    ) -> None:
        self._silence_s = silence_s
        self._lines = Lines(Kind.TCP, greeting)
        self._host, self._port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
        self._server = Server(Kind.TCP, listener, greeting, epoch=epoch)

    @classmethod
    async def open(
        cls,
        greeting: Greeting,
        host: str = "127.0.0.1",
        port: int = 0,
        silence_s: float | None = None,
        epoch: int | None = None,
    ) -> Self:
        return cls(greeting, listen(host, port), silence_s, epoch)

    @property
    def epoch(self) -> int:
        return self._server.epoch

    def register(self, source: BlockSource) -> None:
        self._server.source = source

    def describe(self) -> str:
        return f"{Kind.TCP}:{self._host}:{self._port}"

    async def fence(self, grace_s: float) -> None:
        await self._server.fence(grace_s)

    async def close(self) -> None:
        self._lines.close()
        await self._server.close()

    async def pull(
        self,
        address: str,
        manifest: Manifest,
        block_bytes: int,
        staging: Staging,
        deadline_s: float,
        turn: Turn = at_once,
    ) -> Received:
        check_room(manifest, block_bytes, staging)
        lines = [self._lines.take(address)]
        silence = Silence(address, self._silence_s)

        async def our_turn(count: int) -> None:
            with silence.ours():
                await turn(count)

        try:
            async with asyncio.timeout(deadline_s), silence:
                offer = await open_transfer(lines[0], manifest, Kind.TCP, deadline_s)
                silence.heard()
                check = Check(offer, manifest, block_bytes, staging.view)
                spans = Spans(check.count, block_bytes)
                lines += [self._lines.take(address) for _ in range(spans.streams - 1)]
                async with asyncio.TaskGroup() as streams:
                    for line in lines:
                        streams.create_task(_fetch(line, manifest, spans, check, staging.view, our_turn, silence))
                received = await finish(lines[0], manifest, check)
                self._lines.give_back(address, lines)
                lines.clear()
                return received
        except TimeoutError as error:
            late = f"{address} did not send {len(manifest.blocks)} blocks within {deadline_s:g} s"
            raise Unavailable(late) from error
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            for line in lines:
                line.close()


async def _fetch(
    line: Line,
    manifest: Manifest,
    spans: Spans,
    check: Check,
    view: memoryview,
    turn: Turn,
    silence: Silence,
) -> None:
    """One stream's part: spans, as long as there are any."""
    while (span := spans.take()) is not None:
        try:
            await line.ask(Fetch(manifest.transfer, manifest.epoch, span.begin, span.end), Granted)
            stream = await line.stream()
            granted = span.begin
            while span.begin < span.end:
                upto = min(span.end, span.begin + _RECEIVE_BYTES)
                if granted < upto:
                    await turn(upto - granted)
                    granted = upto
                check.whole(spans.arrived(span, await stream.receive_some(view[span.begin : upto])))
                line.patience.progress()
                silence.heard()
        except (OSError, EOFError) as error:
            line.close()
            spans.put_back(span)
            await line.patience.failed(error)
