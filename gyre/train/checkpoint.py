# pyright: basic
"""Checkpoints in folders: what the core's replica goes on from when the process that took the last step is gone.

    c00000007/  model.safetensors       the weights, byte by byte those of snapshot 7
                optimizer.safetensors   AdamW's moments and step count after the step to 7
                index.json              which snapshot they belong to, and every file with its size and checksum

They are first in shared memory and then on disk (gyre.train.checkpoint_writer). The newest may be of an earlier version
than the snapshot: the weights are then the snapshot's, for a version never falls, and the moments those of the newest
checkpoint that fits. A step's place in the learning rate's schedule is its number, so nothing of it has to be kept.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import load_file
from torch import Tensor

from gyre.errors import GyreError
from gyre.train.tensor_file import save_tensors
from gyre.train.whole_folder import FileEntry, checkpoint_path, first_fault, list_entries, remove_whole, write_whole

INDEX = "index.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"

_FORMAT = 2
_NAME = re.compile(r"c(\d{8,})")

log = logging.getLogger("gyre.train.checkpoint")


class CheckpointTorn(GyreError):
    """A checkpoint folder that is not what its index says: cut short, changed, or not a checkpoint at all."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after one step, in host memory. Nobody changes its tensors any more."""

    version: int
    snapshot: str
    """The digest of the snapshot that the step wrote."""
    model_hash: str
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


@dataclass(frozen=True)
class Index:
    version: int
    snapshot: str
    model_hash: str
    files: tuple[FileEntry, ...]

    def to_bytes(self) -> bytes:
        """JSON, sealed with a checksum of its own: there is one form, so any other byte is seen."""
        files = {entry.name: {"bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128} for entry in self.files}
        plain: dict[str, Any] = {
            "format": _FORMAT,
            "version": self.version,
            "snapshot": self.snapshot,
            "model_hash": self.model_hash,
            "files": files,
        }
        seal = xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True).encode())
        return json.dumps({**plain, "seal": seal}, indent=1, sort_keys=True).encode()


def write_checkpoint(checkpoint: Checkpoint, checkpoints_dir: Path) -> None:
    """Write it whole; one of the same version is replaced. Raises OSError, or StorageFull when the disk is."""

    def fill(folder: Path) -> None:
        save_tensors(checkpoint.weights, folder / MODEL)
        save_tensors(checkpoint.moments, folder / OPTIMIZER)
        index = Index(checkpoint.version, checkpoint.snapshot, checkpoint.model_hash, list_entries(folder))
        (folder / INDEX).write_bytes(index.to_bytes())

    write_whole(checkpoint_path(checkpoints_dir, checkpoint.version), fill)


def copy_checkpoint(source: Path, checkpoints_dir: Path) -> None:
    """Write the one in the folder `source` there too. Raises CheckpointTorn, OSError, or StorageFull."""
    index = verify(source)

    def fill(folder: Path) -> None:
        for name in (*(entry.name for entry in index.files), INDEX):
            shutil.copyfile(source / name, folder / name)

    write_whole(checkpoint_path(checkpoints_dir, index.version), fill)


def list_checkpoints(checkpoints_dir: Path) -> list[tuple[int, Path]]:
    """Every checkpoint folder by version, oldest first, whether whole or not."""
    if not checkpoints_dir.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in checkpoints_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def keep_newest(checkpoints_dir: Path, count: int) -> None:
    """Delete all but the newest `count`, at least one, and the one that the newest one's step began from.

    That step may not have been published, and then it is taken again.
    """
    found = list_checkpoints(checkpoints_dir)
    for version, path in found[: -max(count, 1)]:
        if version != found[-1][0] - 1:
            remove_whole(path)


def read_index(path: Path) -> Index:
    """The index of the checkpoint folder `path`, unchanged since it was written. Raises CheckpointTorn."""
    try:
        content = (path / INDEX).read_bytes()
        plain = json.loads(content)
        files = tuple(
            FileEntry(name, entry["bytes"], entry["xxh3_128"]) for name, entry in sorted(plain["files"].items())
        )
        index = Index(plain["version"], plain["snapshot"], plain["model_hash"], files)
        if index.to_bytes() == content:
            return index
    except OSError as error:
        raise CheckpointTorn(f"{path.name}: {INDEX} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CheckpointTorn(f"{path.name}: {INDEX} was changed or cut short")


def verify(path: Path) -> Index:
    """The index, after every file was found to be what it says. Raises CheckpointTorn naming the first that is not."""
    index = read_index(path)
    if checkpoint_path(path.parent, index.version) != path:
        raise CheckpointTorn(f"{path.name}: it is of version {index.version}")
    if {entry.name for entry in index.files} != {MODEL, OPTIMIZER}:
        raise CheckpointTorn(f"{path.name}: it needs {MODEL} and {OPTIMIZER}")
    fault = first_fault(path, index.files)
    if fault:
        raise CheckpointTorn(f"{path.name}: {fault}")
    return index


def read_moments(path: Path) -> dict[str, Tensor]:
    return load_file(path / OPTIMIZER)


def why_unfit(index: Index, version: int, model_hash: str, published: str) -> str:
    """Why a replica that holds snapshot `version` cannot go on from the checkpoint; empty when it can.

    `published` is the digest of the snapshot of the checkpoint's own version; empty when that is deleted by now.
    """
    if index.version > version:
        return f"it is of a step that was not published, and the snapshot is version {version}"
    if index.model_hash != model_hash:
        return f"it is of model {index.model_hash}, this replica's is {model_hash}"
    if published and index.snapshot != published:
        return "it is of a step that was taken again"
    return ""


def newest_fitting(
    places: Sequence[Path], version: int, model_hash: str, published: Callable[[int], str]
) -> tuple[Index, Path] | None:
    """The newest whole checkpoint in any of the folders that fits snapshot `version`; None when there is none.

    Of two of one version that in the first folder is tried first. Each that is passed over is logged.
    """
    found = [(of, -rank, path) for rank, place in enumerate(places) for of, path in list_checkpoints(place)]
    for _, _, path in sorted(found, reverse=True):
        try:
            index = verify(path)
        except CheckpointTorn as error:
            log.warning("checkpoint %s; the one before is tried", error)
            continue
        reason = why_unfit(index, version, model_hash, published(index.version))
        if not reason:
            return index, path
        log.warning("checkpoint %s does not fit: %s; the one before is tried", path.name, reason)
    return None
