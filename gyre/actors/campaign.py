"""A node's campaign to lead: win, hold the lease until it is lost or given up, and campaign again, for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress

from gyre.actors.site import Site
from gyre.errors import Unavailable
from gyre.store.election import campaign_txn, elected
from gyre.store.protocol import Compacted, Lease, LeaseLost
from gyre.store.records import LeaderRecord

LEASE_S = 5.0
CAMPAIGN_PAUSE_S = 1.0
"""Before a campaign that the store did not take is begun again."""
RESIGN_PAUSE_S = 0.2
"""The others' head start, after this one gave the lease up, before it campaigns again."""


class Campaign:
    """`on_elected` is told the token, `on_deposed` why the lease is lost."""

    def __init__(self, site: Site, on_elected: Callable[[int], None], on_deposed: Callable[[str], None]) -> None:
        self._site = site
        self._on_elected = on_elected
        self._on_deposed = on_deposed
        self._lease: Lease | None = None
        self._resigned = asyncio.Event()

    async def run(self) -> None:
        site = self._site
        me = LeaderRecord(site.node, site.peers.address if site.peers else site.child_address("node"))
        while True:
            try:
                self._lease = lease = await site.store.store.lease(LEASE_S)
                result = await site.store.commit(campaign_txn(site.keys, me, lease.id))
                token = elected(result, lease.id)
                if token is None:
                    await lease.revoke()
                    await self._until_free(result.revision)
                    continue
            except (LeaseLost, Unavailable, Compacted):
                await asyncio.sleep(CAMPAIGN_PAUSE_S)
                continue
            self._resigned.clear()
            self._on_elected(token)
            try:
                while not await self._resigns_within(lease.ttl_s / 3):
                    with suppress(Unavailable):  # it is proven still; when it is not any more it is lost
                        await lease.keep_alive()
            except LeaseLost as error:
                self._on_deposed(str(error))
                continue
            with suppress(LeaseLost, Unavailable):  # else it runs out
                await lease.revoke()
            await asyncio.sleep(RESIGN_PAUSE_S)

    def resign(self) -> None:
        """Give the lease up at once."""
        self._resigned.set()

    async def end(self) -> None:
        """Give up whatever lease there is: else nobody could lead before it runs out."""
        if self._lease is not None:
            with suppress(LeaseLost, Unavailable):
                await self._lease.revoke()

    async def _resigns_within(self, limit_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return await self._resigned.wait()
        return False

    async def _until_free(self, revision: int) -> None:
        async with aclosing(self._site.store.store.watch(self._site.keys.leader, revision + 1)) as events:
            async for event in events:
                if event.kind == "delete":
                    return
