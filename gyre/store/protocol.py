"""What a state store promises, whichever back end keeps it.

Time is counted in revisions, as etcd counts it: every transaction that writes makes exactly one new revision, and all
that it writes carries that revision. A key knows the revision that created it, the one that last changed it, and how
often it was written since its creation (`version`, 1 at its creation). A key that is deleted and written again is a
new one.

A reader that must miss nothing lists first and watches on from there:

    page = await store.range(prefix)
    async with aclosing(store.watch(prefix, page.revision + 1)) as events:
        async for event in events:
            ...

A call that fails with Unavailable, or is cancelled, may have been carried out: read before trying again. One that fails
with StoreRefuses or StoreFull was not; both are a store that cannot be had until a person has mended it, and then it can.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from gyre.errors import BadInput, GyreError, Refused, StorageFull, Unavailable

MAX_TXN_OPS = 127
"""The most compares, and the most puts, deletes and gets together, of one transaction: etcd's limit, less one that its
back end adds."""
MAX_TXN_BYTES = 1024 * 1024
"""The most bytes of keys and values in one transaction. Big data never enters the store."""


class Compacted(GyreError):
    """The history asked for is gone; list again and watch from there. `revision` is the oldest that can be had."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"history before revision {revision} was compacted away; list again and go on from there")
        self.revision = revision


class LeaseLost(GyreError):
    """The lease expired or was revoked; the keys that hung on it are gone."""

    def __init__(self, lease: int, why: str = "it expired or was revoked") -> None:
        super().__init__(f"lease {lease} is no more: {why}")
        self.lease = lease


class StoreClosed(Unavailable):
    """The store was closed in this process."""


class StoreRefuses(Refused, Unavailable):
    """The store does not let us do this: our user, its password, or its rights. Until a person has mended that."""


class StoreFull(StorageFull, Unavailable):
    """The store takes no writes, and may be read. Until a person has given it space."""


class StoreLocked(GyreError):
    """Another process has the store open for writing."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int
    """The lease it hangs on, 0 for none."""


Op = Literal["==", "!=", "<", ">"]


class Target(StrEnum):
    """What of a key a compare looks at. A key that is absent has 0, 0 and no value."""

    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction. A compare of an absent key's value never holds, whatever the operator."""

    key: str
    target: Target
    op: Op
    operand: int | bytes

    @staticmethod
    def created(key: str, revision: int, op: Op = "==") -> Compare:
        """The key's create_revision; 0 says that it is absent."""
        return Compare(key, Target.CREATE_REVISION, op, revision)

    @staticmethod
    def modified(key: str, revision: int, op: Op = "==") -> Compare:
        """The revision that last wrote the key; 0 says that it is absent."""
        return Compare(key, Target.MOD_REVISION, op, revision)

    @staticmethod
    def value(key: str, value: bytes, op: Op = "==") -> Compare:
        return Compare(key, Target.VALUE, op, value)

    def holds(self, current: KeyValue | None) -> bool:
        """Whether the condition is true of what the key holds now."""
        if self.target is Target.VALUE:
            return current is not None and _ordered(current.value, self.op, self.operand)
        if current is None:
            return _ordered(0, self.op, self.operand)
        created = self.target is Target.CREATE_REVISION
        return _ordered(current.create_revision if created else current.mod_revision, self.op, self.operand)


def _ordered(left: int | bytes, op: Op, right: int | bytes) -> bool:
    match op:
        case "==":
            return left == right
        case "!=":
            return left != right
        case "<":
            return left < right  # type: ignore[operator]  # both are of the target's type
        case ">":
            return left > right  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key; one that is absent already is no error and makes no revision."""

    key: str


@dataclass(frozen=True, slots=True)
class Get:
    key: str


@dataclass(frozen=True, slots=True)
class Txn:
    """One transaction: if all compares hold, the puts and deletes happen, all at one revision, or else nothing does.

    The gets are read in the same transaction, after the writes, whether the compares held or not.
    """

    compares: tuple[Compare, ...] = ()
    puts: tuple[Put, ...] = ()
    deletes: tuple[Delete, ...] = ()
    gets: tuple[Get, ...] = ()


@dataclass(frozen=True, slots=True)
class TxnResult:
    succeeded: bool
    revision: int
    """The store's revision after the transaction; the revision of its writes, when it wrote."""
    gets: tuple[KeyValue | None, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """Keys in byte order. `more` says that the limit cut the list: ask again with `after` and `revision`."""

    items: tuple[KeyValue, ...]
    more: bool
    revision: int
    """The revision that the page shows."""


@dataclass(frozen=True, slots=True)
class Event:
    """One change. On a delete, `kv` has the key and the delete's revision, and no value."""

    kind: Literal["put", "delete"]
    kv: KeyValue
    previous: KeyValue | None
    """What the key held before, None where there was nothing or it was compacted away."""


class Lease(Protocol):
    """A promise to be alive. When it is not kept alive for `ttl_s`, the keys put with its id go, in one revision."""

    @property
    def id(self) -> int: ...

    @property
    def ttl_s(self) -> float: ...

    async def keep_alive(self) -> float:
        """Begin the ttl anew; the seconds left. Raises LeaseLost."""
        ...

    async def revoke(self) -> None:
        """End it now, and delete its keys. One that is gone already is no error."""
        ...


class Store(Protocol):
    """The one interface of the embedded store and of etcd."""

    async def get(self, key: str) -> KeyValue | None: ...

    async def range(self, prefix: str, *, limit: int = 0, after: str = "", revision: int = 0) -> Page:
        """Keys that begin with `prefix` and come after `after`, at most `limit` (0: all), as they were at `revision`.

        Revision 0 is now. Raises Compacted for a revision that is gone, BadInput for one that is yet to come.
        """
        ...

    async def txn(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[Delete] = (),
        gets: Sequence[Get] = (),
    ) -> TxnResult:
        """Carry out one transaction (see Txn).

        Raises BadInput for a key written twice or a transaction over the limits, and LeaseLost for a put on a lease
        that is gone.
        """
        ...

    def watch(self, prefix: str, from_revision: int = 0) -> AsyncGenerator[Event, None]:
        """Every change of keys that begin with `prefix`, in order, from `from_revision` on; none lost, none twice.

        0 begins after the present revision, when the first event is asked for. Close it (`contextlib.aclosing`).
        Raises Compacted, at the start or later, when changes it has not given yet were compacted away.
        """
        ...

    async def lease(self, ttl_s: float) -> Lease: ...

    async def compact(self, revision: int) -> None:
        """Forget history before `revision`; what is there now stays. Raises Compacted where that was done already."""
        ...

    async def close(self) -> None:
        """End every watch with StoreClosed. May be called again."""
        ...


async def commit(store: Store, txn: Txn) -> TxnResult:
    """Carry out a transaction that a pure function built."""
    return await store.txn(txn.compares, txn.puts, txn.deletes, txn.gets)


def check_txn(txn: Txn) -> None:
    """Raise BadInput for a transaction that no back end may carry out."""
    written = [put.key for put in txn.puts] + [delete.key for delete in txn.deletes]
    for key in (*written, *(compare.key for compare in txn.compares), *(get.key for get in txn.gets)):
        check_key(key)
    if len(set(written)) < len(written):
        twice = next(key for key in written if written.count(key) > 1)
        raise BadInput("txn key", twice, "a key may be written once in a transaction")
    ops = len(written) + len(txn.gets)
    if ops > MAX_TXN_OPS or len(txn.compares) > MAX_TXN_OPS:
        raise BadInput(
            "txn size", max(ops, len(txn.compares)), f"at most {MAX_TXN_OPS} operations and as many compares"
        )
    size = sum(len(put.value) + len(put.key) for put in txn.puts)
    if size > MAX_TXN_BYTES:
        raise BadInput("txn bytes", size, f"at most {MAX_TXN_BYTES} bytes of keys and values")


def check_key(key: str) -> None:
    """Raise BadInput for a key that is empty or is no Unicode text."""
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise BadInput("key", key, "it must be text that UTF-8 can carry") from error
    if not encoded:
        raise BadInput("key", key, "it must not be empty")


def prefix_end(prefix: str) -> bytes:
    """The first key, as bytes, after all those that begin with `prefix` (no byte of UTF-8 is 0xff)."""
    encoded = prefix.encode()
    return encoded[:-1] + bytes((encoded[-1] + 1,)) if encoded else b"\xff"
