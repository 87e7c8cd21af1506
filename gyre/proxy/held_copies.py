"""Copies of other nodes' journals, kept for the day on which their node dies (gyre.proxy.replication writes them).

    <copies>/<node>/open/<run>/<attempt>/000000.journal
    <copies>/<node>/closed/<run>.<attempt>/000000.journal, … and lineages

What comes is appended, and answered once the disk has it. A copy is whole when its writer has said which files there are,
and of what size; it then lies among the closed ones. Whole ones can be taken over: they become this node's own.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import xxhash

from gyre.actors.messages_journals import AskHeld, Attempt, CopyJournal, Held, PutAway
from gyre.errors import BadInput, Refused, StorageFull
from gyre.ids import NodeId, RunId
from gyre.proxy.closed_runs import is_whole, lineages_path
from gyre.proxy.journals import JournalPlace, closed_folder, journals, open_folder

PIECE_BYTES = 1024 * 1024
LINEAGES = "lineages"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILE = re.compile(rf"[0-9]{{6,18}}\.journal|{LINEAGES}")


class HeldCopies:
    """The copies under `root`. Its methods block; one journal's messages come in order."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def held(self, message: AskHeld) -> Held:
        path = self._folder(message.node, message.run, message.attempt) / _file(message.file)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return Held(0, xxhash.xxh3_64_intdigest(b""))
        return Held(size, checksum_of(path, size))

    def copy(self, message: CopyJournal) -> Held:
        """Append the data and return once the disk has it. Where bytes before it are missing, nothing is written."""
        if xxhash.xxh3_64_intdigest(message.data) != message.checksum:
            raise BadInput("checksum", message.checksum, "it must be that of the data")
        path = self._folder(message.node, message.run, message.attempt) / _file(message.file)
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
                for folder in path.parents:
                    _sync_folder(folder)
                    if folder == self._root:
                        break
        except OSError as error:
            raise StorageFull(f"the copy of run {message.run}'s journal: {error.strerror or error}") from error
        return Held(message.offset + len(message.data), 0)

    def put_away(self, message: PutAway) -> Held:
        folder = self._folder(message.node, message.run, message.attempt)
        for name, size in message.files.items():
            path = folder / _file(name)
            if not path.exists() or path.stat().st_size != size:
                raise Refused(f"the copy of run {message.run}, attempt {message.attempt}, lacks some of {name}")
        target = closed_folder(self._root / message.node, message.run, message.attempt)
        try:
            if folder != target:
                target.parent.mkdir(parents=True, exist_ok=True)
                folder.rename(target)
                _sync_folder(target.parent)
                with suppress(OSError):
                    folder.parent.rmdir()
        except OSError as error:
            raise StorageFull(f"the copy of run {message.run}'s journal: {error.strerror or error}") from error
        return Held(0, 0)

    def take_over(self, attempts: tuple[Attempt, ...], journal: Path, trajectories: Path) -> tuple[Attempt, ...]:
        """Those of them that lie in `journal` and `trajectories` now: they were there before, or had a whole copy here."""
        return tuple(each for each in attempts if self._take(each.run, each.attempt, journal, trajectories))

    def _take(self, run: RunId, attempt: int, journal: Path, trajectories: Path) -> bool:
        own, target = lineages_path(trajectories, run, attempt), closed_folder(journal, _named("run", run), attempt)
        ours = is_whole(own)
        for folder in (trajectories, target.parent):
            folder.mkdir(parents=True, exist_ok=True)
        for copy in (closed_folder(self._root / node, run, attempt) for node in self.nodes()):
            if not ours and is_whole(copy / LINEAGES):
                (copy / LINEAGES).rename(own)
                _sync_folder(trajectories)
                ours = True
            if ours and copy.is_dir() and not target.exists():
                copy.rename(target)
                _sync_folder(target.parent)
        return ours

    # ------------------------------------------------------------------------------------------ looking in

    def nodes(self) -> list[NodeId]:
        """Those that have copies here."""
        return sorted(NodeId(path.name) for path in self._root.glob("*") if _NAME.fullmatch(path.name))

    def places(self) -> list[JournalPlace]:
        """Every copy."""
        return [replace(place, copy_of=node) for node in self.nodes() for place in journals(self._root / node)]

    def forget(self, place: JournalPlace) -> None:
        """Delete a copy."""
        shutil.rmtree(place.folder, ignore_errors=True)
        if place.open:
            with suppress(OSError):
                place.folder.parent.rmdir()

    def _folder(self, node: NodeId, run: RunId, attempt: int) -> Path:
        """Where the copy lies, or is to lie."""
        root = self._root / _named("node", node)
        closed = closed_folder(root, _named("run", run), attempt)
        return closed if closed.is_dir() else open_folder(root, run, attempt)


def checksum_of(path: Path, size: int) -> int:
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


def _named(what: str, name: str) -> RunId:
    if not _NAME.fullmatch(name):
        raise BadInput(what, name, "letters, digits, '.', '_' and '-', not more than 128")
    return RunId(name)


def _file(name: str) -> str:
    if not _FILE.fullmatch(name):
        raise BadInput("file", name, f"000000.journal, …, or {LINEAGES}")
    return name


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
