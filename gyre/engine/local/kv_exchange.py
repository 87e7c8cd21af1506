"""The engine's side of moving KV: it serves its blocks to peers, and pulls from peers what it lacks.

Stands between the transport (sockets, on the event loop) and the block store (the engine's thread).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from gyre.engine.local.thread import EngineThread
from gyre.engine.records import KvLack, KvPulled
from gyre.errors import GyreError
from gyre.kv_migrate.blocks import block_hashes
from gyre.kv_migrate.transport import BlockLease, Manifest, Transport


class KvExchange:
    """Made with an open transport; `serve` joins it to the engine."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._thread: EngineThread | None = None

    @property
    def address(self) -> str:
        return self._transport.describe()

    def serve(self, thread: EngineThread) -> None:
        self._thread = thread
        self._transport.register(self)

    async def lease(self, manifest: Manifest) -> BlockLease:
        """Hold the manifest's blocks for a peer. Refused when the version or the layout differs."""
        thread = self._engine()
        held = await thread.call(lambda core: core.store.lease(manifest.blocks, manifest.version, manifest.layout))
        return _Lease(thread, held)

    async def lack(self, token_ids: Sequence[int], version: int) -> KvLack:
        """Which whole blocks of the prefix are not here."""
        store = (await self._engine().call(lambda core: core)).store
        names = block_hashes(token_ids, version, store.block_tokens)
        missing = await self._engine().call(lambda core: core.store.lack(names, version))
        return KvLack(version, store.layout, len(names), tuple(missing))

    async def pull(self, source: str, names: Sequence[bytes], version: int, layout: str, deadline_s: float) -> KvPulled:
        """Fetch blocks from the peer at `source`; commit all that it had, or nothing with the reason."""
        started_s = time.monotonic()
        thread = self._engine()
        try:
            # Refuse before the bytes travel; `commit` looks again, for the version may change meanwhile.
            size = await thread.call(lambda core: core.store.check(version, layout).block_bytes)
            manifest = Manifest(uuid.uuid4().hex, version, layout, tuple(names))
            received = await self._transport.pull(source, manifest, size, deadline_s)
            count = await thread.call(lambda core: core.store.commit(received.blocks, version, layout))
        except GyreError as error:
            return KvPulled(0, 0, time.monotonic() - started_s, str(error))
        return KvPulled(count, count * size, time.monotonic() - started_s, "")

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

    def end(self) -> None:
        numbers, self._numbers = self._numbers, []
        if numbers:
            self._thread.send(lambda core: core.store.end_lease(numbers))
