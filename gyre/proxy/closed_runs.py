"""What closed runs leave for training: one checksummed file a run's attempt, with its trace and selected lineages.

Written whole before a run counts as closed, so that closing may be repeated after any death; read by lineage when
replicas ask.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from gyre.errors import BadInput, Refused, StorageFull
from gyre.ids import RunId
from gyre.trajectory.records import Lineage, RunTrace
from gyre.wire import pack, record, unpack

_SUFFIX = ".lineages"
_CHECKSUM_BYTES = 8
_KEPT = 32
"""Runs whose lineages stay in memory after they were written or read."""


@record("closed_run")
@dataclass(frozen=True)
class ClosedRun:
    trace: RunTrace
    lineages: tuple[Lineage, ...]


class ClosedRuns:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recent: OrderedDict[tuple[RunId, int], ClosedRun] = OrderedDict()

    def write(self, closed: ClosedRun) -> None:
        """Put it on disk, whole or not at all. Raises StorageFull."""
        trace = closed.trace
        payload = pack(closed)
        path = self.path(trace.run, trace.attempt)
        draft = path.with_suffix(".draft")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                file.write(_checksum(payload) + payload)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise StorageFull(
                f"the lineages of run {trace.run} could not be written: {error.strerror or error}"
            ) from error
        self._remember(closed)

    def path(self, run: RunId, attempt: int) -> Path:
        """Where its file lies, or would."""
        return lineages_path(self._folder, run, attempt)

    def read(self, run: RunId, attempt: int) -> ClosedRun | None:
        """The closed run, or None where there is none (or its file is damaged)."""
        known = self._recent.get((run, attempt))
        if known is not None:
            return known
        try:
            data = self.path(run, attempt).read_bytes()
        except FileNotFoundError:
            return None
        payload = data[_CHECKSUM_BYTES:]
        if data[:_CHECKSUM_BYTES] != _checksum(payload):
            return None
        try:
            closed = unpack(payload, ClosedRun)
        except BadInput:
            return None
        self._remember(closed)
        return closed

    def lineages(self, run: RunId, attempt: int, indices: tuple[int, ...]) -> tuple[Lineage, ...]:
        closed = self.read(run, attempt)
        if closed is None:
            raise Refused(f"run {run}, attempt {attempt}: no closed run of that name is kept here")
        by_index = {lineage.index: lineage for lineage in closed.lineages}
        unknown = [index for index in indices if index not in by_index]
        if unknown:
            raise Refused(f"run {run}, attempt {attempt}: it has no lineage {unknown[0]}")
        return tuple(by_index[index] for index in indices)

    def _remember(self, closed: ClosedRun) -> None:
        self._recent[closed.trace.run, closed.trace.attempt] = closed
        while len(self._recent) > _KEPT:
            self._recent.popitem(last=False)


def lineages_path(folder: Path, run: RunId, attempt: int) -> Path:
    return folder / f"{run}.{attempt}{_SUFFIX}"


def is_whole(path: Path) -> bool:
    """Whether the file is there, and its checksum is right."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    return data[:_CHECKSUM_BYTES] == _checksum(data[_CHECKSUM_BYTES:])


def _checksum(payload: bytes) -> bytes:
    return xxhash.xxh3_64_digest(payload)
