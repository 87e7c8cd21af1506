"""Snapshots on disk: one folder a version, written whole or not at all.

    v00000007/  model.safetensors, config.json, tokenizer files   what an engine loads
                optimizer.safetensors                             what the core goes on from (version 0 has none)
                manifest.json                                     every file with its size and checksum

The replica writes them through `write_snapshot`, gyred and the engines read them; no torch is needed to do either.
A folder under its final name is complete: files are written and synced under another name, the manifest last, and the
folder is renamed. The digest of the manifest names the content; it is what the state store publishes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash

from gyre.errors import BadInput, GyreError, StorageFull

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"

_FORMAT = 1
_NAME = re.compile(r"v(\d{8,})")
_UNFINISHED = ".unfinished-"
_CHUNK_BYTES = 4 * 1024 * 1024
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")


class SnapshotTorn(GyreError):
    """A snapshot folder that is not what its manifest says: cut short, changed, or not a snapshot at all."""


@dataclass(frozen=True)
class FileEntry:
    name: str
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    version: int
    files: tuple[FileEntry, ...]

    def to_bytes(self) -> bytes:
        files = {entry.name: {"bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128} for entry in self.files}
        plain = {"format": _FORMAT, "version": self.version, "files": files}
        return json.dumps(plain, indent=1, sort_keys=True).encode()

    @property
    def digest(self) -> str:
        return digest_of(self.to_bytes())


def digest_of(manifest: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(manifest)}"


def snapshot_path(snapshots_dir: Path, version: int) -> Path:
    return snapshots_dir / f"v{version:08d}"


# ---------------------------------------------------------------------------------------------------- writing


def make_first_snapshot(model_dir: Path, snapshots_dir: Path) -> tuple[Path, str]:
    """Version 0, copied from the model the job starts with: (its folder, its digest). May be repeated.

    Raises BadInput when `model_dir` does not hold config.json and safetensors weights.
    """
    if not (model_dir / "config.json").is_file():
        raise BadInput("model.path", str(model_dir), "a folder with config.json is expected")
    weights = sorted(model_dir.glob("model*.safetensors*"))
    if not any(path.suffix == ".safetensors" for path in weights):
        raise BadInput("model.path", str(model_dir), "a folder with model*.safetensors is expected")
    path = snapshot_path(snapshots_dir, 0)
    try:
        return path, verify(path).digest
    except SnapshotTorn:
        pass

    def fill(folder: Path) -> None:
        copy_surroundings(model_dir, folder)
        for source in weights:
            shutil.copyfile(source, folder / source.name)

    return path, write_snapshot(path, 0, fill)


def write_snapshot(path: Path, version: int, fill: Callable[[Path], None]) -> str:
    """Write the snapshot folder `path` with what `fill` puts into the folder it is given; returns the digest.

    A folder already at `path` was written by a step that was never published; it is replaced. Raises StorageFull when
    the disk is, and leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f"{_UNFINISHED}{path.name}-{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        fill(unfinished)
        manifest = Manifest(version, tuple(_entry(file) for file in sorted(unfinished.iterdir())))
        (unfinished / MANIFEST).write_bytes(manifest.to_bytes())
        for file in unfinished.iterdir():
            _sync(file)
        _sync(unfinished)
        if path.exists():
            os.rename(path, path.parent / f"{_UNFINISHED}{path.name}-{os.getpid()}-old")
        os.rename(unfinished, path)
        _sync(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"snapshot {path.name} could not be written: {error.strerror}") from error
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(path.parent / f"{unfinished.name}-old", ignore_errors=True)
    return manifest.digest


def copy_surroundings(source: Path, target: Path) -> None:
    """Copy what an engine needs beside the weights (config.json, tokenizer files) from one model folder to another."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name != MANIFEST and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, target / file.name)


# ---------------------------------------------------------------------------------------------------- reading


def read_manifest(path: Path) -> Manifest:
    """The manifest of the snapshot folder `path`. Raises SnapshotTorn."""
    try:
        plain = cast(dict[str, Any], json.loads((path / MANIFEST).read_bytes()))
        if plain["format"] != _FORMAT:
            raise SnapshotTorn(f"{path.name}: manifest format {plain['format']!r} is not {_FORMAT}")
        files = cast(dict[str, dict[str, Any]], plain["files"])
        entries = tuple(FileEntry(name, int(e["bytes"]), str(e["xxh3_128"])) for name, e in sorted(files.items()))
        return Manifest(int(plain["version"]), entries)
    except OSError as error:
        raise SnapshotTorn(f"{path.name}: {MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotTorn(f"{path.name}: {MANIFEST} is not a manifest ({error!r})") from error


def verify(path: Path, digest: str = "") -> Manifest:
    """The manifest, after every file was found to be what it says. Raises SnapshotTorn naming the first that is not.

    With `digest`, the manifest itself must be the one that was published.
    """
    manifest = read_manifest(path)
    found = digest_of((path / MANIFEST).read_bytes())
    if digest and found != digest:
        raise SnapshotTorn(f"{path.name}: {MANIFEST} has digest {found}, published was {digest}")
    for entry in manifest.files:
        file = path / entry.name
        size_bytes = file.stat().st_size if file.is_file() else -1
        if size_bytes != entry.size_bytes:
            what = "is missing" if size_bytes < 0 else f"has {size_bytes} bytes"
            raise SnapshotTorn(f"{path.name}: {entry.name} {what}, {entry.size_bytes} bytes are expected")
        if _checksum(file) != entry.xxh3_128:
            raise SnapshotTorn(f"{path.name}: {entry.name} does not match its checksum")
    return manifest


def newest_complete(snapshots_dir: Path) -> tuple[int, Path, str] | None:
    """The highest version whose folder is whole: (version, folder, digest); None when there is none."""
    for version, path in reversed(list_snapshots(snapshots_dir)):
        try:
            manifest = verify(path)
        except SnapshotTorn:
            continue
        if manifest.version == version:
            return version, path, digest_of((path / MANIFEST).read_bytes())
    return None


def list_snapshots(snapshots_dir: Path) -> list[tuple[int, Path]]:
    """Every snapshot folder by version, oldest first, whether whole or not."""
    if not snapshots_dir.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in snapshots_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def keep_newest(snapshots_dir: Path, count: int, pinned: Collection[int] = ()) -> tuple[int, ...]:
    """Delete all but the newest `count` snapshots and the `pinned` versions; returns the versions deleted."""
    if count < 1:
        raise BadInput("count", count, "at least one snapshot is kept")
    deleted: list[int] = []
    for version, path in list_snapshots(snapshots_dir)[:-count]:
        if version not in pinned:
            # renamed first, so that a deletion cut short never leaves half a snapshot under a whole one's name
            doomed = snapshots_dir / f"{_UNFINISHED}{path.name}-deleted"
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed)
            deleted.append(version)
    return tuple(deleted)


def clear_unfinished(snapshots_dir: Path) -> None:
    """Delete what killed writers and deletions left. Only for when no writer is alive: at the start of a job."""
    for path in snapshots_dir.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------- private


def _entry(file: Path) -> FileEntry:
    return FileEntry(file.name, file.stat().st_size, _checksum(file))


def _checksum(file: Path) -> str:
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
