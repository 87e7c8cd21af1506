"""The embedded store as the cluster's, and each node's client of it with what gyre.store.etcd promises.

A call that the store does not answer is tried for PATIENCE_S, and is carried out once. After that it raises
Unavailable; then it may have been carried out. What the store refuses, or is too full for, it says at once.
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
    StoreFull,
    StoreRefuses,
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
Delay = Callable[[], float]
"""For how long a watch hears nothing of what has just changed."""
SLOW_WATCH_S = 2.5


class Server(EmbeddedStore):
    """The embedded store without its thread and its file: every call is over when it returns."""

    def __init__(self, kept_revisions: int = KEPT_REVISIONS) -> None:
        self._plain = PlainHistory()
        super().__init__(cast(History, self._plain), None, read_only=False, kept_revisions=kept_revisions)
        self.away_until_s = self.refuses_until_s = self.full_until_s = 0.0
        self.process = Process("store")
        self._watching: dict[str, list[tuple[asyncio.Future[None], Delay]]] = {}
        """Those that have heard all, by their prefix."""
        self._told = 0

    def let_in(self, *, writes: bool) -> None:
        """Raises StoreRefuses or StoreFull, as long as a fault says so."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self.refuses_until_s:
            raise StoreRefuses("the store refuses us")
        if writes and now_s < self.full_until_s:
            raise StoreFull("the store takes no more writes")

    def changed(self, key: str, revision: int) -> list[Event]:
        """What became of one key from this revision on."""
        return self._plain.since(key, revision)

    def forget(self) -> None:
        """Compact all that has happened."""
        if self._plain.compacted < self._plain.revision:
            self._plain.compact(self._plain.revision)

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

    async def watch(
        self, prefix: str, from_revision: int = 0, delay: Delay = lambda: 0.0
    ) -> AsyncGenerator[Event, None]:
        """Each watch hears of changes in their order, and what one has heard says nothing of what another has."""
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
            self._watching.setdefault(prefix, []).append((changed, delay))
            await changed

    def _wake(self, from_revision: int = 0) -> None:
        keys = [event.kv.key for event in self._plain.since("", from_revision)] if from_revision else []
        for prefix in list(self._watching):
            if not from_revision or any(key.startswith(prefix) for key in keys):
                for future, delay in self._watching.pop(prefix):
                    self._tell(future, delay)

    def _tell(self, future: asyncio.Future[None], delay: Delay) -> None:
        if future.done():
            return
        if (late_s := delay()) > 0:
            asyncio.get_running_loop().call_later(late_s, _set, future, context=self.process.context)
        else:
            future.set_result(None)

    async def close(self) -> None:
        self._closed = True
        for lease in self._leases.values():
            lease.stop()
        self._leases.clear()
        self._wake()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


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

        writes = bool(txn.puts)
        return await self._call(carry_out, carried=self._strike(self._place, txn), writes=writes)

    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncGenerator[Event, None]:
        revision = from_revision or (await self.range(prefix, limit=1)).revision + 1
        self._server.let_in(writes=False)
        async with aclosing(self._server.watch(prefix, revision, self._delay())) as events:
            async for event in events:
                self._server.let_in(writes=False)
                while True:
                    loop = self._net.loop
                    heard_s = max(self._net.cut_until(PLACE, self._place), self._server.away_until_s)
                    if heard_s <= loop.time():
                        break
                    await asyncio.sleep(heard_s - loop.time() + self._net.latency_s(PLACE, self._place))
                yield event

    def _delay(self) -> Delay:
        """Of one watch: most hear within a moment, and one in four is slow as long as it lasts."""
        slow_s = SLOW_WATCH_S if self._rng.random() < 1 / 4 else 0.0
        return lambda: self._net.latency_s(PLACE, self._place) + slow_s * self._rng.random()

    async def lease(self, ttl_s: float) -> Lease:
        return SimLease(self, await self._call(lambda: now(self._server.lease(ttl_s)), writes=True))

    async def compact(self, revision: int) -> None:
        await self._call(lambda: now(self._server.compact(revision)))

    async def close(self) -> None:
        """The server is everybody's."""

    async def _call(self, carry_out: Callable[[], T], *, carried: bool = True, writes: bool = False) -> T:
        """There and back. While there is no way the call waits, and is carried out, or not, before it gives up."""
        loop, net, now_s = self._net.loop, self._net, self._net.loop.time()

        def let_in() -> T:
            self._server.let_in(writes=writes)
            return carry_out()

        asked = _Asked(self, let_in, loop.create_future(), now_s + PATIENCE_S)
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
