"""The embedded store's tables: every key's history in SQLite, and the rules of revisions.

Synchronous, and used by one thread at a time (`embedded.EmbeddedStore` sees to it). `history` holds every write since
the last compaction, a delete as a row without a value; `live` holds what is there now. Each call is one SQLite
transaction, and returns when its bytes are on disk (WAL with synchronous=FULL: an acknowledged write survives a power
cut as well as a kill).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyre.errors import BadInput, GyreError, Unavailable
from gyre.store.protocol import Compacted, Event, KeyValue, Page, StoreFull, Txn, TxnResult, prefix_end

_FORMAT = 1
_TABLES = """
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counters VALUES ('revision', 1), ('compacted', 0);
CREATE TABLE live (
    key BLOB PRIMARY KEY, value BLOB NOT NULL, created INTEGER NOT NULL, modified INTEGER NOT NULL,
    version INTEGER NOT NULL, lease INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX live_by_lease ON live (lease) WHERE lease != 0;
CREATE TABLE history (
    modified INTEGER NOT NULL, place INTEGER NOT NULL, key BLOB NOT NULL, value BLOB, created INTEGER NOT NULL,
    version INTEGER NOT NULL, lease INTEGER NOT NULL, PRIMARY KEY (modified, place)
) WITHOUT ROWID;
CREATE INDEX history_by_key ON history (key, modified);
"""
_COLUMNS = "key, value, created, modified, version, lease"


class History:
    """What a store holds and held. `path` None keeps it in memory."""

    def __init__(self, path: Path | None, *, read_only: bool) -> None:
        self._where = str(path) if path else "memory"
        with self._mended():
            self._db = _connect(path, read_only)
            self._prepare(read_only)
        self.revision = self._counter("revision")
        self.compacted = self._counter("compacted")

    def close(self) -> None:
        self._db.close()

    def txn(self, txn: Txn) -> TxnResult:
        with self._mended(), self._transaction():
            succeeded = all(compare.holds(self._live(compare.key.encode())) for compare in txn.compares)
            if succeeded and (txn.puts or txn.deletes):
                self._write(
                    [(put.key.encode(), put.value, put.lease) for put in txn.puts],
                    [delete.key.encode() for delete in txn.deletes],
                )
            gets = tuple(self._live(get.key.encode()) for get in txn.gets)
        return TxnResult(succeeded, self.revision, gets)

    def delete_leased(self, lease: int | None) -> None:
        """Delete, in one revision, the keys that hang on `lease`; on any lease when None."""
        where, values = ("lease != 0", ()) if lease is None else ("lease != 0 AND lease = ?", (lease,))
        with self._mended(), self._transaction():
            keys = self._db.execute(f"SELECT key FROM live WHERE {where} ORDER BY key", values).fetchall()
            self._write([], [key for (key,) in keys])

    def get(self, key: str) -> KeyValue | None:
        with self._mended():
            return self._live(key.encode())

    def range(self, prefix: str, limit: int, after: str, revision: int) -> Page:
        with self._mended(), self._snapshot():
            if revision > self.revision:
                raise BadInput("revision", revision, f"the store is at revision {self.revision}")
            if revision and revision < self.compacted:
                raise Compacted(self.compacted)
            at = revision or self.revision
            # A key just after `after` in byte order is `after` and a zero byte.
            low = max(prefix.encode(), after.encode() + b"\0") if after else prefix.encode()
            bounds = (low, prefix_end(prefix))
            cut = limit + 1 if limit else -1
            if at == self.revision:
                sql = f"SELECT {_COLUMNS} FROM live WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
                rows = self._db.execute(sql, (*bounds, cut)).fetchall()
            else:
                sql = f"""
                    SELECT {_COLUMNS} FROM history AS this
                    WHERE key >= ? AND key < ? AND value IS NOT NULL
                        AND modified = (SELECT max(modified) FROM history WHERE key = this.key AND modified <= ?)
                    ORDER BY key LIMIT ?"""
                rows = self._db.execute(sql, (*bounds, at, cut)).fetchall()
        items = tuple(_key_value(row) for row in (rows[:limit] if limit else rows))
        return Page(items, len(items) < len(rows), at)

    def events(self, prefix: str, from_revision: int, place: int, limit: int) -> tuple[list[tuple[int, Event]], int]:
        """At most `limit` changes from `place` of `from_revision` on, each with its place; and the present revision."""
        with self._mended(), self._snapshot():
            if from_revision < self.compacted:
                raise Compacted(self.compacted)
            sql = f"""
                SELECT {_COLUMNS}, place FROM history
                WHERE (modified, place) >= (?, ?) AND key >= ? AND key < ? ORDER BY modified, place LIMIT ?"""
            bounds = (prefix.encode(), prefix_end(prefix))
            rows = self._db.execute(sql, (from_revision, place, *bounds, limit)).fetchall()
            return [(row[-1], self._event(row)) for row in rows], self.revision

    def compact(self, revision: int) -> None:
        with self._mended():
            if revision > self.revision:
                raise BadInput("revision", revision, f"the store is at revision {self.revision}")
            if revision <= self.compacted:
                raise Compacted(self.compacted)
            with self._transaction():
                # What stays: all at `revision` itself, and each older key's last value, if it was there at `revision`.
                superseded = """
                    DELETE FROM history AS old WHERE modified < ?1 AND EXISTS
                        (SELECT 1 FROM history WHERE key = old.key AND modified > old.modified AND modified <= ?1)"""
                self._db.execute(superseded, (revision,))
                self._db.execute("DELETE FROM history WHERE modified < ? AND value IS NULL", (revision,))
                self._db.execute("UPDATE counters SET value = ? WHERE name = 'compacted'", (revision,))
            self.compacted = revision

    def _prepare(self, read_only: bool) -> None:
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if found == 0 and tables == 0 and not read_only:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_FORMAT}; COMMIT;")
        elif found != _FORMAT:
            raise BadInput("store", self._where, f"the file must be a state store of format {_FORMAT}")

    def _counter(self, name: str) -> int:
        with self._mended():
            (value,) = self._db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
        return int(value)

    def _live(self, key: bytes) -> KeyValue | None:
        row = self._db.execute(f"SELECT {_COLUMNS} FROM live WHERE key = ?", (key,)).fetchone()
        return None if row is None else _key_value(row)

    def _write(self, puts: list[tuple[bytes, bytes, int]], deletes: list[bytes]) -> None:
        """Write at the next revision. One that changes nothing (deletes of absent keys) makes no revision."""
        revision = self.revision + 1
        rows: list[tuple[Any, ...]] = []
        for key, value, lease in puts:
            old = self._live(key)
            created, version = (old.create_revision, old.version + 1) if old else (revision, 1)
            row = (key, value, created, revision, version, lease)
            self._db.execute(f"INSERT OR REPLACE INTO live ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", row)
            rows.append((*row, len(rows)))
        for key in deletes:
            if self._db.execute("DELETE FROM live WHERE key = ?", (key,)).rowcount:
                rows.append((key, None, 0, revision, 0, 0, len(rows)))
        if rows:
            self._db.executemany(f"INSERT INTO history ({_COLUMNS}, place) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            self._db.execute("UPDATE counters SET value = ? WHERE name = 'revision'", (revision,))
            self.revision = revision

    def _event(self, row: tuple[Any, ...]) -> Event:
        sql = f"SELECT {_COLUMNS} FROM history WHERE key = ? AND modified < ? ORDER BY modified DESC LIMIT 1"
        before = self._db.execute(sql, (row[0], row[3])).fetchone()
        previous = _key_value(before) if before is not None and before[1] is not None else None
        return Event("put" if row[1] is not None else "delete", _key_value(row), previous)

    @contextmanager
    def _transaction(self) -> Generator[None]:
        before = self.revision
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self.revision = before
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _snapshot(self) -> Generator[None]:
        """One view for several reads; with what another process wrote since, where this one only reads."""
        self._db.execute("BEGIN")
        try:
            self.revision = self._counter("revision")
            self.compacted = self._counter("compacted")
            yield
        finally:
            self._db.execute("ROLLBACK")

    @contextmanager
    def _mended(self) -> Generator[None]:
        """SQLite's errors as ours, with what a person needs to mend them."""
        try:
            yield
        except sqlite3.Error as error:
            raise _ours(error, self._where) from error


def _ours(error: sqlite3.Error, where: str) -> GyreError:
    text = str(error)
    if "full" in text or "disk I/O" in text:
        return StoreFull(f"state store {where}: {text}; free some space on its disk")
    if "not a database" in text or "malformed" in text:
        return BadInput("store", where, f"it must be a whole SQLite file ({text})")
    return Unavailable(f"state store {where}: {text}")


def _connect(path: Path | None, read_only: bool) -> sqlite3.Connection:
    if path is None:
        return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    mode = "ro" if read_only else "rwc"
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False, timeout=5.0
    )
    if not read_only:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
    return db


def _key_value(row: tuple[Any, ...]) -> KeyValue:
    key, value, created, modified, version, lease = row[:6]
    return KeyValue(key.decode(), value if value is not None else b"", created, modified, version, lease)
