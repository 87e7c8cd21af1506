"""The engine's side of moving KV: it serves its blocks to peers, and pulls from peers what it lacks.

Stands between the transport (sockets, on the event loop) and the block store (the engine's thread).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from gyre.engine.local.thread import EngineThread
from gyre.engine.records import KvLack, KvPulled
from gyre.errors import GyreError
from gyre.kv_migrate.blocks import block_hashes
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.pacing import Pacer
from gyre.kv_migrate.staging import StagingPool
from gyre.kv_migrate.transport import BlockLease, Transport

_KEEP_BYTES = 256 << 20
"""Of staging memory that lies idle between two pulls."""


class KvExchange:
    """Made with an open transport; `serve` joins it to the engine. `carrier` says which transport it is, and why."""

    def __init__(self, transport: Transport, carrier: str) -> None:
        self._transport = transport
        self.carrier = carrier
        self._thread: EngineThread | None = None
        self._staging = StagingPool(_KEEP_BYTES)
        self._pacer = Pacer()

    @property
    def address(self) -> str:
        return self._transport.describe()

    @property
    def epoch(self) -> int:
        return self._transport.epoch

    def serve(self, thread: EngineThread) -> None:
        self._thread = thread
        self._transport.register(self)

    async def lease(self, manifest: Manifest) -> BlockLease:
        """Hold the manifest's blocks for a peer. Refused when the model, the version or the layout differs."""
        thread = self._engine()
        taking = asyncio.ensure_future(thread.call(lambda core: core.store.lease(manifest)))
        try:
            return _Lease(thread, await asyncio.shield(taking))
        except asyncio.CancelledError:
            # The engine's thread takes them all the same, and nobody else would give them back.
            taking.add_done_callback(lambda done: _give_back(thread, done))
            raise

    async def lack(self, token_ids: Sequence[int], version: int) -> KvLack:
        """Which whole blocks of the prefix are not here."""
        store = (await self._engine().call(lambda core: core)).store
        names = block_hashes(token_ids, version, store.block_tokens)
        missing = await self._engine().call(lambda core: core.store.lack(names, version))
        return KvLack(version, store.layout, len(names), tuple(missing))

    async def pull(self, source: str, manifest: Manifest, deadline_s: float, bytes_s: float) -> KvPulled:
        """Fetch blocks from the peer at `source`; commit all that came whole, or nothing with the reason.

        At `bytes_s`; 0: a request waits for them, and they overtake those that have a rate.
        """
        started_s = time.monotonic()
        thread = self._engine()
        try:
            # Refuse before the bytes travel; `commit` looks again, for what is held may change meanwhile.
            size = await thread.call(lambda core: core.store.check(manifest).block_bytes)
            staging = self._staging.take(size * len(manifest.blocks))
            received = await self._transport.pull(
                source, manifest, size, staging, deadline_s, self._pacer.turn(bytes_s)
            )
            count = await thread.call(lambda core: core.store.commit(received.blocks, manifest))
        except GyreError as error:
            return KvPulled(0, 0, 0, time.monotonic() - started_s, str(error))
        # Not in a `finally`: the engine's thread may still read for a commit that nobody waits for any more.
        self._staging.give_back(staging)
        return KvPulled(count, count * size, received.damaged, time.monotonic() - started_s, "")

    async def fence(self, grace_s: float) -> None:
        """Let peers that read blocks finish, or cut them off."""
        await self._transport.fence(grace_s)

    async def close(self) -> None:
        await self._transport.close()

    def _engine(self) -> EngineThread:
        assert self._thread is not None, "serve() comes first"
        return self._thread


class _Lease:
    def __init__(self, thread: EngineThread, held: Sequence[tuple[int, memoryview] | None]) -> None:
        self._thread = thread
        self._numbers = [item[0] for item in held if item is not None]
        self.blocks: Sequence[memoryview | None] = [None if item is None else item[1] for item in held]

    def intact(self, number: int) -> bool:
        return True  # the block store neither evicts nor overwrites what is leased

    def end(self) -> None:
        numbers, self._numbers = self._numbers, []
        if numbers:
            self._thread.send(lambda core: core.store.end_lease(numbers))


def _give_back(thread: EngineThread, taken: asyncio.Future[list[tuple[int, memoryview] | None]]) -> None:
    if not taken.cancelled() and taken.exception() is None:
        _Lease(thread, taken.result()).end()
