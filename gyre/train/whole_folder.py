"""Folders on disk that are whole or not there at all: what snapshots and checkpoints have in common.

Files are written and synced under another name, a listing of them last, and the folder is renamed. What a killed writer
leaves has a name of its own, which no reader looks at.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from gyre.errors import StorageFull

CHUNK_BYTES = 1024 * 1024
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class FileEntry:
    name: str
    size_bytes: int
    xxh3_128: str
    chunks: tuple[str, ...] = ()
    """The checksum of each part of CHUNK_BYTES, where parts travel by themselves."""


def checkpoint_path(checkpoints_dir: Path, version: int) -> Path:
    """Of gyre.train.checkpoint, for who has no torch."""
    return checkpoints_dir / f"c{version:08d}"


def write_whole(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder `path` of what `fill` puts into the folder it is given; one that was there is replaced.

    Raises StorageFull when the disk is, and leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f"{_UNFINISHED}{path.name}-{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        with storage_full_told(path):
            fill(unfinished)
            commit(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def commit(unfinished: Path, path: Path) -> None:
    """Have the folder `unfinished`, which lies beside it, in the place of the folder `path`."""
    old = path.parent / f"{_UNFINISHED}{path.name}-{os.getpid()}-old"
    try:
        for file in unfinished.iterdir():
            _sync(file)
        _sync(unfinished)
        if path.exists():
            os.rename(path, old)
        os.rename(unfinished, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def storage_full_told(path: Path) -> Generator[None]:
    """Raise StorageFull for a disk that has no room for the folder `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{path.parent.name}/{path.name} could not be written: {error.strerror}") from error
        raise


def remove_whole(path: Path) -> None:
    """Delete the folder: renamed first, so that a deletion cut short never leaves half of it under its name."""
    doomed = path.parent / f"{_UNFINISHED}{path.name}-deleted"
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def clear_unfinished(parent: Path) -> None:
    """Delete what killed writers and deletions left in `parent`. Only for when no writer is alive."""
    for path in parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def list_entries(folder: Path) -> tuple[FileEntry, ...]:
    """Every file of the folder with its size and checksums, by name."""
    return tuple(FileEntry(file.name, file.stat().st_size, *_checksums(file)) for file in sorted(folder.iterdir()))


def first_fault(folder: Path, entries: Iterable[FileEntry]) -> str:
    """What is wrong with the first file that is not what its entry says; empty when all are."""
    for entry in entries:
        if fault := size_fault(folder, entry):
            return fault
        if _checksums(folder / entry.name)[0] != entry.xxh3_128:
            return f"{entry.name} does not match its checksum"
    return ""


def size_fault(folder: Path, entry: FileEntry) -> str:
    """What is wrong with the file's size; empty when nothing is."""
    file = folder / entry.name
    size_bytes = file.stat().st_size if file.is_file() else -1
    if size_bytes == entry.size_bytes:
        return ""
    what = "is missing" if size_bytes < 0 else f"has {size_bytes} bytes"
    return f"{entry.name} {what}, {entry.size_bytes} bytes are expected"


def _checksums(file: Path) -> tuple[str, tuple[str, ...]]:
    """Of the whole, and of each chunk."""
    whole = xxhash.xxh3_128()
    chunks: list[str] = []
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            whole.update(chunk)
            chunks.append(chunk_checksum(chunk))
    return whole.hexdigest(), tuple(chunks)


def chunk_checksum(chunk: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(chunk)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
