"""The messages by which nodes have snapshots from each other (gyre.actors.snapshot_service).

A version is named with the digest that the state store publishes: a step that is taken again has another. Chunks are
numbered as the manifest lists them (gyre.train.snapshot), and sets of chunks are the bits of an int, lowest byte first.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.ids import NodeId
from gyre.wire import record


@record("hold_snapshot")
@dataclass(frozen=True)
class HoldSnapshot:
    """To a node: have this snapshot of `node`, which is about to publish it. -> Ok when it is here whole."""

    version: int
    digest: str
    node: NodeId


@record("get_manifest")
@dataclass(frozen=True)
class GetManifest:
    """-> SnapshotManifest, or Refused where nothing of it is held."""

    version: int
    digest: str


@record("snapshot_manifest")
@dataclass(frozen=True)
class SnapshotManifest:
    version: int
    digest: str
    manifest: bytes


@record("get_held")
@dataclass(frozen=True)
class GetHeld:
    """-> Held, or Refused where nothing of it is held."""

    version: int
    digest: str


@record("held_chunks")
@dataclass(frozen=True)
class Held:
    """What a node holds of a version, each chunk checked; None: all."""

    chunks: bytes | None


@record("get_chunk")
@dataclass(frozen=True)
class GetChunk:
    """-> Chunk, or Refused where it is not held."""

    version: int
    digest: str
    chunk: int


@record("chunk")
@dataclass(frozen=True)
class Chunk:
    data: bytes
    held: bytes | None
    """As in Held: each answer brings the asker up to date."""
