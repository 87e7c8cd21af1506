"""The embedded store: one process's SQLite file, or memory, behind the store protocol.

`gyred` opens it for writing and holds a lock on it; others (gyrectl, when the job is over) may open it to read. SQLite
works in one thread of the store's own, so that a slow disk never stalls the loop. A watch is a place in the history,
woken after each commit: it holds no queue, and cannot lose or repeat a change.

Leases live in the process that holds the lock: whoever opens the file next ends those of the one before, so that a
killed gyred's successor need not wait for them.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from gyre.errors import BadInput, GyreError, Refused
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
    StoreLocked,
    Txn,
    TxnResult,
    check_key,
    check_txn,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)

KEPT_REVISIONS = 10_000
"""History is compacted by itself so that about this many revisions stay (at most twice as many)."""
_EVENTS_A_READ = 256
_EXPIRY_RETRY_S = 1.0


class EmbeddedStore:
    """See the module. Use it from one event loop."""

    def __init__(self, history: History, lock: int | None, *, read_only: bool, kept_revisions: int) -> None:
        self._history = history
        self._lock = lock
        self._read_only = read_only
        self._kept_revisions = kept_revisions
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gyre-store")
        self._changed = asyncio.Event()
        self._leases: dict[int, EmbeddedLease] = {}
        self._last_lease = 0
        self._closed = False

    @staticmethod
    def open(path: Path | None, *, read_only: bool = False, kept_revisions: int = KEPT_REVISIONS) -> EmbeddedStore:
        """The store in the file at `path`, made when it is not there; in memory when None.

        Raises StoreLocked when another process has it open for writing and `read_only` is false.
        """
        lock = None
        if path is not None and not read_only:
            lock = _locked(path)
        elif path is not None and not path.exists():
            raise BadInput("store", str(path), "the file must be there to be read")
        try:
            history = History(path, read_only=read_only)
            if not read_only:
                history.delete_leased(None)
        except BaseException:
            if lock is not None:
                os.close(lock)
            raise
        return EmbeddedStore(history, lock, read_only=read_only, kept_revisions=kept_revisions)

    async def get(self, key: str) -> KeyValue | None:
        check_key(key)
        return await self._in_thread(lambda: self._history.get(key))

    async def range(self, prefix: str, *, limit: int = 0, after: str = "", revision: int = 0) -> Page:
        return await self._in_thread(lambda: self._history.range(prefix, limit, after, revision))

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
        for put in txn.puts:
            if put.lease and put.lease not in self._leases:
                raise LeaseLost(put.lease)
        return await self._in_thread(lambda: self._history.txn(txn))

    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncGenerator[Event, None]:
        if self._read_only:
            raise Refused("a store that is open read-only cannot be watched; read it again instead")
        revision, place = from_revision, 0
        if not revision:
            revision = await self._in_thread(lambda: self._history.revision) + 1
        while True:
            changed = self._changed
            read = partial(self._history.events, prefix, revision, place, _EVENTS_A_READ)
            events, now = await self._in_thread(read)
            for at, event in events:
                yield event
                revision, place = event.kv.mod_revision, at + 1
            if len(events) < _EVENTS_A_READ:
                if revision <= now:
                    revision, place = now + 1, 0
                await changed.wait()

    async def lease(self, ttl_s: float) -> Lease:
        if not ttl_s > 0:
            raise BadInput("ttl_s", ttl_s, "a number above 0")
        self._must_write()
        self._last_lease += 1
        lease = EmbeddedLease(self, self._last_lease, ttl_s)
        self._leases[lease.id] = lease
        lease.renew()
        return lease

    async def compact(self, revision: int) -> None:
        self._must_write()
        await self._in_thread(lambda: self._history.compact(revision))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for lease in self._leases.values():
            lease.stop()
        self._leases.clear()
        self._wake()
        await asyncio.to_thread(self._thread.shutdown)
        self._history.close()
        if self._lock is not None:
            os.close(self._lock)

    def _must_write(self) -> None:
        if self._read_only:
            raise Refused("the store is open read-only")
        if self._closed:
            raise StoreClosed("the state store is closed")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._submit(work))

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work` for the store's thread. Watches are woken even when nobody waits for the result any more."""
        if self._closed:
            raise StoreClosed("the state store is closed")
        loop = asyncio.get_running_loop()

        def run() -> T:
            before = self._history.revision
            result = work()
            if self._history.revision != before and not self._read_only:
                loop.call_soon_threadsafe(self._wake)
                self._trim()
            return result

        return self._thread.submit(run)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _trim(self) -> None:
        """Compact when there is twice the history to keep. The commit before it stands, whatever becomes of this."""
        if self._history.revision - self._history.compacted >= 2 * self._kept_revisions:
            try:
                self._history.compact(self._history.revision - self._kept_revisions)
            except GyreError as error:
                _log.warning("the history was not compacted: %s", error)

    def has(self, lease: EmbeddedLease) -> bool:
        return lease.id in self._leases

    def end_lease(self, lease: EmbeddedLease) -> Future[None]:
        """The lease is over from now on; its keys are gone when the future is done."""
        del self._leases[lease.id]
        return self._delete_leased(lease.id)

    def _delete_leased(self, lease: int) -> Future[None]:
        loop = asyncio.get_running_loop()
        deleted = self._submit(lambda: self._history.delete_leased(lease))

        def again() -> None:
            if not self._closed:
                self._delete_leased(lease)

        def check(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                _log.error("the keys of lease %d are not deleted yet: %s", lease, error)
                loop.call_soon_threadsafe(loop.call_later, _EXPIRY_RETRY_S, again)

        deleted.add_done_callback(check)
        return deleted


@dataclass
class EmbeddedLease:
    """A lease of this process. It expires by the loop's clock."""

    store: EmbeddedStore
    id: int
    ttl_s: float
    _timer: asyncio.TimerHandle | None = None

    async def keep_alive(self) -> float:
        if not self.store.has(self):
            raise LeaseLost(self.id)
        self.renew()
        return self.ttl_s

    async def revoke(self) -> None:
        if self.store.has(self):
            self.stop()
            await asyncio.shield(asyncio.wrap_future(self.store.end_lease(self)))

    def renew(self) -> None:
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(self.ttl_s, self.store.end_lease, self)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _locked(path: Path) -> int:
    """A lock on the store at `path`, held as long as the descriptor that is returned is open; a kill lets it go."""
    lock = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInput("store", str(path), f"its folder must be there and writable ({error.strerror})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreLocked(f"state store {path}: process {holder} has it open; end that job first") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
