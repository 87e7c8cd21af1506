"""Transactions that are carried out once, even when etcd's answer is lost.

A try whose answer does not come may have been carried out, or lie in a member that is frozen and be carried out much
later, after what we wrote since. So each transaction also writes a receipt, a small key of this process, and compares
that nobody has written the receipt since it was last seen:

- after a time-out the receipt is read, in a transaction that writes it if the try has not: then the try can never be
  carried out any more, and it is safe to try again;
- if the receipt is the try's own, the try was carried out, at the receipt's revision.

A transaction that ends without an answer (Unavailable, or its task is cancelled) leaves a receipt in doubt. That is
settled before the next transaction goes out, so that no late write of ours lands behind a newer one.

Receipts hang on a lease and are begun anew before it ends. They lie beside the cluster's keys, under
`gyre.receipts/<cluster>/`.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from gyre.errors import GyreError, Refused, StorageFull, Unavailable
from gyre.store.etcd import messages
from gyre.store.etcd.api import Message, message_class, method
from gyre.store.etcd.client import PATIENCE_S, Answered, EtcdClient
from gyre.store.etcd.status import Failure
from gyre.store.protocol import Compare, KeyValue, LeaseLost, Txn, TxnResult

RECEIPTS_S = 3600
"""The lease of the receipts. They are begun anew after half of it, so that one in doubt is there to be read."""
_AT_ONCE = 32
"""Transactions of this process under way together."""
_TXN_S = 2 * PATIENCE_S
"""A transaction with the settling of those before it."""


@dataclass
class _Receipt:
    key: str
    lease: int
    revision: int = 0
    """That last wrote it; 0 where nobody has."""
    tried: bytes | None = None
    """The mark that a try without an answer writes."""


@dataclass
class _Session:
    """The receipts of one lease."""

    lease: int
    root: str
    until_s: float
    free: list[_Receipt] = field(default_factory=list[_Receipt])
    made: int = 0

    def receipt(self) -> _Receipt:
        if self.free:
            return self.free.pop()
        self.made += 1
        return _Receipt(f"{self.root}{self.made}", self.lease)


class _Gone(Exception):
    """The receipt or its lease is not there any more; what was asked last was not carried out."""


class _Lost(Unavailable):
    """A receipt in doubt is gone. No try with it can be carried out any more; whether one was, nobody can tell."""


class Receipts:
    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._txn = method("KV", "Txn")
        self._session: _Session | None = None
        self._begun = asyncio.Lock()
        self._doubtful: list[_Receipt] = []
        self._settling = asyncio.Lock()
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def commit(self, txn: Txn) -> TxnResult:
        """Carry out `txn` once. Raises Unavailable when that may have happened and cannot be known."""
        if not txn.puts:
            answer = await self._read_first(txn)
            if answer is not None:
                return answer
        try:
            async with asyncio.timeout(_TXN_S), self._at_once:
                return await self._write(txn)
        except TimeoutError as error:
            raise Unavailable(f"etcd did not answer within {_TXN_S:g} s; it may have been carried out") from error

    async def _write(self, txn: Txn) -> TxnResult:
        await self._settle_doubtful()
        for last in (False, True):
            session = await self._open_session()
            receipt = session.receipt()
            try:
                return await self._once(receipt, txn)
            except _Gone as error:
                if self._session is session:
                    self._session = None
                if last:
                    raise Unavailable(f"etcd keeps no receipts: {error}") from error
            except Answered as error:  # a lease of the caller's, or of the receipts
                if error.kind is not Failure.LEASE:
                    raise
                named = next((put.lease for put in txn.puts if put.lease), None)
                if last:
                    raise (LeaseLost(named) if named else Unavailable("etcd keeps no lease for receipts")) from error
                if self._session is session:
                    self._session = None
            finally:
                if receipt.tried is not None:
                    self._doubtful.append(receipt)
                elif self._session is session:
                    session.free.append(receipt)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Leave no receipts behind; where etcd does not answer, their lease ends by itself."""
        session, self._session = self._session, None
        if session is not None and not self._doubtful:
            with suppress(GyreError):
                await self._client.ask_once(
                    method("Lease", "LeaseRevoke"), message_class("LeaseRevokeRequest")(ID=session.lease)
                )

    async def _read_first(self, txn: Txn) -> TxnResult | None:
        """The result of a transaction that writes nothing; None when it has something to delete.

        Deletes of keys that are absent make no revision, so no receipt may be written with them.
        """
        request = messages.txn_request(
            messages.reads_only(txn.compares, [get.key for get in (*txn.deletes, *txn.gets)])
        )
        response = await self._client.ask(self._txn, request)
        read = messages.found(response)
        deletes, gets = read[: len(txn.deletes)], read[len(txn.deletes) :]
        if response.succeeded and any(kv is not None for kv in deletes):
            return None
        return TxnResult(response.succeeded, response.header.revision, tuple(gets))

    async def _once(self, receipt: _Receipt, txn: Txn) -> TxnResult:
        async def attempt() -> TxnResult:
            if (revision := await self._settle(receipt)) is not None:
                return await self._read_back(txn, revision)
            receipt.tried = mark = secrets.token_bytes(8)
            unseen = messages.compare(Compare.modified(receipt.key, receipt.revision))
            request = messages.txn_request(
                txn,
                compares=[unseen],
                puts=[messages.put_op(receipt.key, mark, receipt.lease)],
                gets=[messages.get_op(receipt.key)],
            )
            try:
                response = await self._client.ask_once(self._txn, request)
            except StorageFull:
                # The transaction that crosses the quota is carried out, and answered as if it were not.
                if (revision := await self._look(receipt)) is None:
                    receipt.tried = None
                    raise
                return await self._read_back(txn, revision)
            except (Answered, Refused):
                receipt.tried = None
                raise
            return self._result(receipt, txn, response)

        return await self._client.patiently(attempt)

    def _result(self, receipt: _Receipt, txn: Txn, response: Message) -> TxnResult:
        """The result that an answer tells; the receipt is then in no doubt."""
        gets = messages.found(response)
        receipt.tried = None
        if response.succeeded:
            receipt.revision = response.header.revision
        elif (gets[-1].mod_revision if gets[-1] else 0) != receipt.revision:
            raise _Gone(f"{receipt.key} was deleted or written by another")
        return TxnResult(response.succeeded, response.header.revision, tuple(gets[: len(txn.gets)]))

    async def _settle(self, receipt: _Receipt) -> int | None:
        """Whether the try without an answer was carried out: at which revision, or None and never."""
        tried = receipt.tried
        if tried is None:
            return None
        never = b"never " + tried
        request = message_class("TxnRequest")(
            compare=[messages.compare(Compare.modified(receipt.key, receipt.revision))],
            success=[messages.put_op(receipt.key, never, receipt.lease)],
            failure=[messages.get_op(receipt.key)],
        )
        try:
            response = await self._client.ask_once(self._txn, request)
        except Answered as error:
            raise self._lost(receipt) from error
        except StorageFull:
            # A full etcd takes no transaction that may write, not even to say that its compares fail: look instead.
            if (revision := await self._look(receipt)) is None:
                raise
            return revision
        held: KeyValue | None = None if response.succeeded else messages.found(response)[0]
        if not response.succeeded and (held is None or held.value not in (tried, never)):
            raise self._lost(receipt)
        receipt.tried = None
        receipt.revision = held.mod_revision if held else response.header.revision
        return receipt.revision if held and held.value == tried else None

    async def _look(self, receipt: _Receipt) -> int | None:
        """At which revision the last try is seen to have been carried out; None while it is not seen."""
        found = await self._client.ask_once(
            method("KV", "Range"), message_class("RangeRequest")(key=receipt.key.encode())
        )
        seen = messages.key_value(found.kvs[0]) if found.kvs else None
        if seen is None or seen.value != receipt.tried:
            return None
        receipt.tried, receipt.revision = None, seen.mod_revision
        return seen.mod_revision

    def _lost(self, receipt: _Receipt) -> _Lost:
        receipt.tried = None
        self._session = None
        return _Lost("etcd lost the receipt of a transaction; it may have been carried out")

    async def _settle_doubtful(self) -> None:
        async with self._settling:
            while self._doubtful:
                with suppress(_Lost):
                    await self._client.patiently(partial(self._settle, self._doubtful[0]))
                del self._doubtful[0]

    async def _read_back(self, txn: Txn, revision: int) -> TxnResult:
        """The result of a transaction that was carried out at `revision`, though its answer was lost."""
        gets: list[KeyValue | None] = []
        for get in txn.gets:
            request = message_class("RangeRequest")(key=get.key.encode(), revision=revision)
            try:
                response = await self._client.ask(method("KV", "Range"), request)
            except Answered as error:
                raise Unavailable(f"carried out at revision {revision}, but what it read is gone: {error}") from error
            gets.append(messages.key_value(response.kvs[0]) if response.kvs else None)
        return TxnResult(True, revision, tuple(gets))

    async def _open_session(self) -> _Session:
        async with self._begun:
            now_s = asyncio.get_running_loop().time()
            if self._session is None or self._session.until_s <= now_s:
                lease = secrets.randbits(62) + 1
                request = message_class("LeaseGrantRequest")(TTL=RECEIPTS_S, ID=lease)
                await grant(self._client, request)
                root = f"gyre.receipts/{self._client.address.cluster}/{lease:016x}/"
                self._session = _Session(lease, root, now_s + RECEIPTS_S / 2)
            return self._session


async def grant(client: EtcdClient, request: Message) -> int:
    """Have a lease whose id we chose; the seconds that etcd granted. A try whose answer was lost is no harm."""
    try:
        response = await client.ask(method("Lease", "LeaseGrant"), request)
    except Answered as error:
        if error.kind is not Failure.LEASE_TAKEN:
            raise
        response = await client.ask(
            method("Lease", "LeaseTimeToLive"), message_class("LeaseTimeToLiveRequest")(ID=request.ID)
        )
        return response.grantedTTL
    return response.TTL
