"""What gyre.store.history keeps in SQLite, in plain dictionaries: a thousand jobs are simulated in a minute with it.

tests/sim/test_parts.py holds it to the same suite as the product's.
"""

from __future__ import annotations

from gyre.errors import BadInput
from gyre.store.protocol import Compacted, Event, KeyValue, Page, Txn, TxnResult


class PlainHistory:
    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self._live: dict[str, KeyValue] = {}
        self._log: list[Event] = []
        """Every change since the last compaction, in order."""

    def close(self) -> None:
        """It is memory."""

    def txn(self, txn: Txn) -> TxnResult:
        succeeded = all(compare.holds(self._live.get(compare.key)) for compare in txn.compares)
        if succeeded:
            self._write([(put.key, put.value, put.lease) for put in txn.puts], [delete.key for delete in txn.deletes])
        return TxnResult(succeeded, self.revision, tuple(self._live.get(get.key) for get in txn.gets))

    def delete_leased(self, lease: int | None) -> None:
        leased = [kv.key for kv in self._live.values() if kv.lease and lease in (None, kv.lease)]
        self._write([], sorted(leased))

    def get(self, key: str) -> KeyValue | None:
        return self._live.get(key)

    def range(self, prefix: str, limit: int, after: str, revision: int) -> Page:
        if revision > self.revision:
            raise BadInput("revision", revision, f"the store is at revision {self.revision}")
        if revision and revision < self.compacted:
            raise Compacted(self.compacted)
        held = self._live if revision in (0, self.revision) else self._at(revision)
        keys = sorted((key for key in held if key.startswith(prefix) and key > after), key=str.encode)
        shown = keys[:limit] if limit else keys
        return Page(tuple(held[key] for key in shown), len(shown) < len(keys), revision or self.revision)

    def since(self, prefix: str, from_revision: int) -> list[Event]:
        """The changes of keys with `prefix` from `from_revision` on."""
        if from_revision < self.compacted:
            raise Compacted(self.compacted)
        log, start = self._log, len(self._log)
        while start and log[start - 1].kv.mod_revision >= from_revision:  # it is the newest that are asked for
            start -= 1
        return [event for event in log[start:] if event.kv.key.startswith(prefix)]

    def compact(self, revision: int) -> None:
        if revision > self.revision:
            raise BadInput("revision", revision, f"the store is at revision {self.revision}")
        if revision <= self.compacted:
            raise Compacted(self.compacted)
        held = self._at(revision)
        self.compacted = revision
        older = [Event("put", kv, None) for kv in held.values() if kv.mod_revision < revision]
        kept = [event for event in self._log if event.kv.mod_revision >= revision]
        self._log = sorted(older, key=lambda event: event.kv.mod_revision) + [
            self._known(event, held) for event in kept
        ]

    def _known(self, event: Event, held: dict[str, KeyValue]) -> Event:
        """The change without what it replaced, where that was compacted away."""
        before = event.previous
        if before is None or before.mod_revision >= self.compacted or held.get(event.kv.key) == before:
            return event
        return Event(event.kind, event.kv, None)

    def _at(self, revision: int) -> dict[str, KeyValue]:
        held: dict[str, KeyValue] = {}
        for event in self._log:
            if event.kv.mod_revision > revision:
                break
            if event.kind == "put":
                held[event.kv.key] = event.kv
            else:
                held.pop(event.kv.key, None)
        return held

    def _write(self, puts: list[tuple[str, bytes, int]], deletes: list[str]) -> None:
        revision = self.revision + 1
        events: list[Event] = []
        for key, value, lease in puts:
            old = self._live.get(key)
            created, version = (old.create_revision, old.version + 1) if old else (revision, 1)
            self._live[key] = kv = KeyValue(key, value, created, revision, version, lease)
            events.append(Event("put", kv, old))
        for key in deletes:
            old = self._live.pop(key, None)
            if old is not None:
                events.append(Event("delete", KeyValue(key, b"", 0, revision, 0, 0), old))
        if events:
            self._log += events
            self.revision = revision
