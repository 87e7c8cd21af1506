"""The source's end: it lets peers in, holds blocks for their transfers, and sends them.

How long blocks are held is `leases`' to say; who is let in, the greeting's. One task a connection, for one
transfer after another; a transfer that ends while its blocks are being sent has that connection cut.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from gyre.errors import BadInput, GyreError, Refused
from gyre.kv_migrate.conversation import Acknowledge, AskChecksums, Checksums, Fetch, Granted, Offer, Open, Refusal
from gyre.kv_migrate.leases import LONGEST_S, LeaseTable
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.stream import Greeting, Stream
from gyre.kv_migrate.transport import BlockLease, BlockSource

_log = logging.getLogger(__name__)

_GREET_S = 5.0
"""A peer that has not proved itself by then is cut off."""
_IDLE_S = 60.0
"""So is one that reads no transfer and says nothing for so long."""
_SEND_BYTES = 256 << 10
"""Blocks are checksummed by so many bytes, right before these are sent: they are read from memory once."""


@dataclass(frozen=True)
class Exposed:
    """Where a carrier's engine has put a transfer's bytes, and how they are taken away again."""

    engine: str
    place: int
    end: Callable[[], None]


class Carrier(Protocol):
    """Brings bytes to the peer beside the connection."""

    async def expose(self, blocks: Sequence[memoryview]) -> Exposed: ...

    def cut(self) -> None:
        """What was exposed can be read no more when this returns."""
        ...


@dataclass(eq=False)
class _Transfer:
    manifest: Manifest
    lease: BlockLease
    offer: Offer
    blocks: list[memoryview]
    numbers: list[int]
    """Of each of `blocks`: its number in the manifest."""
    exposed: Exposed | None
    sums: dict[int, bytes] = field(default_factory=dict[int, bytes])
    sending: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    """The connections whose tasks read the blocks at this moment."""

    def checksum(self, index: int) -> bytes:
        found = self.sums.get(index)
        if found is None:
            found = self.sums[index] = xxhash.xxh3_64_digest(self.blocks[index])
        return found

    def checksums(self) -> Checksums:
        """Of all blocks, once they were read."""
        sums = b"".join(map(self.checksum, range(len(self.blocks))))
        return Checksums(
            sums, tuple(index for index, number in enumerate(self.numbers) if not self.lease.intact(number))
        )

    def end(self) -> None:
        if self.exposed is not None:
            self.exposed.end()
        self.blocks.clear()
        self.lease.end()


class Server:
    """Serves on a listening socket from the moment it is made; needs a running loop. `kind` is that of the transport.

    Without an `epoch` to begin with, a process that comes after this one begins with a later one.
    """

    def __init__(
        self,
        kind: str,
        listener: socket.socket,
        greeting: Greeting,
        carrier: Carrier | None = None,
        epoch: int | None = None,
    ) -> None:
        self._kind = kind
        self._listener = listener
        self._greeting = greeting
        self._carrier = carrier
        self.source: BlockSource | None = None
        self._table = LeaseTable(time.time_ns() // 1_000_000 if epoch is None else epoch)
        self._transfers: dict[str, _Transfer] = {}
        self._opening: set[str] = set()
        self._changed = asyncio.Event()
        self._said: set[str] = set()
        self._tasks = [
            asyncio.create_task(self._serve(), name="kv-serve"),
            asyncio.create_task(self._watch_time(), name="kv-leases"),
        ]

    @property
    def epoch(self) -> int:
        return self._table.epoch

    async def fence(self, grace_s: float) -> None:
        """Transport.fence"""
        self._table.fence()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._table.of_older_epochs():
                    self._changed.clear()
                    await self._changed.wait()
        opening = set(self._opening)
        late = self._table.cut()
        if late and self._carrier is not None:
            self._carrier.cut()
        await self._end(late)
        while opening & self._opening:  # a lease that is being taken cannot be called back: it is ended right after
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        self._table.fence()
        await self._end(self._table.cut())

    async def _end(self, transfers: Sequence[str]) -> None:
        """Cut off who reads their blocks, then give these back."""
        ended = [self._transfers.pop(name) for name in transfers if name in self._transfers]
        sending = [task for transfer in ended for task in transfer.sending]
        for task in sending:
            task.cancel()
        try:
            await asyncio.gather(*sending, return_exceptions=True)
        finally:
            for transfer in ended:
                transfer.end()
            self._changed.set()

    async def _watch_time(self) -> None:
        """End the transfers whose time is over."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            next_s = self._table.next_s()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if next_s is None else max(0.01, next_s - loop.time())):
                    await self._changed.wait()
            over = self._table.expire(loop.time())
            if over:
                _log.warning("%d transfers were not acknowledged in time; their blocks are free again", len(over))
                await self._end(over)

    # ------------------------------------------------------------------------------------------ connections

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as peers:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._listener)
                except OSError as error:
                    # Out of descriptors: others may still be served, and a loop without a pause would eat the core.
                    _log.warning("no connection for KV could be accepted: %s", error)
                    await asyncio.sleep(0.1)
                    continue
                peers.create_task(self._attend(connection, str(address[0])), name="kv-peer")

    async def _attend(self, connection: socket.socket, address: str) -> None:
        with connection:
            reader = _Reader(self._table, self._changed)
            try:
                stream = await self._greet(connection, address)
                if stream is not None:
                    await self._converse(stream, reader)
            except (OSError, EOFError, TimeoutError) as error:
                _log.debug("a connection of %s ended: %s", address, error or "it was too slow")
            except GyreError as error:
                _log.warning("a transfer to %s was refused: %s", address, error)
            except Exception:
                # One peer's transfer must not end the serving of the others.
                _log.exception("a transfer to %s failed", address)
            finally:
                reader.leave()

    async def _greet(self, connection: socket.socket, address: str) -> Stream | None:
        """None for a stranger, and for one who left or said nothing: whom our own proof does not convince does so too."""
        try:
            async with asyncio.timeout(_GREET_S):
                return await self._greeting.accept(connection)
        except Refused as error:
            self._say_once(f"{address} asked for a transfer and is refused", error)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            self._say_once(f"{address} connected for a transfer and has not greeted", error)
        return None

    def _say_once(self, what: str, why: Exception) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("%s (said once): %s", what, str(why) or f"nothing came within {_GREET_S:g} s")

    async def _converse(self, stream: Stream, reader: _Reader) -> None:
        while True:
            # Who reads a transfer may take the time that this has: its bytes may come another way.
            async with asyncio.timeout(LONGEST_S if reader.reads else _IDLE_S):
                message = await stream.receive_frame()
            try:
                await self._answer(stream, reader, message)
            except Refused as error:
                await stream.send_frame(Refusal(str(error)))

    async def _answer(self, stream: Stream, reader: _Reader, message: Any) -> None:
        match message:
            case Open():
                await stream.send_frame((await self._open(message, reader)).offer)
            case Fetch():
                transfer = self._read(message.transfer, message.epoch, reader)
                await self._send(stream, transfer, message.begin, message.end)
            case AskChecksums():
                transfer = self._read(message.transfer, message.epoch, reader)
                await stream.send_frame(transfer.checksums())
            case Acknowledge():
                reader.leave()
                if self._table.acknowledge(message.transfer, message.epoch):
                    await self._end([message.transfer])
            case _:
                raise BadInput("message", type(message).__name__, "a peer opens, fetches and acknowledges")

    # ------------------------------------------------------------------------------------------ transfers

    async def _open(self, message: Open, reader: _Reader) -> _Transfer:
        manifest = message.manifest
        if message.carrier != self._kind:
            raise Refused(f"the peer's transport is {message.carrier}, and ours is {self._kind}")
        known = self._transfers.get(manifest.transfer)
        if known is None or known.manifest != manifest:  # else the connection broke before our offer arrived
            if self.source is None:
                raise Refused("this peer serves nothing")
            if message.hold_s <= 0:
                raise Refused("the blocks are wanted for no time at all")
            reader.open(manifest, message.hold_s)
            self._opening.add(manifest.transfer)
            try:
                await self._hold(manifest, self.source)
            except BaseException:
                self._table.acknowledge(manifest.transfer, manifest.epoch)
                raise
            finally:
                self._opening.discard(manifest.transfer)
                self._changed.set()
        return self._read(manifest.transfer, manifest.epoch, reader)

    async def _hold(self, manifest: Manifest, source: BlockSource) -> None:
        lease = await source.lease(manifest)
        try:
            here = [(number, block) for number, block in enumerate(lease.blocks) if block is not None]
            numbers, blocks = [number for number, _ in here], [block for _, block in here]
            if len({len(block) for block in blocks}) > 1:
                raise Refused("the blocks here are not of one size")
            exposed = None if self._carrier is None or not blocks else await self._carrier.expose(blocks)
        except BaseException:
            lease.end()
            raise
        offer = Offer(
            len(blocks[0]) if blocks else 0,
            tuple(number for number, block in enumerate(lease.blocks) if block is None),
            exposed.engine if exposed else "",
            exposed.place if exposed else 0,
        )
        transfer = _Transfer(manifest, lease, offer, blocks, numbers, exposed)
        if manifest.transfer in self._table:
            self._transfers[manifest.transfer] = transfer
        else:  # its time was over, or its epoch, before it had begun
            transfer.end()

    def _read(self, name: str, epoch: int, reader: _Reader) -> _Transfer:
        """The transfer, which this connection reads from now on. Raises Refused when it holds nothing (any more)."""
        reader.join(name, epoch)
        return self._transfers[name]

    async def _send(self, stream: Stream, transfer: _Transfer, begin: int, end: int) -> None:
        blocks = transfer.blocks
        size = len(blocks[0]) if blocks else 1
        if self._carrier is not None or not 0 <= begin < end <= len(blocks) * size:
            raise Refused(f"bytes {begin} to {end} are not among the {len(blocks) * size} that were offered")
        task = _this_task()
        transfer.sending.add(task)
        try:
            await stream.send_frame(Granted())
            await self._send_blocks(stream, transfer, begin, end, size)
        finally:
            transfer.sending.discard(task)

    async def _send_blocks(self, stream: Stream, transfer: _Transfer, begin: int, end: int, size: int) -> None:
        blocks = transfer.blocks
        several = max(1, _SEND_BYTES // size)
        for first in range(begin // size, -(-end // size), several):
            numbers = range(first, min(first + several, -(-end // size)))
            for number in numbers:
                transfer.checksum(number)
            await stream.send(
                [blocks[number][max(0, begin - number * size) : end - number * size] for number in numbers]
            )


class _Reader:
    """What one connection reads: a transfer at a time."""

    def __init__(self, table: LeaseTable, changed: asyncio.Event) -> None:
        self._table = table
        self._changed = changed
        self.reads: tuple[str, int] | None = None
        """Name and epoch."""

    def open(self, manifest: Manifest, hold_s: float) -> None:
        self.leave()
        self._table.open(manifest.transfer, manifest.epoch, asyncio.get_running_loop().time(), hold_s)
        self.reads = (manifest.transfer, manifest.epoch)

    def join(self, transfer: str, epoch: int) -> None:
        if self.reads != (transfer, epoch) or transfer not in self._table:
            self.leave()
            self._table.attach(transfer, epoch, asyncio.get_running_loop().time())
            self.reads = (transfer, epoch)
            self._changed.set()

    def leave(self) -> None:
        if self.reads is not None:
            self._table.detach(*self.reads, asyncio.get_running_loop().time())
            self.reads = None
            self._changed.set()


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
