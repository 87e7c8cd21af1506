"""The ranks of one engine as one exchange: each has a share of every page, and moves it by itself.

The first rank takes the orders. It carries each out itself and hands it on to the others, over the orders that these
serve one port on from it each. The engine's address is those of its ranks, with commas; two engines exchange
pages when they have as many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from gyre.engine.client import EngineClient
from gyre.engine.records import EngineGone, KvLack, KvPulled
from gyre.errors import GyreError, Unavailable
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.orders import Exchange


class Ranks:
    """An Exchange: `first` is this rank's own, `others` are clients of the others', in the order of the ranks."""

    def __init__(self, first: Exchange, others: Sequence[EngineClient]) -> None:
        self._first = first
        self._others = others

    async def about(self) -> dict[str, Any]:
        """Raises Unavailable while a rank does not serve."""
        mine = await self._first.about()
        try:
            theirs = await asyncio.gather(*(rank.kv_about() for rank in self._others))
        except EngineGone as error:
            raise Unavailable("not all ranks of this engine say where their pages are") from error
        return {**mine, "address": ",".join([mine["address"], *(rank["address"] for rank in theirs)])}

    async def lack(self, token_ids: Sequence[int], version: int) -> KvLack:
        """SGLang writes and frees pages on all ranks alike, so what one lacks all do."""
        return await self._first.lack(token_ids, version)

    async def pull(self, source: str, manifest: Manifest, deadline_s: float, bytes_s: float) -> KvPulled:
        """What all ranks have by it. SGLang takes no more of a prefix than the rank that has the least."""
        started_s = time.monotonic()
        addresses = source.split(",")
        if len(addresses) != 1 + len(self._others):
            reason = f"{source} has other ranks than this engine, which has {1 + len(self._others)}"
            return KvPulled(0, 0, 0, 0.0, reason)
        each_s = bytes_s / len(addresses)
        shares = await asyncio.gather(
            self._first.pull(addresses[0], manifest, deadline_s, each_s),
            *(
                _share(rank, address, manifest, deadline_s, each_s)
                for rank, address in zip(self._others, addresses[1:], strict=True)
            ),
        )
        return KvPulled(
            blocks=min(share.blocks for share in shares),
            bytes=sum(share.bytes for share in shares),
            damaged=max(share.damaged for share in shares),
            seconds=time.monotonic() - started_s,
            reason=next((share.reason for share in shares if share.reason), ""),
        )


async def _share(rank: EngineClient, address: str, manifest: Manifest, deadline_s: float, bytes_s: float) -> KvPulled:
    try:
        return await rank.kv_pull(address, manifest, deadline_s, bytes_s)
    except GyreError as error:
        return KvPulled(0, 0, 0, 0.0, str(error))
