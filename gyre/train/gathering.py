"""A snapshot folder that is filled chunk by chunk, in any order, and served on meanwhile.

It lies beside the snapshots as `.gathering-v00000007-<digest>`, with the manifest in it and every file at its full size.
Which chunks are there is read from the chunks themselves: each has its checksum in the manifest, and the manifest has the
digest that was published. So what a killed process left is gone on with, and a chunk that was half written counts as
missing. When all are there the folder gets its final name (gyre.train.whole_folder).
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from gyre.train.snapshot import MANIFEST, ChunkPlace, Manifest, SnapshotTorn, digest_of, parse_manifest, snapshot_path
from gyre.train.snapshot import verify as verify_whole
from gyre.train.whole_folder import chunk_checksum, commit, storage_full_told

_GATHERING = ".gathering-"


def gathering_path(snapshots_dir: Path, version: int, digest: str) -> Path:
    name = digest.rpartition(":")[2]
    return snapshots_dir / f"{_GATHERING}{snapshot_path(snapshots_dir, version).name}-{name}"


def find_gathering(snapshots_dir: Path, version: int, digest: str) -> Gathering | None:
    """What an earlier try has left of it."""
    path = gathering_path(snapshots_dir, version, digest)
    try:
        manifest = checked_manifest((path / MANIFEST).read_bytes(), version, digest)
        found = Gathering(snapshots_dir, path, manifest, digest)
    except (OSError, SnapshotTorn):
        return None
    found.recognise()
    return found


def begin_gathering(snapshots_dir: Path, version: int, digest: str, manifest: bytes) -> Gathering:
    """Raises SnapshotTorn when the manifest is not the one of that digest, StorageFull when the disk is."""
    parsed = checked_manifest(manifest, version, digest)
    path = gathering_path(snapshots_dir, version, digest)
    shutil.rmtree(path, ignore_errors=True)
    with storage_full_told(path):
        path.mkdir(parents=True)
        (path / MANIFEST).write_bytes(manifest)
    return Gathering(snapshots_dir, path, parsed, digest)


def clear_gatherings(snapshots_dir: Path, but: Collection[Path]) -> None:
    """Delete what earlier tries have left, but for these folders."""
    for path in snapshots_dir.glob(f"{_GATHERING}*"):
        if path not in but:
            shutil.rmtree(path, ignore_errors=True)


def checked_manifest(manifest: bytes, version: int, digest: str) -> Manifest:
    """Raises SnapshotTorn when it is not the one that was published as `version` with `digest`."""
    found = digest_of(manifest)
    if found != digest:
        raise SnapshotTorn(f"v{version:08d}: {MANIFEST} has digest {found}, published was {digest}")
    parsed = parse_manifest(manifest, f"v{version:08d}")
    if parsed.version != version:
        raise SnapshotTorn(f"v{version:08d}: {MANIFEST} is of version {parsed.version}")
    return parsed


def read_chunk(folder: Path, place: ChunkPlace) -> bytes:
    """Raises OSError, or EOFError where the file is too short."""
    with (folder / place.file).open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), place.size_bytes, place.offset)
    if len(data) != place.size_bytes:
        raise EOFError(f"{place.file} is cut short")
    return data


class Gathering:
    """Made by `find_gathering` or `begin_gathering`. Whoever reads and who puts may be different threads."""

    def __init__(self, snapshots_dir: Path, path: Path, manifest: Manifest, digest: str) -> None:
        self.manifest = manifest
        self.digest = digest
        self.chunks = manifest.chunks
        self.path = path
        self._snapshots_dir = snapshots_dir
        self._marking = threading.Lock()
        with storage_full_told(path):
            for entry in manifest.files:
                with (path / entry.name).open("ab") as file:
                    file.truncate(entry.size_bytes)
        self.have = 0
        """The chunks that are there, as bits."""

    def recognise(self) -> None:
        """Find the chunks that are there."""
        self.have = sum(1 << number for number, place in enumerate(self.chunks) if self._is_there(place))

    def manifest_bytes(self) -> bytes:
        return (self.path / MANIFEST).read_bytes()

    def read(self, number: int) -> bytes:
        """A chunk that is there. Raises OSError."""
        return read_chunk(self.path, self.chunks[number])

    def put(self, number: int, data: bytes) -> bool:
        """Whether `data` is the chunk; then it is there. Raises StorageFull when the disk is."""
        place = self.chunks[number]
        if len(data) != place.size_bytes or chunk_checksum(data) != place.checksum:
            return False
        with storage_full_told(self.path), (self.path / place.file).open("r+b") as file:
            file.seek(place.offset)
            file.write(data)
        with self._marking:
            self.have |= 1 << number
        return True

    def commit(self) -> Path:
        """Give the whole folder its name; it is checked once more. Raises SnapshotTorn, and then it is begun anew."""
        path = snapshot_path(self._snapshots_dir, self.manifest.version)
        try:
            verify_whole(self.path, self.digest)
        except SnapshotTorn:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        with storage_full_told(path):
            commit(self.path, path)
        return path

    def _is_there(self, place: ChunkPlace) -> bool:
        try:
            return chunk_checksum(read_chunk(self.path, place)) == place.checksum
        except (OSError, EOFError):
            return False
