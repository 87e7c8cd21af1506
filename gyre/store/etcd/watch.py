"""A watch of etcd that goes on by itself, on whichever endpoint answers, and loses and repeats nothing.

etcd sends all changes of one revision together, so the revision after the last one given is where to go on.

A watch that has to go on elsewhere after a compaction may be told Compacted although nothing of its own prefix was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from gyre.store.etcd import messages
from gyre.store.etcd.client import CALL_S, EtcdClient, Unanswered
from gyre.store.etcd.stream import Streams
from gyre.store.protocol import Compacted, Event

_PAUSE_S = 0.2
"""Before a watch goes on, so that a cluster without a leader is not asked all the time."""


async def watch(streams: Streams, prefix: str, from_revision: int) -> AsyncGenerator[Event, None]:
    """Every change under `prefix` from `from_revision` on. Raises Compacted, and StoreClosed when the store closes."""
    revision = from_revision
    while True:
        try:
            with streams.watch(prefix, revision) as watched:
                while True:
                    answer = await watched.next()
                    for message in answer.events:
                        yield messages.event(message)
                    if answer.events:
                        revision = answer.events[-1].kv.mod_revision + 1
        except Unanswered:
            await asyncio.sleep(_PAUSE_S)


async def oldest_revision(client: EtcdClient, streams: Streams) -> int:
    """The oldest revision that can be read, of a store that has been compacted: etcd tells it only to a watch."""

    async def attempt() -> int:
        try:
            async with asyncio.timeout(CALL_S):
                with streams.watch(f"/gyre/{client.address.cluster}/", 1) as watched:
                    while True:
                        await watched.next()
        except Compacted as error:
            return error.revision
        except TimeoutError:
            raise Unanswered("etcd did not tell its oldest revision") from None

    return await client.patiently(attempt)
