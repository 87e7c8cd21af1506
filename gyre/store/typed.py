"""The store in records: what is read is validated, what is written is packed, and nobody does either by hand.

While the store does not answer, refuses us, or is full, reads, commits and watches wait for it, so that this is a pause and
no failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from gyre.errors import Unavailable
from gyre.store.protocol import Compacted, KeyValue, Put, Store, StoreClosed, Txn, TxnResult, commit
from gyre.wire import pack, unpack

T = TypeVar("T")
_PAGE = 500

log = logging.getLogger(__name__)

AWAY_S = 600.0
"""How long the store may be away before who waits for it fails."""
RETRY_S = 0.5
SAID_AGAIN_S = 60.0
"""Between two lines of the log about the same trouble, however many wait for the store."""


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """A record as the store held it. A later write that must not overwrite another compares `mod_revision`."""

    key: str
    record: T
    create_revision: int
    mod_revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """One change of a record; `now` is None when it was deleted."""

    kind: Literal["put", "delete"]
    key: str
    revision: int
    now: Versioned[T] | None
    before: Versioned[T] | None


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """All records under a prefix at one revision; watch on from `revision + 1`."""

    items: tuple[Versioned[T], ...]
    revision: int


def put_record(key: str, record: Any, lease: int = 0) -> Put:
    """The put that stores `record` at `key`, for a transaction."""
    return Put(key, pack(record), lease)


def versioned(kv: KeyValue, cls: type[T]) -> Versioned[T]:
    return Versioned(kv.key, unpack(kv.value, cls), kv.create_revision, kv.mod_revision, kv.lease)


class TypedStore:
    """A store, read and watched in records of a class that the caller names: all under a prefix are of one class."""

    def __init__(self, store: Store, away_s: float = AWAY_S) -> None:
        """`away_s`: how long reads and commits wait for the store; 0 for a person who waits and would rather be told."""
        self.store = store
        self._away_s = away_s
        self._said_s: dict[type[Unavailable], float] = {}

    async def get(self, key: str, cls: type[T]) -> Versioned[T] | None:
        kv = await self._patiently(lambda: self.store.get(key))
        return None if kv is None else versioned(kv, cls)

    async def range(self, prefix: str, cls: type[T]) -> Listing[T]:
        """All of them, at one revision, however many pages that takes: from the first again when the revision of the
        first was compacted away before the last."""
        items: list[Versioned[T]] = []
        after, revision = "", 0
        while True:
            try:
                page = await self._patiently(
                    lambda after=after, revision=revision: self.store.range(
                        prefix, limit=_PAGE, after=after, revision=revision
                    )
                )
            except Compacted:
                items, after, revision = [], "", 0
                continue
            items += [versioned(kv, cls) for kv in page.items]
            revision = page.revision
            if not page.more:
                return Listing(tuple(items), revision)
            after = page.items[-1].key

    async def watch(self, prefix: str, cls: type[T], from_revision: int = 0) -> AsyncGenerator[Change[T], None]:
        """As `Store.watch`, and going on where it was whenever the store can be had again. Close it
        (`contextlib.aclosing`)."""
        revision, seen = from_revision, 0
        """`seen` changes of `revision` were given."""
        if not revision:
            revision = (await self._patiently(lambda: self.store.range(prefix, limit=1))).revision + 1
        while True:
            try:
                at = 0
                async with aclosing(self.store.watch(prefix, revision)) as events:
                    async for event in events:
                        if event.kv.mod_revision != revision:
                            revision, seen, at = event.kv.mod_revision, 0, 0
                        at += 1
                        if at <= seen:
                            continue
                        seen = at
                        now = versioned(event.kv, cls) if event.kind == "put" else None
                        before = versioned(event.previous, cls) if event.previous else None
                        yield Change(event.kind, event.kv.key, event.kv.mod_revision, now, before)
            except StoreClosed:
                raise
            except Unavailable as error:
                self._say(error)
            await asyncio.sleep(RETRY_S)

    async def next_change(self, prefix: str, cls: type[T], from_revision: int) -> None:
        """Until a record under `prefix` has changed from `from_revision` on, or may have: list again then."""
        with suppress(Compacted):
            async with aclosing(self.watch(prefix, cls, from_revision)) as changes:
                await anext(changes)

    async def put(self, key: str, record: Any, lease: int = 0) -> int:
        """Write one record, whatever was there; the revision. A leader writes by `commit` of a fenced transaction."""
        return (await self.store.txn(puts=(put_record(key, record, lease),))).revision

    async def commit(self, txn: Txn) -> TxnResult:
        """One that was carried out though its answer was lost is carried out again, and then its compares fail: who
        asked finds, on reading, that what is there is its own."""
        return await self._patiently(lambda: commit(self.store, txn))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """`call`, and again while the store cannot be had: what was going on goes on when it is back."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._away_s
        while True:
            try:
                return await call()
            except StoreClosed:
                raise
            except Unavailable as error:
                if loop.time() >= until_s:
                    raise
                self._say(error)
            await asyncio.sleep(RETRY_S)

    def _say(self, error: Unavailable) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._said_s.get(type(error), -SAID_AGAIN_S) + SAID_AGAIN_S:
            self._said_s[type(error)] = now_s
            log.warning("the state store cannot be had, and is asked again: %s", error)
