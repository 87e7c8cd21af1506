"""The pages of one SGLang scheduler, exchanged with its peers: what `hicache` joins to SGLang, and knows nothing of it.

    gateway ── lack, pull ──▶ exchange ── pulls ──▶ the peer's exchange ── leases ──▶ the peer's host pool
                                 │ arrivals
    SGLang's threads ── present? fetch ──▶ copied into its host pool

The network has a thread and an event loop of its own. SGLang's threads never wait for it: what they may have is in
memory already, because the gateway ordered it before it sent the request that wants it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gyre.credentials import Credentials
from gyre.engine.access import http_key
from gyre.engine.client import EngineClient
from gyre.engine.records import KvLack, KvPulled
from gyre.errors import BadInput, GyreError, Refused
from gyre.kv_migrate.arrivals import Arrivals, Pieces
from gyre.kv_migrate.greeting import Certificates, SharedSecret
from gyre.kv_migrate.hicache_settings import HicacheSettings
from gyre.kv_migrate.host_pages import HostPages, Page
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.opening import open_transport
from gyre.kv_migrate.orders import OrderServer
from gyre.kv_migrate.pacing import Pacer, Turn
from gyre.kv_migrate.page_ranks import Ranks
from gyre.kv_migrate.staging import Staging
from gyre.kv_migrate.transport import BlockLease, Received, SourceLost, Transport

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
PageNames = Callable[[Sequence[int], int], list[bytes]]
"""The names of the whole pages of a prefix under a version, as the engine itself makes them."""

_PIECE = 2
"""Bytes of a piece's number, behind its page's name."""
_EPOCH = 1
"""The only one: a page's name says all of what it is, so it is good from whichever process has it."""
_SHARE_PIECES = 1 << 16
"""What is pulled at once: the names have to fit into a message. Each share's memory is kept and dropped as one."""
_START_S = 120.0
_LEFT_ALONE_S = 5.0
"""A source that was lost is asked nothing for so long."""
_log = logging.getLogger(__name__)


class PageExchange:
    """One rank's. Serves from when it is made until `close`. Raises BadInput or
    Unavailable where it cannot. `names` may be called on any thread."""

    def __init__(
        self,
        settings: HicacheSettings,
        pages: HostPages,
        page_tokens: int,
        names: PageNames,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._settings = settings
        self._pages = pages
        self._page_tokens = page_tokens
        self._names = names
        self._rank, self._ranks = rank, ranks
        self._layout = f"{pages.shape}/tp{ranks}"
        self._own_layout = f"{self._layout}, rank {rank}"
        """Of the pieces, which two ranks must never take for each other's."""
        self._arrivals = Arrivals(settings.keep_bytes)
        self._pacer = Pacer()
        self._lost: dict[str, float] = {}
        self._grew: set[asyncio.Event] = set()
        self._others: list[EngineClient] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gyre-kv", daemon=True)
        self._thread.start()
        try:
            self._transport, self._carrier, self._server = self._run(self._serve())
        except BaseException:
            self._end_loop()
            raise
        _log.info("KV pages move over %s; orders at %s", self._carrier, settings.orders)

    def close(self) -> None:
        """May be called again."""
        if not self._loop.is_closed():
            self._run(self._stop())
            self._end_loop()
            self._pages.let_go()

    # ------------------------------------------------------------------------------------------ SGLang's threads

    def present(self, names: Sequence[bytes]) -> int:
        """How many of the pages, from the first on, `fetch` can give."""
        found = self._pages.find(names)
        for count, (name, page) in enumerate(zip(names, found, strict=True)):
            if page is None and name not in self._arrivals:
                return count
        return len(names)

    def fetch(self, names: Sequence[bytes], slots: Tensor) -> list[bool]:
        """Copy pages into slots of the host pool that SGLang has set aside, up to the first that is not here."""
        firsts: list[int] = slots[:: len(slots) // max(1, len(names))].tolist()
        came: list[bool] = []
        for name, first in zip(names, firsts, strict=True):
            came.append(self._fetch(name, first))
            if not came[-1]:
                break
        whole = sum(came)
        self.written(names[:whole], slots[: whole * self._page_tokens])
        return [*came, *[False] * (len(names) - len(came))]

    def written(self, names: Sequence[bytes], slots: Tensor) -> None:
        """SGLang has these pages in its host pool: peers may read them from now on."""
        self._pages.written(names, slots)
        self._loop.call_soon_threadsafe(self._tell_those_who_wait)

    def _fetch(self, name: bytes, first_slot: int) -> bool:
        pieces = self._arrivals.take(name)
        if pieces is not None:
            self._pages.fill(first_slot, pieces)
            return True
        (page,) = self._pages.find([name])  # another request has brought it, or SGLang has computed it meanwhile
        if page is None:
            return False
        self._pages.fill(first_slot, self._pages.views(page))
        return self._pages.intact(name, page)

    # ------------------------------------------------------------------------------------------ orders

    async def about(self) -> dict[str, Any]:
        return {
            "address": self._transport.describe(),
            "epoch": self._transport.epoch,
            "layout": self._layout,
            "block_tokens": self._page_tokens,
            "model": self._settings.model,
            "carrier": self._carrier,
        }

    async def lack(self, token_ids: Sequence[int], version: int) -> KvLack:
        """Which whole pages of the prefix are neither in the host pool nor among the arrivals."""
        names = await asyncio.to_thread(self._names, token_ids, version)
        return KvLack(version, self._layout, len(names), tuple(self._missing(names)))

    async def pull(self, source: str, manifest: Manifest, deadline_s: float, bytes_s: float = 0.0) -> KvPulled:
        """Fetch pages from the peer at `source` and keep them for the request that will want them."""
        started_s = time.monotonic()
        try:
            count, size, damaged = await self._pull(source, manifest, deadline_s, self._pacer.turn(bytes_s))
        except GyreError as error:
            return KvPulled(0, 0, 0, time.monotonic() - started_s, str(error))
        return KvPulled(count, size, damaged, time.monotonic() - started_s, "")

    async def _pull(self, source: str, manifest: Manifest, deadline_s: float, turn: Turn) -> tuple[int, int, int]:
        """Pages that are here by it, their bytes, and the pages that came damaged."""
        self._check(manifest, self._layout)
        if self._lost.get(source, 0.0) > time.monotonic():
            raise Refused(f"{source} was lost a moment ago and is left alone")
        # The start of a prefix is worth more than its end: without room for all, the first ones are taken.
        missing = self._missing(manifest.blocks)[: self._settings.keep_bytes // self._pages.page_bytes]
        step = max(1, min(_SHARE_PIECES // self._pages.pieces, self._transport.share_bytes // self._pages.page_bytes))
        came = damaged = 0
        until_s = time.monotonic() + deadline_s
        for first in range(0, len(missing), step):
            share = replace(
                manifest, transfer=f"{manifest.transfer}.{first}", blocks=tuple(missing[first : first + step])
            )
            try:
                whole, spoilt = await self._pull_share(source, share, until_s - time.monotonic(), turn)
            except GyreError:
                if not came:
                    raise
                break  # what has come is worth having
            came, damaged = came + whole, damaged + spoilt
        return len(manifest.blocks) - len(self._missing(manifest.blocks)), came * self._pages.page_bytes, damaged

    async def _pull_share(self, source: str, manifest: Manifest, deadline_s: float, turn: Turn) -> tuple[int, int]:
        """Pages that came whole, and pages that came damaged."""
        numbers = range(self._pages.pieces)
        pieces = tuple(_piece_name(name, number) for name in manifest.blocks for number in numbers)
        wanted = replace(manifest, layout=self._own_layout, blocks=pieces)
        size = len(manifest.blocks) * self._pages.page_bytes
        try:
            received = await self._transport.pull(
                source, wanted, self._pages.piece_bytes, Staging(size), max(0.001, deadline_s), turn
            )
        except SourceLost:
            self._lost[source] = time.monotonic() + _LEFT_ALONE_S
            raise
        whole = _whole(received, self._pages.pieces)
        self._arrivals.put(manifest.version, size, whole)
        return len(whole), min(len(manifest.blocks) - len(whole), -(-received.damaged // self._pages.pieces))

    def _missing(self, names: Sequence[bytes]) -> list[bytes]:
        found = zip(names, self._pages.find(names), strict=True)
        return [name for name, page in found if page is None and name not in self._arrivals]

    # ------------------------------------------------------------------------------------------ peers

    async def lease(self, manifest: Manifest) -> BlockLease:
        """The pieces that are here, for a peer. Refused when the model or the layout differs."""
        self._check(manifest, self._own_layout)
        pages = list(dict.fromkeys(name[:-_PIECE] for name in manifest.blocks))
        found = dict(zip(pages, await self._settled(pages), strict=True))
        return _Lease(self._pages, manifest.blocks, found)

    async def _settled(self, names: Sequence[bytes]) -> list[Page | Pieces | None]:
        """The pages that are here, after a moment for those that are not: SGLang writes what a request has
        generated only when it ends, and a little after the answer to that."""
        grew = asyncio.Event()
        self._grew.add(grew)
        try:
            # Half of what the peer waits for a word, unless it is set to wait less.
            async with asyncio.timeout(self._settings.silence_s / 2):
                while None in (found := self._here(names)):
                    await grew.wait()
                    grew.clear()
        except TimeoutError:
            return self._here(names)
        else:
            return found
        finally:
            self._grew.discard(grew)

    def _here(self, names: Sequence[bytes]) -> list[Page | Pieces | None]:
        """In the host pool; or as they have come, where no request of this engine has wanted them yet."""
        came = self._arrivals.find(names)  # first: from there a page goes to the pool
        written = self._pages.find(names)
        return [page or pieces for page, pieces in zip(written, came, strict=True)]

    def _tell_those_who_wait(self) -> None:
        for grew in self._grew:
            grew.set()

    def _check(self, manifest: Manifest, layout: str) -> None:
        if manifest.model != self._settings.model:
            raise Refused(f"KV of model {manifest.model} was asked for, and this engine's is {self._settings.model}")
        if manifest.layout != layout:
            raise Refused(f"KV of layout {manifest.layout} was asked for, and this engine's is {layout}")

    # ------------------------------------------------------------------------------------------ the thread

    async def _serve(self) -> tuple[Transport, str, OrderServer]:
        settings = self._settings
        secret = _secret(Path(settings.secret_file))
        host, _, port = settings.orders.rpartition(":")
        named = settings.certificates
        greeting = Certificates(Credentials(*map(Path, named))) if named else SharedSecret(secret)
        key = http_key(secret.decode())
        if self._rank == 0 and self._ranks > 1:
            further = range(int(port) + 1, int(port) + self._ranks)
            self._others = [EngineClient.of_orders(f"http://{host}:{each}", key) for each in further]
        transport, carrier = await open_transport(settings.transport, greeting, host, settings.silence_s, _EPOCH)
        server = OrderServer(Ranks(self, self._others) if self._others else self, key)
        try:
            await server.serve(host, int(port) + self._rank)
        except BaseException:
            await transport.close()
            raise
        transport.register(self)
        return transport, carrier, server

    async def _stop(self) -> None:
        await self._server.close()
        await self._transport.close()
        for other in self._others:
            await other.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        self._loop.close()


class _Lease:
    """Keeps nobody from freeing the pages: SGLang's ranks must all see their pools change alike, and its scheduler must not
    wait for a peer. What was freed while it was read is not intact, and the peer drops it (decision 0011). Of what has come
    and lies beside the pool the lease has the memory."""

    def __init__(self, pages: HostPages, names: Sequence[bytes], found: dict[bytes, Page | Pieces | None]) -> None:
        self._pages = pages
        self._read = [(name[:-_PIECE], found[name[:-_PIECE]]) for name in names]
        numbers = [int.from_bytes(name[-_PIECE:], "big") for name in names]
        self.blocks: Sequence[memoryview | None] = [
            _piece(pages, page, number) for (_, page), number in zip(self._read, numbers, strict=True)
        ]

    def intact(self, number: int) -> bool:
        name, page = self._read[number]
        return self._pages.intact(name, page) if isinstance(page, Page) else page is not None

    def end(self) -> None:
        self.blocks = ()


def _piece(pages: HostPages, page: Page | Pieces | None, number: int) -> memoryview | None:
    views = pages.views(page) if isinstance(page, Page) else page or ()
    return views[number] if number < len(views) else None


def _piece_name(page: bytes, number: int) -> bytes:
    return page + number.to_bytes(_PIECE, "big")


def _whole(received: Received, pieces: int) -> dict[bytes, Pieces]:
    """The pages of which every piece came as it was sent."""
    pages: dict[bytes, list[memoryview]] = {}
    for name, data in received.blocks:
        pages.setdefault(name[:-_PIECE], []).append(data)
    return {name: came for name, came in pages.items() if len(came) == pieces}


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise BadInput("secret_file", str(path), f"it must be readable ({error.strerror})") from error
    if len(secret) < 16:
        raise BadInput("secret_file", str(path), "at least 16 bytes are expected in it")
    return secret
