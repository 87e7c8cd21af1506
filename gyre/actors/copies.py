"""A snapshot is published when a second node holds it too, so that the death of one node loses no version.

All other nodes are asked at once to have it: the first that does lets the publication go on, and the rest have it sooner.
"""

from __future__ import annotations

import asyncio

from gyre.actors.messages import Ok
from gyre.actors.messages_snapshots import HoldSnapshot
from gyre.actors.site import Site
from gyre.errors import GyreError
from gyre.ids import NodeId

ASK_S = 600.0
RETRY_S = 0.5


async def copied(site: Site, version: int, digest: str) -> None:
    """Until another node holds it. At once where there is none: then ours is the only copy there can be."""
    message = HoldSnapshot(version, digest, site.node)

    async def ask(node: NodeId) -> bool:
        while node in site.directory.nodes:
            try:
                await site.on(node, "node").ask(message, ASK_S, Ok)
            except GyreError as error:
                site.warn(f"{node} does not have snapshot {version} yet: {error}")
            else:
                return True
            await asyncio.sleep(RETRY_S)
        return False

    asked = [asyncio.ensure_future(ask(node)) for node in site.directory.nodes if node != site.node]
    try:
        for first in asyncio.as_completed(asked):
            if await first:
                return
    finally:  # who was asked goes on with it
        for each in asked:
            each.cancel()
