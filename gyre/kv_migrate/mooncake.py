"""The transport over Mooncake's Transfer Engine: the conversation is over TCP streams of our own, the bytes are its own.

The engine has no authentication, no checksums, and writes late after an error. So it sees staging memory only, on both
sides; a peer that has proved itself is told where the bytes lie; what arrives is checked; and an engine that failed, or
that a fence or a cancelled pull wants stopped, is killed. A receiver has an engine for each peer, since one that waits
for a frozen peer keeps all others waiting.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Self

import numpy

from gyre.errors import GyreError, Unavailable
from gyre.kv_migrate.asking import Check, Line, Lines, finish, listen, open_transfer
from gyre.kv_migrate.choice import Choice
from gyre.kv_migrate.conversation import AskChecksums, Checksums, Offer
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.mooncake_engine import EngineProcess
from gyre.kv_migrate.pacing import Turn, at_once
from gyre.kv_migrate.serving import Exposed, Server
from gyre.kv_migrate.silence import Silence
from gyre.kv_migrate.spans import batches
from gyre.kv_migrate.staging import Staging, StagingPool
from gyre.kv_migrate.stream import Greeting
from gyre.kv_migrate.transport import BlockSource, Received, SourceLost, check_room

_log = logging.getLogger(__name__)

_READ_BYTES = 4 << 20
_BATCH_READS = 512
_BATCH_BYTES = 32 << 20
"""Nothing is heard of a batch before all of it is here."""
_KEEP_BYTES = 256 << 20
_TURN_BYTES = 4 << 20
"""Others on the event loop have their turn after so many bytes were copied or checked."""
_PEERS = 8
"""Engines kept for peers; the one that was used the longest ago makes room."""
_TRIES = 2


@dataclass(frozen=True)
class _Reading:
    """A pull whose bytes the engine brings."""

    line: Line
    manifest: Manifest
    staging: Staging
    deadline_s: float
    silence: Silence


class MooncakeTransport:
    """A Transport. Open it with `open`, close it with `close`. `silence_s` and `epoch` are as TcpTransport has them."""

    share_bytes = 64 << 20

    def __init__(
        self,
        choice: Choice,
        greeting: Greeting,
        listener: socket.socket,
        serving: EngineProcess,
        silence_s: float | None = None,
        epoch: int | None = None,
    ) -> None:
        self._choice = choice
        self._silence_s = silence_s
        self._lines = Lines(choice.kind, greeting)
        self._host, self._port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
        self._carrier = _Carrier(choice, self._host, serving)
        self._server = Server(choice.kind, listener, greeting, self._carrier, epoch)
        self._engines: dict[str, EngineProcess] = {}
        self._busy: dict[str, asyncio.Lock] = {}
        self._losses: Counter[str] = Counter()

    @classmethod
    async def open(
        cls,
        choice: Choice,
        greeting: Greeting,
        host: str = "127.0.0.1",
        port: int = 0,
        silence_s: float | None = None,
        epoch: int | None = None,
    ) -> Self:
        """Raises Unavailable when no engine can be started: it is tried now, not at the first transfer."""
        serving = await EngineProcess.start(choice.kind, host, choice.devices)
        try:
            return cls(choice, greeting, listen(host, port), serving, silence_s, epoch)
        except BaseException:
            serving.kill()
            raise

    @property
    def epoch(self) -> int:
        return self._server.epoch

    def register(self, source: BlockSource) -> None:
        self._server.source = source

    def describe(self) -> str:
        return f"{self._choice.kind}:{self._host}:{self._port}"

    async def fence(self, grace_s: float) -> None:
        await self._server.fence(grace_s)

    async def close(self) -> None:
        self._lines.close()
        await self._server.close()
        self._carrier.cut()
        for engine in self._engines.values():
            engine.kill()
        self._engines.clear()

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
        line, silence = self._lines.take(address), Silence(address, self._silence_s)
        reading = _Reading(line, manifest, staging, deadline_s, silence)
        try:
            async with asyncio.timeout(deadline_s), silence:
                # A peer that answers this is alive: an engine that reaches for a frozen one is gone for a minute.
                offer = await open_transfer(line, manifest, self._choice.kind, deadline_s)
                silence.heard()
                check = Check(offer, manifest, block_bytes, staging.view)
                if check.count:
                    # For all of it, and before the engine is ours: who needs no turn shall not wait behind us.
                    with silence.ours():
                        await turn(check.total)
                    async with self._alone(address, silence):
                        await self._read(reading, offer, check.total)
                    several = max(1, _TURN_BYTES // block_bytes)
                    for first in range(0, check.count, several):
                        check.whole(range(first, min(first + several, check.count)))
                        silence.heard()
                        await asyncio.sleep(0)
                received = await finish(line, manifest, check)
        except BaseException as error:
            line.close()
            if isinstance(error, TimeoutError):
                late = f"{address} did not send {len(manifest.blocks)} blocks within {deadline_s:g} s"
                raise Unavailable(late) from error
            raise
        self._lines.give_back(address, [line])
        return received

    @asynccontextmanager
    async def _alone(self, address: str, silence: Silence) -> AsyncGenerator[None]:
        """The engine for a peer serves one pull at a time. Who waits for one that loses the peer has lost it as well."""
        busy, before = self._busy.setdefault(address, asyncio.Lock()), self._losses[address]
        with silence.ours():
            await busy.acquire()
        try:
            if self._losses[address] != before:
                raise SourceLost(f"{address} was lost a moment ago")
            yield
        except BaseException as error:
            self._losses[address] += silence.over or isinstance(error, SourceLost)
            raise
        finally:
            busy.release()

    async def _read(self, reading: _Reading, offer: Offer, total: int) -> None:
        """All batches; after a failure once more from the one that failed, with a new engine."""
        address, silence = reading.line.address, reading.silence
        waiting = list(batches(total, _READ_BYTES, _BATCH_READS, _BATCH_BYTES))
        for left in reversed(range(_TRIES)):
            with silence.ours():
                engine = await self._engine(address)
            try:
                with silence.ours():
                    place = await engine.share(reading.staging)
                while waiting:
                    requests = tuple(
                        (place + read.offset, offer.place + read.offset, read.length) for read in waiting[0]
                    )
                    await engine.read(offer.engine, requests, reading.deadline_s)
                    silence.heard()
                    waiting.pop(0)
                with silence.ours():
                    await engine.unshare(place)
                return
            except Unavailable as error:
                _log.warning("the engine for %s is replaced: %s", address, error)
                if not left:
                    raise
            finally:
                if not engine.alive:
                    self._engines.pop(address, None)
            # Is it there at all? Else a new engine would be started for nothing.
            manifest = reading.manifest
            await reading.line.ask_until_answered(AskChecksums(manifest.transfer, manifest.epoch), Checksums)

    async def _engine(self, address: str) -> EngineProcess:
        engine = self._engines.pop(address, None)
        if engine is None or not engine.alive:
            engine = await EngineProcess.start(self._choice.kind, self._host, self._choice.devices)
        for other in [name for name in self._engines if not self._busy[name].locked()][
            : len(self._engines) - _PEERS + 1
        ]:
            self._engines.pop(other).kill()
        self._engines[address] = engine
        return engine


class _Carrier:
    """The source's side: blocks are copied to staging memory, and that is what peers read."""

    def __init__(self, choice: Choice, host: str, engine: EngineProcess) -> None:
        self._choice = choice
        self._host = host
        self._engine = engine
        self._pool = StagingPool(_KEEP_BYTES)
        self._starting = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    async def expose(self, blocks: Sequence[memoryview]) -> Exposed:
        async with self._starting:
            if not self._engine.alive:
                self._engine = await EngineProcess.start(self._choice.kind, self._host, self._choice.devices)
        engine = self._engine
        staging = self._pool.take(sum(map(len, blocks)))
        filled = rested = 0
        whole = numpy.frombuffer(staging.view, numpy.uint8)
        for block in blocks:
            # numpy, and not the views: it lets the process' other threads run meanwhile.
            whole[filled : filled + len(block)] = numpy.frombuffer(block, numpy.uint8)
            filled += len(block)
            if filled - rested >= _TURN_BYTES:
                rested = filled
                await asyncio.sleep(0)
        place = await engine.share(staging)

        def end() -> None:
            task = asyncio.get_running_loop().create_task(self._take_back(engine, place, staging), name="kv-unshare")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

        return Exposed(engine.name, place, end)

    def cut(self) -> None:
        self._engine.kill()

    async def _take_back(self, engine: EngineProcess, place: int, staging: Staging) -> None:
        with suppress(GyreError):  # an engine that is gone reads nothing
            await engine.unshare(place)
        self._pool.give_back(staging)
