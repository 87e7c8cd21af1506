"""Transactions over a network that loses, delays and answers nothing: each is carried out once or not at all, in order.

etcd is modelled here on the embedded store's tables, so that the moment of every loss can be chosen. What real members
do when they are killed and frozen is in tests/cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import StorageFull, Unavailable
from gyre.store.etcd.address import EtcdAddress
from gyre.store.etcd.api import Message, Method, message_class
from gyre.store.etcd.client import Answered, Unanswered
from gyre.store.etcd.receipts import Receipts
from gyre.store.etcd.status import Failure
from gyre.store.history import History
from gyre.store.protocol import Compare, Delete, Get, KeyValue, LeaseLost, Op, Put, Target, Txn, TxnResult

T = TypeVar("T")
OPS: dict[int, Op] = {0: "==", 1: ">", 2: "<", 3: "!="}
TARGETS = {1: Target.CREATE_REVISION, 2: Target.MOD_REVISION, 3: Target.VALUE}
TRIES = 3

FATE = st.sampled_from(["answered", "answered", "lost", "unheard", "late", "late and cancelled", "leases end"])
"""What becomes of a transaction that is sent; those that are late are carried out while a later one is under way."""


class UnreliableEtcd:
    """Takes the client's place. Transactions have the fates that are given, then all are answered."""

    def __init__(self, fates: list[str]) -> None:
        self.address = EtcdAddress(("h:1",), "c")
        self.history = History(None, read_only=False)
        self._fates = fates
        self._late: list[Message] = []
        self._leases: set[int] = set()

    async def ask(self, of: Method, request: Message) -> Message:
        if of.path.endswith("LeaseGrant"):
            self._leases.add(request.ID)
            return message_class("LeaseGrantResponse")(ID=request.ID, TTL=request.TTL)
        if of.path.endswith("Range"):
            page = self.history.range(request.key.decode(), 1, "", request.revision)
            return message_class("RangeResponse")(kvs=[_kv(kv) for kv in page.items if kv.key == request.key.decode()])
        return self._apply(request)

    async def ask_once(self, of: Method, request: Message) -> Message:
        await asyncio.sleep(0)
        fate = self._fates.pop(0) if self._fates else "answered"
        if fate == "leases end":
            self._end_leases()
        if fate in ("late", "late and cancelled"):
            self._late.append(request)
        answer = self._apply(request) if fate in ("answered", "unheard", "leases end") else None
        if fate == "late and cancelled":
            raise asyncio.CancelledError
        if fate in ("lost", "unheard", "late"):
            raise Unanswered("nothing is heard")
        if self._late and len(self._fates) % 2:
            self.arrive()
        return answer

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for _ in range(TRIES):
            try:
                return await attempt()
            except Unanswered:
                continue
        raise Unavailable("etcd is away")

    def arrive(self) -> None:
        """All that was late is carried out now."""
        while self._late:
            try:
                self._apply(self._late.pop(0))
            except Answered:
                continue

    def _end_leases(self) -> None:
        for lease in self._leases:
            self.history.delete_leased(lease)
        self._leases.clear()

    def _apply(self, request: Message) -> Message:
        compares = [
            Compare(c.key.decode(), TARGETS[c.target], OPS[c.result], getattr(c, TARGETS[c.target].value))
            for c in request.compare
        ]
        puts = [op.request_put for op in request.success if op.HasField("request_put")]
        deletes = [op.request_delete_range for op in request.success if op.HasField("request_delete_range")]
        holds = all(compare.holds(self.history.get(compare.key)) for compare in compares)
        if holds and any(put.lease and put.lease not in self._leases for put in puts):
            raise Answered(Failure.LEASE, "requested lease not found")
        writes = Txn(
            tuple(compares),
            tuple(Put(put.key.decode(), put.value, put.lease) for put in puts),
            tuple(Delete(delete.key.decode()) for delete in deletes),
        )
        result = self.history.txn(writes)
        response = message_class("TxnResponse")(succeeded=result.succeeded)
        response.header.revision = result.revision
        for op in request.success if result.succeeded else request.failure:
            part = response.responses.add()
            if op.HasField("request_range"):
                kv = self.history.get(op.request_range.key.decode())
                part.response_range.kvs.extend([_kv(kv)] if kv else [])
                part.response_range.SetInParent()
        return response


def _kv(kv: KeyValue) -> Message:
    made = message_class("RangeResponse")().kvs.add()
    made.key, made.value, made.lease, made.version = kv.key.encode(), kv.value, kv.lease, kv.version
    made.create_revision, made.mod_revision = kv.create_revision, kv.mod_revision
    return made


def written(etcd: UnreliableEtcd) -> list[tuple[int, int]]:
    """The numbers that were ever put at /n, each with its revision."""
    events, _ = etcd.history.events("/n", 1, 0, 10_000)
    return [(int(event.kv.value), event.kv.mod_revision) for _, event in events if event.kind == "put"]


async def _play(fates: list[str], count: int) -> None:
    etcd = UnreliableEtcd(fates)
    receipts = Receipts(etcd)  # type: ignore[arg-type]
    known: dict[int, int] = {}
    for number in range(count):
        try:
            result = await receipts.commit(Txn(puts=(Put("/n", str(number).encode()),), gets=(Get("/n"),)))
        except (Unavailable, asyncio.CancelledError):
            continue
        assert result.succeeded
        assert result.gets[0] is not None
        assert (result.gets[0].value, result.gets[0].mod_revision) == (str(number).encode(), result.revision)
        known[number] = result.revision
    etcd.arrive()
    happened = written(etcd)
    numbers = [number for number, _ in happened]
    assert numbers == sorted(set(numbers)), "one was carried out twice, or behind a newer one"
    assert dict(happened).items() >= known.items()


@settings(max_examples=100, deadline=None)
@given(st.lists(FATE, max_size=25), st.integers(1, 12))
def test_each_is_carried_out_once_or_not_at_all_and_none_behind_a_newer_one(fates: list[str], count: int) -> None:
    asyncio.run(_play(fates, count))


async def _race(fates: list[str], count: int) -> None:
    etcd = UnreliableEtcd(fates)
    receipts = Receipts(etcd)  # type: ignore[arg-type]

    async def one(number: int) -> TxnResult:
        return await receipts.commit(Txn(puts=(Put("/n", str(number).encode()),)))

    results = await asyncio.gather(*(one(number) for number in range(count)), return_exceptions=True)
    etcd.arrive()
    numbers = [number for number, _ in written(etcd)]
    assert len(numbers) == len(set(numbers))
    for number, result in enumerate(results):
        if isinstance(result, TxnResult):
            assert (number, result.revision) in written(etcd)
        else:
            assert isinstance(result, (Unavailable, asyncio.CancelledError))


@settings(max_examples=60, deadline=None)
@given(st.lists(FATE, max_size=25), st.integers(2, 8))
def test_many_at_once_are_each_carried_out_once_or_not_at_all(fates: list[str], count: int) -> None:
    asyncio.run(_race(fates, count))


async def test_an_answer_that_was_lost_is_told_as_it_was() -> None:
    etcd = UnreliableEtcd(["unheard"])
    receipts = Receipts(etcd)  # type: ignore[arg-type]
    result = await receipts.commit(Txn((Compare.created("/n", 0),), (Put("/n", b"1"),), gets=(Get("/n"), Get("/m"))))
    kv = etcd.history.get("/n")
    assert kv is not None
    assert result == TxnResult(True, kv.mod_revision, (kv, None))


async def test_a_compare_that_fails_after_a_lost_try_is_told_as_failed() -> None:
    etcd = UnreliableEtcd(["lost"])
    receipts = Receipts(etcd)  # type: ignore[arg-type]
    result = await receipts.commit(Txn((Compare.created("/n", 7),), (Put("/n", b"1"),)))
    assert not result.succeeded
    assert etcd.history.get("/n") is None


async def test_receipts_are_begun_anew_when_their_lease_has_ended() -> None:
    etcd = UnreliableEtcd(["answered", "leases end", "answered"])
    receipts = Receipts(etcd)  # type: ignore[arg-type]
    for number in range(3):
        await receipts.commit(Txn(puts=(Put("/n", str(number).encode()),)))
    assert [number for number, _ in written(etcd)] == [0, 1, 2]


async def test_a_put_on_a_lease_that_is_gone_is_told_as_that_lease() -> None:
    receipts = Receipts(UnreliableEtcd([]))  # type: ignore[arg-type]
    with pytest.raises(LeaseLost) as lost:
        await receipts.commit(Txn(puts=(Put("/n", b"1", lease=7),)))
    assert lost.value.lease == 7


async def test_a_transaction_that_deletes_nothing_writes_nothing() -> None:
    etcd = UnreliableEtcd([])
    receipts = Receipts(etcd)  # type: ignore[arg-type]
    before = etcd.history.revision
    result = await receipts.commit(Txn(deletes=(Delete("/n"),)))
    assert (result.succeeded, result.revision, etcd.history.revision) == (True, before, before)


class FullEtcd(UnreliableEtcd):
    """Carries the first transaction out, is full after it, and the answer is lost."""

    def __init__(self) -> None:
        super().__init__([])
        self.full = False

    async def ask_once(self, of: Method, request: Message) -> Message:
        if of.path.endswith("Range"):
            return await self.ask(of, request)
        if self.full:
            raise StorageFull("NOSPACE")
        self._apply(request)
        self.full = True
        raise Unanswered("nothing is heard")


async def test_a_transaction_that_filled_etcd_and_was_not_answered_is_told_as_carried_out() -> None:
    etcd = FullEtcd()
    receipts = Receipts(etcd)  # type: ignore[arg-type]
    done = await receipts.commit(Txn(puts=(Put("/k", b"v"),)))
    kv = etcd.history.get("/k")
    assert done.succeeded
    assert kv is not None
    assert kv.mod_revision == done.revision
    with pytest.raises(StorageFull):
        await receipts.commit(Txn(puts=(Put("/k", b"w"),)))
