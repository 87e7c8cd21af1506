"""The snapshots on this node's disk, which its engines and replicas load from.

One that is not there is made of the model that the job began with (version 0), or had from the nodes that hold it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from gyre.actors.directory import Directory
from gyre.actors.runtime import Ref
from gyre.actors.snapshot_fetch import fetch
from gyre.actors.snapshot_service import Snapshots
from gyre.errors import BadInput, Unavailable
from gyre.ids import NodeId
from gyre.store.records import SnapshotRecord
from gyre.train.snapshot import SnapshotTorn, keep_newest, make_first_snapshot, read_manifest, snapshot_path

KEEP_SNAPSHOTS = 4
PATIENCE_S = 120.0
RETRY_S = 0.5


class HeldSnapshots:
    """Of node `me`. `holder` gives the reference to another node's SnapshotService."""

    def __init__(
        self,
        me: NodeId,
        snapshots: Snapshots,
        model_dir: Path,
        directory: Directory,
        holder: Callable[[NodeId], Ref],
    ) -> None:
        self._me = me
        self._snapshots = snapshots
        self._folder = snapshots.snapshots_dir
        self._model_dir = model_dir
        self._directory = directory
        self._holder = holder
        self._turn = asyncio.Lock()

    async def hold(self, version: int) -> Path:
        """The folder of the snapshot. Raises Unavailable when nobody gives it away for long, or it is published no more."""
        until_s = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                return await self._hold(version)
            except Unavailable:
                published = self._directory.snapshot
                outdated = published is not None and published.record.version > version
                if outdated or asyncio.get_running_loop().time() > until_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _hold(self, version: int) -> Path:
        path = snapshot_path(self._folder, version)
        published = self._directory.snapshot
        if path.is_dir() and not _is_another(path, published.record if published else None):
            return path
        if published is None or published.record.version != version:
            raise Unavailable(f"snapshot {version} is not here, and is not the one that is published")
        return await self.have(version, published.record.digest, published.record.node)

    async def have(self, version: int, digest: str, first: NodeId) -> Path:
        """As `hold`, once, of a snapshot that may not be published yet: `first` holds it, and others may."""
        path = snapshot_path(self._folder, version)
        async with self._turn:
            if version == 0 and self._make_first() == digest:
                return path
            nodes = [first, *(node for node in self._directory.nodes if node != first)]
            sources = [(node, self._holder(node)) for node in nodes if node != self._me]
            await fetch(self._me, self._snapshots, version, digest, sources)
            keep_newest(self._folder, KEEP_SNAPSHOTS)
            return path

    def _make_first(self) -> str:
        """Version 0 from the model that the job begins with; its digest, or nothing where the model is not here."""
        try:
            return make_first_snapshot(self._model_dir, self._folder)[1]
        except BadInput:
            return ""


def _is_another(path: Path, published: SnapshotRecord | None) -> bool:
    """Whether the folder is of a step that was taken again: the store was set back to a day before. One that is torn is
    not: who loads it says so."""
    try:
        manifest = read_manifest(path)
    except SnapshotTorn:
        return False
    return published is not None and published.version == manifest.version and published.digest != manifest.digest
