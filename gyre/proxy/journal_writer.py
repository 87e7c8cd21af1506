"""Writing a run's journal: each record at once, and on disk before an answer that rests on it is complete.

A record goes to the kernel when it is appended, so a killed gateway loses nothing; `sync` waits until the disk has it
(one flush for all that wait). The first write that fails makes the journal full for good: the run is to be stopped
with that reason, and what was written before stands.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gyre.errors import StorageFull
from gyre.proxy.journals import segment_path, segments
from gyre.proxy.replication import ReplicaLink
from gyre.trajectory.journal import SEGMENT_HEADER, JournalRecord, encode, read

SEGMENT_BYTES = 64 * 1024 * 1024


class JournalWriter:
    """The journal in `folder`, written on after what is there. `fsync` false leaves the disk's pace to the kernel.

    With a `replica` the journal has a copy at a peer, which `sync` waits for too.
    """

    def __init__(self, folder: Path, *, fsync: bool, replica: ReplicaLink | None = None) -> None:
        self._folder = folder
        self._fsync = fsync
        self._replica = replica
        self._segment = 0
        self._full: StorageFull | None = None
        self._file = -1
        self._size = 0
        self._written = 0
        self._synced = 0
        self._flush = asyncio.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open(max(0, len(segments(folder)) - 1))
        except OSError as error:
            raise self._give_up(error) from error

    def append(self, entry: JournalRecord) -> None:
        """Hand the record to the kernel, whole. Raises StorageFull, then and ever after, when that cannot be done."""
        if self._full is not None:
            raise self._full
        data = encode(entry)
        try:
            if self._size > SEGMENT_BYTES:
                self._next_segment()
            self._write(data)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)  # leave no torn record
            raise self._give_up(error) from error

    async def sync(self) -> None:
        """Return when all that was appended so far is on disk, and at the peer where there is one that answers."""
        if self._replica is None:
            await self._flushed()
        else:
            await asyncio.gather(self._flushed(), self._replica.caught_up())

    async def _flushed(self) -> None:
        wanted = self._written
        async with self._flush:
            if not self._fsync or self._synced >= wanted or self._file < 0:
                return
            reached = self._written
            try:
                await asyncio.to_thread(os.fdatasync, self._file)
            except OSError as error:
                raise self._give_up(error) from error
            self._synced = reached

    async def close(self) -> None:
        async with self._flush:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _open(self, segment: int) -> None:
        self._segment = segment
        path = segment_path(self._folder, segment)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
        if self._size < len(SEGMENT_HEADER):
            os.ftruncate(self._file, 0)
            self._size = 0
            self._write(SEGMENT_HEADER)
            if self._fsync:
                os.fdatasync(self._file)
                _sync_folder(self._folder)
        self._tell_replica()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._size += len(data)
        self._written += len(data)
        self._tell_replica()

    def _tell_replica(self) -> None:
        if self._replica is not None:
            self._replica.wrote(self._segment, self._size)

    def _next_segment(self) -> None:
        if self._fsync:
            os.fdatasync(self._file)
        os.close(self._file)
        self._open(self._segment + 1)

    def _give_up(self, error: OSError) -> StorageFull:
        self._full = StorageFull(f"the run's journal could not be written: {error.strerror or error}")
        return self._full


def read_journal(folder: Path) -> list[JournalRecord]:
    """The records of the journal in `folder`; what follows the last sound one is cut off, so that one can go on there."""
    found = look_at_journal(folder)
    if found.torn is not None:
        os.truncate(found.torn, found.good_bytes)
        for later in segments(folder):
            if later > found.torn:
                later.unlink()
    return found.records


class Found(NamedTuple):
    """What a journal's folder holds; `torn` is the segment that is not sound behind its first `good_bytes`."""

    records: list[JournalRecord]
    torn: Path | None
    good_bytes: int


def look_at_journal(folder: Path) -> Found:
    """The sound records of the journal in `folder`, of which nothing is changed: its gateway may be writing to it."""
    records: list[JournalRecord] = []
    for path in segments(folder):
        data = path.read_bytes()
        reading = read(data)
        records.extend(reading.records)
        if reading.good_bytes < len(data):
            return Found(records, path, reading.good_bytes)
    return Found(records, None, 0)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
