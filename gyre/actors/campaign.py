"""A node's campaign to lead: win, hold the lease until it is lost or given up, and campaign again, for ever.

While somebody leads, a candidate asks the store for nothing: that the leader's key has gone it hears from the directory.
Then it waits a moment of its own, the longer on average the more nodes there are, and campaigns if still nobody leads.
So of a thousand candidates a few ask for a lease at the same moment, and the first is there as soon as of three. Who
leads is decided by the transaction alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

from gyre.actors.site import Site
from gyre.errors import Unavailable
from gyre.store.election import campaign_txn, elected
from gyre.store.protocol import Lease, LeaseLost
from gyre.store.records import LeaderRecord

LEASE_S = 5.0
CAMPAIGN_PAUSE_S = 1.0
"""Before the next campaign after one that the store did not take, or another has won and we have not heard of yet."""
RESIGN_PAUSE_S = 0.2
"""The others' head start, after this one gave the lease up, before it campaigns again."""
SPREAD_S = 0.01
"""Between two candidates, on average, when nobody leads: so the first waits about as long, and a few more before they hear
of it. What a thousand take together is the longest."""
MOST_CANDIDATES = 1000


class Campaign:
    """`on_elected` is told the token, `on_deposed` why the lease is lost."""

    def __init__(self, site: Site, on_elected: Callable[[int], None], on_deposed: Callable[[str], None]) -> None:
        self._site = site
        self._on_elected = on_elected
        self._on_deposed = on_deposed
        self._lease: Lease | None = None
        self._token = 0
        self._proven_until_s = 0.0
        self._resigned = asyncio.Event()
        self._changed = asyncio.Event()
        self._random = random.Random(str(site.node))

    @property
    def token(self) -> int:
        """The leader's, as long as we lead and can prove it: by the last renewal of the lease that the store has told us
        of. Else 0, from that moment on, whatever anybody waits for."""
        return self._token if asyncio.get_running_loop().time() < self._proven_until_s else 0

    async def run(self) -> None:
        unsubscribe = self._site.directory.subscribe(self._changed.set)
        try:
            while True:
                await self._until_free()
                lease = await self._won()
                if lease is None:
                    await self._becomes(self._has_leader, CAMPAIGN_PAUSE_S)
                elif await self._lead(lease):
                    with suppress(LeaseLost, Unavailable):  # else it runs out
                        await lease.revoke()
                    await asyncio.sleep(RESIGN_PAUSE_S)
        finally:
            unsubscribe()

    def resign(self) -> None:
        """Give the lease up at once."""
        self._token = 0
        self._resigned.set()

    async def end(self) -> None:
        """Give up whatever lease there is: else nobody could lead before it runs out."""
        self._token = 0
        if self._lease is not None:
            with suppress(LeaseLost, Unavailable):
                await self._lease.revoke()

    # ------------------------------------------------------------------------------------------ nobody leads

    async def _until_free(self) -> None:
        """Until nobody leads as far as we know, and nobody has begun to in our own moment after that."""
        while True:
            await self._becomes(self._is_free, None)
            candidates = min(len(self._site.directory.nodes), MOST_CANDIDATES)
            moment_s = self._random.random() * SPREAD_S * (candidates - 1)
            if not await self._becomes(self._has_leader, moment_s):
                return

    def _is_free(self) -> bool:
        return self._site.directory.listed and self._site.directory.leader is None

    def _has_leader(self) -> bool:
        return self._site.directory.leader is not None

    async def _becomes(self, wanted: Callable[[], bool], limit_s: float | None) -> bool:
        """Whether the directory came to be so within the limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not wanted():
                    self._changed.clear()
                    await self._changed.wait()
                return True
        return False

    async def _won(self) -> Lease | None:
        """The lease under which we lead from now on; None when the store does not answer or another leads."""
        site = self._site
        me = LeaderRecord(site.node, site.peers.address if site.peers else site.child_address("node"))
        asked_s = asyncio.get_running_loop().time()
        with suppress(LeaseLost, Unavailable):
            self._lease = lease = await site.store.store.lease(LEASE_S)
            token = elected(await site.store.commit(campaign_txn(site.keys, me, lease.id)), lease.id)
            if token is not None:
                self._token, self._proven_until_s = token, asked_s + lease.ttl_s
                return lease
            await lease.revoke()
        return None

    # ------------------------------------------------------------------------------------------ we lead

    async def _lead(self, lease: Lease) -> bool:
        """Until we resign (True) or the lease is lost: the store says so, or its time is over and nothing has renewed it."""
        loop = asyncio.get_running_loop()
        self._resigned.clear()
        self._on_elected(self._token)
        try:
            async with asyncio.timeout_at(self._proven_until_s) as proven:
                while not await self._resigns_within(lease.ttl_s / 3):
                    with suppress(Unavailable):  # it is proven still
                        asked_s = loop.time()
                        self._proven_until_s = asked_s + await lease.keep_alive()
                        proven.reschedule(self._proven_until_s)
                return True
        except (LeaseLost, TimeoutError) as error:
            self._token = 0
            self._on_deposed(str(error) or "its lease could not be renewed in time")
            return False

    async def _resigns_within(self, limit_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return await self._resigned.wait()
        return False
