"""A watch of etcd that goes on by itself, on whichever endpoint answers, and loses and repeats nothing.

etcd sends all changes of one revision together, so the revision after the last one given is where to go on. A member
that is frozen says nothing, like one that has nothing to say; so a silent watch has its endpoint checked.

A watch that has to go on elsewhere after a compaction may be told Compacted although nothing of its own prefix was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from gyre.store.etcd import messages
from gyre.store.etcd.api import Message, method
from gyre.store.etcd.client import CALL_S, EOF, EtcdClient, Unanswered
from gyre.store.etcd.status import Failure, failure
from gyre.store.protocol import Compacted, Event, StoreClosed

SILENT_S = 2.0
"""After so long without a word the endpoint is checked."""
_PAUSE_S = 0.2
"""Before a watch goes on, so that a cluster without a leader is not asked all the time."""


async def watch(client: EtcdClient, prefix: str, from_revision: int) -> AsyncGenerator[Event, None]:
    """Every change under `prefix` from `from_revision` on. Raises Compacted, and StoreClosed when the client closes."""
    revision = from_revision
    while True:
        try:
            async with aclosing(_answers(client, prefix, revision)) as answers:
                async for answer in answers:
                    for message in answer.events:
                        yield messages.event(message)
                    if answer.events:
                        revision = answer.events[-1].kv.mod_revision + 1
        except Unanswered:
            await asyncio.sleep(_PAUSE_S)


async def oldest_revision(client: EtcdClient) -> int:
    """The oldest revision that can be read, of a store that has been compacted: etcd tells it only to a watch."""

    async def attempt() -> int:
        try:
            async with asyncio.timeout(CALL_S), aclosing(_answers(client, _root(client), 1)) as answers:
                async for _ in answers:  # the first says that the watch is made
                    pass
        except Compacted as error:
            return error.revision
        except TimeoutError:
            pass
        raise Unanswered("etcd did not tell its oldest revision")

    return await client.patiently(attempt)


def _root(client: EtcdClient) -> str:
    return f"/gyre/{client.address.cluster}/"


async def _answers(client: EtcdClient, prefix: str, revision: int) -> AsyncGenerator[Message, None]:
    """What one stream to one endpoint brings. Raises Unanswered when it is over, and Compacted."""
    endpoint, token, call = await client.stream(method("Watch", "Watch"))
    reading: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    closing = asyncio.ensure_future(client.closed.wait())
    try:
        await call.write(messages.watch_request(prefix, revision))
        while True:
            reading = asyncio.ensure_future(call.read())
            while not reading.done():
                await asyncio.wait({reading, closing}, timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
                if client.closed.is_set():
                    raise StoreClosed("the state store is closed")
                if not reading.done():
                    await client.check(endpoint, SILENT_S)
            answer = reading.result()
            if answer is EOF:
                raise client.leave(endpoint, "the watch ended")
            client.heard(endpoint)
            if answer.compact_revision:
                raise Compacted(answer.compact_revision)
            if answer.canceled:
                kind = failure("", answer.cancel_reason)
                resumes = kind in (Failure.OTHER, Failure.UNANSWERED)
                raise client.error(Failure.UNANSWERED if resumes else kind, answer.cancel_reason, endpoint, token)
            yield answer
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        raise await client.stream_ended(call, endpoint, token) from None
    except asyncio.CancelledError:
        client.raise_if_closed()
        raise
    finally:
        call.cancel()
        reading.cancel()
        closing.cancel()
        await asyncio.gather(reading, closing, return_exceptions=True)
