"""A second copy of every journal, at one peer: the death of a node then loses no settled call.

The gateway that writes has a `Replication`, and each of its journals a `ReplicaLink`: it sends what the journal's files
hold and the peer does not, always from the files, so that catching up after a while without the peer is the same as
keeping up. The peer has a `JournalReplica`: it appends what comes, and answers once its disk has it. Its folder is laid
out as a gateway's own, so a gateway that is started on it goes on with every run.

An answer waits for the peer as it waits for the disk. While the peer cannot be reached, or takes longer than `COPY_S`, answers
do not wait for it: that is logged once, and told by the metric `gyre_journal_replica_behind_bytes` until it has all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import xxhash

from gyre.errors import BadInput, GyreError, StorageFull
from gyre.ids import RunId
from gyre.proxy.journals import closed_folder, open_folder, segment_path, segments
from gyre.wire import record

R = TypeVar("R")

COPY_S = 5.0
"""The longest an answer waits for the peer."""
PIECE_BYTES = 1024 * 1024
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_log = logging.getLogger(__name__)


@record("journal.held")
@dataclass(frozen=True)
class AskHeld:
    """What does the peer hold of a segment? -> Held."""

    run: RunId
    attempt: int
    segment: int


@record("journal.copy")
@dataclass(frozen=True)
class CopyJournal:
    """Bytes of a segment from `offset` on; what the peer has behind that is not the writer's and goes. -> Held."""

    run: RunId
    attempt: int
    segment: int
    offset: int
    data: bytes
    checksum: int
    """xxh3-64 of the data."""


@record("journal.put_away")
@dataclass(frozen=True)
class PutAway:
    """The run is closed: its journal moves among the closed ones. -> Held."""

    run: RunId
    attempt: int


@record("journal.holds")
@dataclass(frozen=True)
class Held:
    """On the peer's disk: so many bytes of the segment, with this xxh3-64."""

    bytes: int
    checksum: int


class Peer(Protocol):
    """The way to the peer: a reference to its actor."""

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R: ...


# ------------------------------------------------------------------------------------------------ the writer's side


class Replication:
    """All journals of one gateway, as they are copied."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._links: set[ReplicaLink] = set()

    def link(self, run: RunId, attempt: int, folder: Path) -> ReplicaLink:
        """Copy the journal in `folder` from now on."""
        link = ReplicaLink(self._peer, run, attempt, folder, self._links.discard)
        self._links.add(link)
        return link

    def put_away(self, run: RunId, attempt: int, folder: Path) -> None:
        """The journal is closed and now lies in `folder`."""
        for link in self._links:
            if (link.run, link.attempt) == (run, attempt):
                link.put_away(folder)

    @property
    def behind_bytes(self) -> int:
        """Bytes of journals that the peer is not known to have."""
        return sum(link.behind_bytes() for link in self._links)

    async def close(self) -> None:
        """Stop copying. What the peer lacks it gets when the journals are opened again."""
        for link in tuple(self._links):
            await link.close()


class ReplicaLink:
    """One journal and its copy. Positions are (segment, bytes of it)."""

    def __init__(
        self, peer: Peer, run: RunId, attempt: int, folder: Path, ended: Callable[[ReplicaLink], None]
    ) -> None:
        self.run = run
        self.attempt = attempt
        self._peer = peer
        self._folder = folder
        self._ended = ended
        self._written = (0, 0)
        self._copied = (0, 0)
        self._agreed = False
        """Whether the peer was asked what it holds since it could be reached last."""
        self._lags = False
        self._closed = False
        self._changed = asyncio.Condition()
        self._news = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep_up(), name=f"copy the journal of {run}")

    def wrote(self, segment: int, size: int) -> None:
        """The journal's files now reach so far."""
        self._written = segment, size
        self._news.set()

    def put_away(self, folder: Path) -> None:
        self._folder = folder
        self._closed = True
        self._news.set()

    async def caught_up(self) -> None:
        """Return when the peer has all that was written so far, or when it is not to be waited for."""
        wanted = self._written
        try:
            async with asyncio.timeout(COPY_S), self._changed:
                await self._changed.wait_for(lambda: self._lags or self._copied >= wanted)
        except TimeoutError:
            self._fall_behind(f"the peer did not take it within {COPY_S:g} s")

    def behind_bytes(self) -> int:
        if self._copied >= self._written:
            return 0
        sizes = [path.stat().st_size for path in segments(self._folder)[self._copied[0] :]]
        return sum(sizes) - self._copied[1]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._ended(self)

    async def _keep_up(self) -> None:
        pause_s = _SHORTEST_PAUSE_S
        while True:
            try:
                while self._copied < self._written:
                    await self._copy_on()
                    pause_s = _SHORTEST_PAUSE_S
                if self._closed:
                    await self._peer.ask(PutAway(self.run, self.attempt), COPY_S, Held)
                    self._ended(self)
                    return
            except GyreError as error:
                self._agreed = False
                self._fall_behind(str(error))
                await self._wake()
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                continue
            except OSError as error:  # the folder was put away a moment ago, or the disk fails
                self._fall_behind(f"it cannot be read ({error})")
                await self._wake()
                await asyncio.sleep(pause_s)
                continue
            if self._lags:
                _log.info("run %s: its journal's copy has all again", self.run)
                self._lags = False
            await self._wake()
            await self._news.wait()
            self._news.clear()

    async def _copy_on(self) -> None:
        """Send one piece; the first time, find out where to begin."""
        segment, offset = self._copied
        path = segment_path(self._folder, segment)
        if not self._agreed:
            held = await self._peer.ask(AskHeld(self.run, self.attempt, segment), COPY_S, Held)
            whole = await asyncio.to_thread(_checksum_of, path, held.bytes)
            # A copy that is not the beginning of what we have is no copy: it is made anew.
            self._copied = segment, held.bytes if whole == held.checksum else 0
            self._agreed = True
            return
        data = await asyncio.to_thread(_piece, path, offset)
        if not data:
            if segment >= self._written[0]:
                raise OSError(f"{path.name} ends before what was written to it")
            self._copied, self._agreed = (segment + 1, 0), False
            return
        message = CopyJournal(self.run, self.attempt, segment, offset, data, xxhash.xxh3_64_intdigest(data))
        held = await self._peer.ask(message, COPY_S, Held)
        if held.bytes != offset + len(data):
            self._agreed = False
            return
        self._copied = segment, held.bytes
        await self._wake()

    def _fall_behind(self, reason: str) -> None:
        if not self._lags:
            _log.warning("run %s goes on without the copy of its journal: %s", self.run, reason)
        self._lags = True

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _piece(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PIECE_BYTES)


def _checksum_of(path: Path, size: int) -> int:
    """Of the file's first `size` bytes; -1 where it is shorter."""
    digest = xxhash.xxh3_64()
    left = size
    with path.open("rb") as file:
        while left > 0:
            data = file.read(min(left, PIECE_BYTES))
            if not data:
                return -1
            digest.update(data)
            left -= len(data)
    return digest.intdigest()


# ------------------------------------------------------------------------------------------------ the peer's side


class JournalReplica:
    """The copies of another gateway's journals, under `root`. Its methods block; one journal's messages come in order."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def held(self, message: AskHeld) -> Held:
        return self._held(self._path(message.run, message.attempt, message.segment))

    def copy(self, message: CopyJournal) -> Held:
        """Append the data and return once the disk has it. Where bytes before it are missing, nothing is written."""
        if xxhash.xxh3_64_intdigest(message.data) != message.checksum:
            raise BadInput("checksum", message.checksum, "it must be that of the data")
        path = self._path(message.run, message.attempt, message.segment)
        try:
            new = not path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(handle).st_size < message.offset:
                    return Held(os.fstat(handle).st_size, 0)
                os.ftruncate(handle, message.offset)
                os.lseek(handle, message.offset, os.SEEK_SET)
                view = memoryview(message.data)
                while view:
                    view = view[os.write(handle, view) :]
                os.fdatasync(handle)
            finally:
                os.close(handle)
            if new:
                for folder in (path.parent, path.parent.parent, self._root / "open"):
                    _sync_folder(folder)
        except OSError as error:
            raise StorageFull(f"the copy of run {message.run}'s journal: {error.strerror or error}") from error
        return Held(message.offset + len(message.data), 0)

    def put_away(self, message: PutAway) -> Held:
        folder = open_folder(self._root, _named(message.run), message.attempt)
        target = closed_folder(self._root, message.run, message.attempt)
        with suppress(FileNotFoundError):  # it was put away before, and the answer was lost
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
            with suppress(OSError):
                folder.parent.rmdir()
        return Held(0, 0)

    def _path(self, run: RunId, attempt: int, segment: int) -> Path:
        return segment_path(open_folder(self._root, _named(run), attempt), segment)

    def _held(self, path: Path) -> Held:
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return Held(0, xxhash.xxh3_64_intdigest(b""))
        return Held(size, _checksum_of(path, size))


def _named(run: RunId) -> RunId:
    if not _RUN_NAME.fullmatch(run):
        raise BadInput("run", run, "letters, digits, '.', '_' and '-', not more than 128")
    return run


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
