"""The receiver's end: it reaches the source, opens a transfer there, and comes back when a connection breaks."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import xxhash

from gyre.errors import BadInput, Refused
from gyre.kv_migrate.conversation import Acknowledge, AskChecksums, Checksums, Offer, Open, Refusal
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.stream import Greeting, Stream
from gyre.kv_migrate.transport import Received, SourceLost

T = TypeVar("T")

_LARGEST_TRANSFER_BYTES = 16 << 30
_TRIES = 4
"""Connections in a row that bring nothing before a peer is given up."""
_PAUSE_S = 0.05
_KEEP_S = 20.0
"""A connection that is idle for longer is not used again; the source closes it a while after that."""
_KEEP = 8
"""Idle connections to one peer."""
_SUM_BYTES = 8


class Patience:
    """Gives a peer up that fails again and again without a byte in between."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._failures = 0

    def progress(self) -> None:
        self._failures = 0

    async def failed(self, error: Exception) -> None:
        """Wait a moment before the next try. Raises SourceLost when there shall be none."""
        self._failures += 1
        if self._failures >= _TRIES:
            raise SourceLost(f"{self._address} was lost during a transfer ({error})") from error
        await asyncio.sleep(_PAUSE_S * 2**self._failures * (0.5 + secrets.randbelow(100) / 100))


class Line:
    """A connection to the source at `address`, of a transport of `kind`. It is made anew when it has broken. Close it."""

    def __init__(self, kind: str, address: str, greeting: Greeting) -> None:
        self.address = address
        self._place = parse_address(kind, address)
        self._greeting = greeting
        self.patience = Patience(address)
        self._socket: socket.socket | None = None
        self._stream: Stream | None = None

    async def stream(self) -> Stream:
        if self._stream is None:
            self.close()
            host, _ = self._place
            self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            self._socket.setblocking(False)
            await asyncio.get_running_loop().sock_connect(self._socket, self._place)
            self._stream = await self._greeting.introduce(self._socket)
        return self._stream

    async def ask(self, message: Any, answer: type[T]) -> T:
        """One question and its answer, once. Raises Refused when the source says no."""
        stream = await self.stream()
        await stream.send_frame(message)
        match await stream.receive_frame():
            case Refusal(reason):
                raise Refused(reason)
            case answered if isinstance(answered, answer):
                return answered
            case other:
                raise Refused(f"the peer answered with a {type(other).__name__}")

    async def ask_until_answered(self, message: Any, answer: type[T]) -> T:
        """The same over as many connections as it takes. Raises SourceLost when the peer is given up."""
        while True:
            try:
                answered = await self.ask(message, answer)
            except (OSError, EOFError) as error:
                self.close()
                await self.patience.failed(error)
            else:
                self.patience.progress()
                return answered

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._stream = None


class Lines:
    """Connections that are kept from one transfer to the next: a greeting, and a window that has opened, are worth it."""

    def __init__(self, kind: str, greeting: Greeting) -> None:
        self._kind = kind
        self._greeting = greeting
        self._idle: dict[str, list[tuple[float, Line]]] = {}

    def take(self, address: str) -> Line:
        """One to the peer at `address`. Raises BadInput for an address of another form or kind."""
        self._drop_old()
        idle = self._idle.get(address)
        return idle.pop()[1] if idle else Line(self._kind, address, self._greeting)

    def give_back(self, address: str, lines: Iterable[Line]) -> None:
        """Only those on which every question has had its answer."""
        now_s = asyncio.get_running_loop().time()
        self._idle.setdefault(address, []).extend((now_s, line) for line in lines)
        self._drop_old()

    def close(self) -> None:
        for idle in self._idle.values():
            for _, line in idle:
                line.close()
        self._idle.clear()

    def _drop_old(self) -> None:
        oldest_s = asyncio.get_running_loop().time() - _KEEP_S
        for address, idle in list(self._idle.items()):
            while idle and (idle[0][0] < oldest_s or len(idle) > _KEEP):
                idle.pop(0)[1].close()
            if not idle:
                del self._idle[address]


class Check:
    """Compares what arrived with what the source has, block by block."""

    def __init__(self, offer: Offer, manifest: Manifest, block_bytes: int, view: memoryview) -> None:
        missing = set(offer.missing)
        if not missing <= set(range(len(manifest.blocks))):
            raise Refused(f"the offer is without block {max(missing)} of {len(manifest.blocks)}")
        self._names = [name for number, name in enumerate(manifest.blocks) if number not in missing]
        if self._names and offer.block_bytes != block_bytes:
            raise Refused(f"blocks of {offer.block_bytes} bytes are offered, not {block_bytes}")
        self._block_bytes = block_bytes
        self._view = view
        self._sums = [b""] * self.count
        if self.total > _LARGEST_TRANSFER_BYTES:
            raise Refused(f"a transfer of {self.total} bytes is over the limit {_LARGEST_TRANSFER_BYTES}")

    @property
    def count(self) -> int:
        """Blocks that will come."""
        return len(self._names)

    @property
    def total(self) -> int:
        return self.count * self._block_bytes

    def whole(self, numbers: range) -> None:
        """These blocks are here: take their checksums, while they are still close at hand."""
        for number in numbers:
            self._sums[number] = xxhash.xxh3_64_digest(self._block(number))

    def received(self, theirs: Checksums) -> Received:
        """What is whole and right, by the source's checksums."""
        if len(theirs.sums) != self.count * _SUM_BYTES:
            raise Refused(f"{len(theirs.sums)} bytes of checksums came for {self.count} blocks")
        good: Sequence[int] = range(self.count)
        if theirs.taken_back or theirs.sums != b"".join(self._sums):
            taken_back = set(theirs.taken_back)
            good = [number for number in good if number not in taken_back and self._is_right(number, theirs.sums)]
        return Received(
            tuple((self._names[number], self._block(number)) for number in good), damaged=self.count - len(good)
        )

    def _is_right(self, number: int, theirs: bytes) -> bool:
        return self._sums[number] == theirs[number * _SUM_BYTES : (number + 1) * _SUM_BYTES]

    def _block(self, number: int) -> memoryview:
        return self._view[number * self._block_bytes : (number + 1) * self._block_bytes]


async def open_transfer(line: Line, manifest: Manifest, carrier: str, hold_s: float) -> Offer:
    return await line.ask_until_answered(Open(manifest, carrier, hold_s), Offer)


async def finish(line: Line, manifest: Manifest, check: Check) -> Received:
    """Compare the checksums, and let the source go. A lost acknowledgement only costs the source its patience."""
    sums = await line.ask_until_answered(AskChecksums(manifest.transfer, manifest.epoch), Checksums)
    received = check.received(sums)
    try:
        await (await line.stream()).send_frame(Acknowledge(manifest.transfer, manifest.epoch))
    except (OSError, EOFError):
        line.close()
    return received


def parse_address(kind: str, address: str) -> tuple[str, int]:
    """Host and port of a peer whose transport is of `kind`. Raises BadInput."""
    theirs, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput("kv address", address, f"{kind}:HOST:PORT is expected")
    if theirs != kind:
        raise BadInput("kv address", address, f"the transport here is {kind}, and {kind}:HOST:PORT is expected")
    return host, int(port)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises BadInput when the port is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise BadInput("kv address", f"{host}:{port}", f"it must be free ({error.strerror})") from error
    listener.setblocking(False)
    return listener
