"""A node of a cluster that waits for a job: it is seen, and says at its port which versions it has.

Its record hangs on a lease of its own, beside all jobs; `gyrectl node list` and `gyrectl doctor` read it. What a node does
of a job it does elsewhere, and under that job's keys.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from gyre import __version__
from gyre.actors.messages_gyrectl import GetVersion, Version
from gyre.actors.node_config import Membership
from gyre.actors.peers import Peers
from gyre.actors.runtime import Actor, ActorSystem, Backoff, LocalRef, handles
from gyre.errors import GyreError, Unavailable
from gyre.ids import NodeId
from gyre.store.protocol import Lease
from gyre.store.records import WaitingRecord, waiting_prefix
from gyre.store.typed import TypedStore

LEASE_S = 10.0
AGAIN_S = 1.0
REVOKE_S = 1.0

log = logging.getLogger("gyred")


class WaitingActor(Actor):
    @handles(GetVersion)
    async def version(self, _: GetVersion) -> Version:
        return Version(__version__, platform.python_version(), time.time())


@asynccontextmanager
async def seen_waiting(node: NodeId, membership: Membership, store: TypedStore, cluster: str) -> AsyncGenerator[None]:
    """Be there while entered. Raises BadInput or Refused for certificates and an address that cannot be used."""
    async with ActorSystem.running(node) as system:
        clerk = system.spawn("node", WaitingActor, restart=Backoff())

        def find(actor: str) -> LocalRef:
            if actor != "node":
                raise Unavailable(f"{actor!r} is not on {node}: it waits for a job")
            return clerk

        async with Peers(node, membership.credentials, find, membership.address) as peers:
            me = WaitingRecord(node, peers.address, membership.cells, __version__)
            staying = asyncio.ensure_future(_stay(store, f"{waiting_prefix(cluster)}{node}", me))
            try:
                yield
            finally:
                staying.cancel()
                await asyncio.gather(staying, return_exceptions=True)


async def _stay(store: TypedStore, key: str, me: WaitingRecord) -> None:
    """Hold the record by a lease, and by another when that is lost; give it back at the end."""
    said = ""
    while True:
        lease: Lease | None = None
        try:
            lease = await store.store.lease(LEASE_S)
            await store.put(key, me, lease.id)
            while True:
                await asyncio.sleep(lease.ttl_s / 3)
                with suppress(Unavailable):  # it is proven still; when it is not any more it is lost
                    await lease.keep_alive()
        except GyreError as error:
            if str(error) != said:
                log.info("nobody sees that %s waits for a job: %s", me.node, error)
            said = str(error)
        finally:
            if lease is not None:
                with suppress(GyreError, TimeoutError):
                    async with asyncio.timeout(REVOKE_S):
                        await lease.revoke()
        await asyncio.sleep(AGAIN_S)
