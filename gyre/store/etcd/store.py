"""The store on an etcd cluster, behind the store protocol: the same suite of tests holds for it and the embedded one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gyre.errors import BadInput, GyreError, Refused
from gyre.store.etcd import messages
from gyre.store.etcd.address import EtcdAddress
from gyre.store.etcd.api import message_class, method
from gyre.store.etcd.client import Answered, EtcdClient
from gyre.store.etcd.lease import granted
from gyre.store.etcd.receipts import Receipts
from gyre.store.etcd.status import Failure
from gyre.store.etcd.stream import Streams
from gyre.store.etcd.watch import oldest_revision, watch
from gyre.store.protocol import (
    Compacted,
    Compare,
    Delete,
    Event,
    Get,
    KeyValue,
    Lease,
    Page,
    Put,
    StoreClosed,
    Txn,
    TxnResult,
    check_key,
    check_txn,
)


class EtcdStore:
    """Use it from one event loop. Nothing is asked of etcd before the first call."""

    def __init__(self, address: EtcdAddress, *, read_only: bool = False) -> None:
        self.client = EtcdClient(address)
        self._read_only = read_only
        self._receipts = Receipts(self.client)
        self._streams = Streams(self.client)

    async def get(self, key: str) -> KeyValue | None:
        check_key(key)
        request = message_class("RangeRequest")(key=key.encode())
        response = await self.client.ask(method("KV", "Range"), request)
        return messages.key_value(response.kvs[0]) if response.kvs else None

    async def range(self, prefix: str, *, limit: int = 0, after: str = "", revision: int = 0) -> Page:
        request = messages.range_request(prefix, limit, after, revision)
        try:
            response = await self.client.ask(method("KV", "Range"), request)
        except Answered as error:
            raise await self._of_history(error, revision) from error
        items = tuple(messages.key_value(kv) for kv in response.kvs)
        return Page(items, response.more, revision or response.header.revision)

    async def txn(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
        gets: Sequence[Get] = (),
    ) -> TxnResult:
        txn = Txn(tuple(compares), tuple(puts), tuple(deletes), tuple(gets))
        check_txn(txn)
        self._must_write()
        return await self._receipts.commit(txn)

    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncGenerator[Event, None]:
        revision = from_revision or (await self.range(prefix, limit=1)).revision + 1
        async with aclosing(watch(self._streams, prefix, revision)) as events:
            async for event in events:
                yield event

    async def lease(self, ttl_s: float) -> Lease:
        if not ttl_s > 0:
            raise BadInput("ttl_s", ttl_s, "a number above 0")
        self._must_write()
        return await granted(self.client, ttl_s)

    async def compact(self, revision: int) -> None:
        self._must_write()
        request, tries = message_class("CompactionRequest")(revision=revision), 0

        async def attempt() -> None:
            nonlocal tries
            tries += 1
            await self.client.ask_once(method("KV", "Compact"), request)

        try:
            await self.client.patiently(attempt)
        except Answered as error:
            wrong = await self._of_history(error, revision)
            if tries > 1 and isinstance(wrong, Compacted) and wrong.revision == revision:
                return  # by an earlier try, whose answer was lost
            raise wrong from error

    async def close(self) -> None:
        if not self.client.closed.is_set():
            await self._receipts.close()
            await self._streams.close()
            await self.client.close()

    def _must_write(self) -> None:
        if self._read_only:
            raise Refused("the store is open read-only")
        if self.client.closed.is_set():
            raise StoreClosed("the state store is closed")

    async def _of_history(self, error: Answered, revision: int) -> GyreError:
        if error.kind is Failure.COMPACTED:
            return Compacted(await oldest_revision(self.client, self._streams))
        if error.kind is Failure.FUTURE:
            return BadInput("revision", revision, "the store has not come to it yet")
        return error
