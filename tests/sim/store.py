"""The embedded store as the cluster's, and each node's client of it with what gyre.store.etcd promises.

A call that the store does not answer is tried for PATIENCE_S, and is carried out once. After that it raises
Unavailable; then it may have been carried out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from gyre.errors import Unavailable
from gyre.store.embedded import EmbeddedStore
from gyre.store.history import History
from gyre.store.protocol import (
    Compare,
    Delete,
    Event,
    Get,
    KeyValue,
    Lease,
    LeaseLost,
    Page,
    Put,
    StoreClosed,
    Txn,
    TxnResult,
)

from .history import PlainHistory
from .loop import Process
from .net import Network

T = TypeVar("T")

PATIENCE_S = 6.0
PLACE = "store"
KEPT_REVISIONS = 60
"""So few that a watch that lags is told of a compaction."""

Watcher = Callable[[str, Txn, TxnResult, "Client", int], None]
Striker = Callable[[str, Txn], bool]
"""What a fault does at this write of a node, before it is sent. False: the write is lost on its way."""


class Server(EmbeddedStore):
    """The embedded store without its thread and its file: every call is over when it returns."""

    def __init__(self, kept_revisions: int = KEPT_REVISIONS) -> None:
        self._plain = PlainHistory()
        super().__init__(cast(History, self._plain), None, read_only=False, kept_revisions=kept_revisions)
        self.away_until_s = 0.0
        self.process = Process("store")
        self._watching: dict[asyncio.Future[None], str] = {}
        self._told = 0

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise StoreClosed("the state store is closed")
        return self._done(work)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(self._done(work))
        return done

    def _done(self, work: Callable[[], T]) -> T:
        before = self._plain.revision
        result = work()
        if self._plain.revision != before:
            self._wake(before + 1)
            self._trim()
        return result

    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncGenerator[Event, None]:
        revision = from_revision or self._plain.revision + 1
        while True:
            if self._closed:
                raise StoreClosed("the state store is closed")
            events = self._plain.since(prefix, revision)
            for event in events:
                yield event
            if events:
                revision = events[-1].kv.mod_revision + 1
                if revision <= self._plain.revision:
                    continue
            revision = max(revision, self._plain.revision + 1)
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watching[changed] = prefix
            await changed

    def _wake(self, from_revision: int = 0) -> None:
        changed = [event.kv.key for event in self._plain.since("", from_revision)] if from_revision else [""]
        for future, prefix in list(self._watching.items()):
            if future.done():
                del self._watching[future]
            elif not from_revision or any(key.startswith(prefix) for key in changed):
                del self._watching[future]
                future.set_result(None)

    async def close(self) -> None:
        self._closed = True
        for lease in self._leases.values():
            lease.stop()
        self._leases.clear()
        self._wake()


def now(coro: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coro.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


class Client:
    """The store as one process of one node has it."""

    def __init__(
        self,
        server: Server,
        net: Network,
        rng: random.Random,
        place: str,
        process: Process,
        written: Watcher,
        strike: Striker,
    ) -> None:
        self._server = server
        self._net = net
        self._rng = rng
        self._place = place
        self._process = process
        self._written = written
        self._strike = strike
        self.won = 0
        """The token of the last campaign that this client won."""

    async def get(self, key: str) -> KeyValue | None:
        return await self._call(lambda: now(self._server.get(key)))

    async def range(self, prefix: str, *, limit: int = 0, after: str = "", revision: int = 0) -> Page:
        return await self._call(lambda: now(self._server.range(prefix, limit=limit, after=after, revision=revision)))

    async def txn(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
        gets: Sequence[Get] = (),
    ) -> TxnResult:
        txn = Txn(tuple(compares), tuple(puts), tuple(deletes), tuple(gets))
        task = asyncio.current_task()
        writer = task.get_name() if task else ""
        token = self.won

        def carry_out() -> TxnResult:
            result = now(self._server.txn(*(txn.compares, txn.puts, txn.deletes, txn.gets)))
            if result.succeeded and txn.puts:
                self._written(writer, txn, result, self, token)
            return result

        return await self._call(carry_out, carried=self._strike(self._place, txn))

    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncGenerator[Event, None]:
        revision = from_revision or (await self.range(prefix, limit=1)).revision + 1
        async with aclosing(self._server.watch(prefix, revision)) as events:
            async for event in events:
                while True:
                    loop = self._net.loop
                    heard_s = max(self._net.cut_until(PLACE, self._place), self._server.away_until_s)
                    if heard_s <= loop.time():
                        break
                    await asyncio.sleep(heard_s - loop.time() + self._net.latency_s(PLACE, self._place))
                yield event

    async def lease(self, ttl_s: float) -> Lease:
        return SimLease(self, await self._call(lambda: now(self._server.lease(ttl_s))))

    async def compact(self, revision: int) -> None:
        await self._call(lambda: now(self._server.compact(revision)))

    async def close(self) -> None:
        """The server is everybody's."""

    async def _call(self, carry_out: Callable[[], T], *, carried: bool = True) -> T:
        """There and back. While there is no way the call waits, and is carried out, or not, before it gives up."""
        loop, net, now_s = self._net.loop, self._net, self._net.loop.time()
        asked = _Asked(self, carry_out, loop.create_future(), now_s + PATIENCE_S)
        there_s = max(net.cut_until(self._place, PLACE), self._server.away_until_s)
        if not carried:
            asked.give_up()
        elif there_s < asked.give_up_s:
            if there_s > now_s and self._rng.random() < 0.4:  # it came through just before the way was cut
                there_s = now_s
            if there_s <= now_s and self._rng.random() < 0.6:  # it is there before anything else happens
                self._server.process.context.run(asked.arrive)
            else:
                at_s = max(now_s, there_s) + net.latency_s(self._place, PLACE)
                loop.call_at(at_s, asked.arrive, context=self._server.process.context)
                if at_s > asked.give_up_s:
                    asked.give_up()
        else:
            asked.give_up()
            if self._rng.random() < 0.3:
                loop.call_later(net.latency_s(self._place, PLACE), asked.arrive, context=self._server.process.context)
        return await asked.answer


class _Asked:
    """One call of a client, on its way. It is given up when it is clear that no answer can be there in time."""

    __slots__ = ("_carry_out", "_client", "answer", "give_up_s")

    def __init__(
        self, client: Client, carry_out: Callable[[], Any], answer: asyncio.Future[Any], give_up_s: float
    ) -> None:
        self._client = client
        self._carry_out = carry_out
        self.answer = answer
        self.give_up_s = give_up_s

    def arrive(self) -> None:
        try:
            result, error = self._carry_out(), None
        except Exception as caught:
            result, error = None, caught
        client = self._client
        net = client._net
        at_s = max(net.loop.time(), net.cut_until(PLACE, client._place), client._server.away_until_s)
        at_s += net.latency_s(PLACE, client._place)
        if at_s < self.give_up_s:
            net.loop.call_at(at_s, self._back, result, error, context=client._process.context)
        else:
            self.give_up()

    def give_up(self) -> None:
        error = Unavailable("the store does not answer")
        self._client._net.loop.call_at(self.give_up_s, self._back, None, error, context=self._client._process.context)

    def _back(self, result: object, error: Exception | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)


@dataclass
class SimLease:
    """A lease that knows until when it is proven."""

    client: Client
    lease: Lease
    proven_until_s: float = 0.0
    lost: bool = False

    def __post_init__(self) -> None:
        self.proven_until_s = self.client._net.loop.time() + self.lease.ttl_s

    @property
    def id(self) -> int:
        return self.lease.id

    @property
    def ttl_s(self) -> float:
        return self.lease.ttl_s

    async def keep_alive(self) -> float:
        loop = self.client._net.loop
        if self.lost:
            raise LeaseLost(self.id)
        asked_s = loop.time()
        try:
            async with asyncio.timeout(max(0.0, self.proven_until_s - asked_s)):
                left_s = await self.client._call(lambda: now(self.lease.keep_alive()))
        except (TimeoutError, Unavailable, LeaseLost) as error:
            if isinstance(error, LeaseLost) or loop.time() >= self.proven_until_s:
                self.lost = True
                raise LeaseLost(self.id) from None
            raise Unavailable("the store does not answer") from None
        self.proven_until_s = asked_s + left_s
        return left_s

    async def revoke(self) -> None:
        self.lost = True
        await self.client._call(lambda: self._end())

    def _end(self) -> None:
        lease, server = self.lease, self.client._server
        if server.has(lease):  # type: ignore[arg-type]
            lease.stop()  # type: ignore[attr-defined]
            server.end_lease(lease)  # type: ignore[arg-type]
