"""Snapshots on disk: one folder a version, written whole or not at all.

    v00000007/  model.safetensors, config.json, tokenizer files   what an engine loads
                manifest.json                                     every file with its size and checksums

The replica writes them through `write_snapshot`, gyred and the engines read them; no torch is needed to do either.
A folder under its final name is complete (gyre.train.whole_folder). The digest of the manifest names the content; it is
what the state store publishes, and with the checksum of each chunk in it, what any peer may be had the chunks from. The
optimizer's state is no part of it: gyre.train.checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash

from gyre.errors import BadInput, GyreError
from gyre.train.whole_folder import (
    CHUNK_BYTES,
    FileEntry,
    first_fault,
    list_entries,
    remove_whole,
    size_fault,
    write_whole,
)

MANIFEST = "manifest.json"
MODEL = "model.safetensors"

_FORMAT = 2
_NAME = re.compile(r"v(\d{8,})")
_WEIGHTS_FILE = re.compile(r"model.*\.safetensors")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")


class SnapshotTorn(GyreError):
    """A snapshot folder that is not what its manifest says: cut short, changed, or not a snapshot at all."""


@dataclass(frozen=True)
class Manifest:
    version: int
    files: tuple[FileEntry, ...]

    def to_bytes(self) -> bytes:
        files = {
            entry.name: {"bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128, "chunks": entry.chunks}
            for entry in self.files
        }
        plain = {"format": _FORMAT, "version": self.version, "files": files}
        return json.dumps(plain, indent=1, sort_keys=True).encode()

    @property
    def digest(self) -> str:
        return digest_of(self.to_bytes())

    @property
    def chunks(self) -> tuple[ChunkPlace, ...]:
        """Every chunk, in the order by which peers number them."""
        return tuple(
            ChunkPlace(entry.name, at * CHUNK_BYTES, min(CHUNK_BYTES, entry.size_bytes - at * CHUNK_BYTES), checksum)
            for entry in self.files
            for at, checksum in enumerate(entry.chunks)
        )


@dataclass(frozen=True)
class ChunkPlace:
    file: str
    offset: int
    size_bytes: int
    checksum: str


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
    digest = ""

    def fill_and_list(folder: Path) -> None:
        nonlocal digest
        fill(folder)
        manifest = Manifest(version, list_entries(folder))
        (folder / MANIFEST).write_bytes(manifest.to_bytes())
        digest = manifest.digest

    write_whole(path, fill_and_list)
    return digest


def copy_surroundings(source: Path, target: Path) -> None:
    """Copy what an engine needs beside the weights (config.json, tokenizer files) from one model folder to another."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name != MANIFEST and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, target / file.name)


# ---------------------------------------------------------------------------------------------------- reading


def read_manifest(path: Path) -> Manifest:
    """The manifest of the snapshot folder `path`. Raises SnapshotTorn."""
    try:
        return parse_manifest((path / MANIFEST).read_bytes(), path.name)
    except OSError as error:
        raise SnapshotTorn(f"{path.name}: {MANIFEST} cannot be read ({error.strerror})") from error


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Raises SnapshotTorn for anything that `Manifest.to_bytes` does not give; `where` names what it is of."""
    try:
        plain = cast(dict[str, Any], json.loads(content))
        if plain["format"] != _FORMAT:
            raise SnapshotTorn(f"{where}: manifest format {plain['format']!r} is not {_FORMAT}")
        files = cast(dict[str, dict[str, Any]], plain["files"])
        entries = tuple(
            FileEntry(name, int(e["bytes"]), str(e["xxh3_128"]), tuple(map(str, e["chunks"])))
            for name, e in sorted(files.items())
        )
        manifest = Manifest(int(plain["version"]), entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotTorn(f"{where}: {MANIFEST} is not a manifest ({error!r})") from error
    for entry in entries:
        if entry.name in ("", ".", "..", MANIFEST) or "/" in entry.name or "\0" in entry.name:
            raise SnapshotTorn(f"{where}: {MANIFEST} names {entry.name!r}, which is no file of a snapshot")
        if len(entry.chunks) != -(-entry.size_bytes // CHUNK_BYTES) or entry.size_bytes < 0:
            raise SnapshotTorn(f"{where}: {MANIFEST} has {len(entry.chunks)} chunks of {entry.name}")
    return manifest


def verify(path: Path, digest: str = "") -> Manifest:
    """The manifest, after every file was found to be what it says. Raises SnapshotTorn naming the first that is not.

    With `digest`, the manifest itself must be the one that was published.
    """
    manifest = read_manifest(path)
    found = digest_of((path / MANIFEST).read_bytes())
    if digest and found != digest:
        raise SnapshotTorn(f"{path.name}: {MANIFEST} has digest {found}, published was {digest}")
    fault = first_fault(path, manifest.files)
    if fault:
        raise SnapshotTorn(f"{path.name}: {fault}")
    return manifest


def verify_but_weights(path: Path, manifest: Manifest) -> tuple[FileEntry, ...]:
    """The files of weights, which are there at their size: who reads them checks their chunks as it goes.

    Every other file was found to be what it says. Raises SnapshotTorn.
    """
    weights = tuple(entry for entry in manifest.files if _WEIGHTS_FILE.fullmatch(entry.name))
    sizes = (size_fault(path, entry) for entry in weights)
    others = (entry for entry in manifest.files if entry not in weights)
    fault = next((found for found in sizes if found), "") or first_fault(path, others)
    if fault:
        raise SnapshotTorn(f"{path.name}: {fault}")
    return weights


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
            remove_whole(path)
            deleted.append(version)
    return tuple(deleted)
