"""The snapshots of this node, which its engines and replicas load from.

One that is not here, or not whole any more, is made of the model that the job began with (version 0), or had from the nodes
that hold it, or mended with the weights of its checkpoint. Which folder it comes to: gyre.actors.snapshot_folders.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from gyre.actors.directory import Directory
from gyre.actors.runtime import Ref
from gyre.actors.snapshot_fetch import fetch, to_its_end
from gyre.actors.snapshot_service import Snapshots
from gyre.errors import BadInput, StorageFull, Unavailable
from gyre.ids import NodeId
from gyre.train.snapshot import make_first_snapshot, snapshot_path

PATIENCE_S = 120.0
RETRY_S = 0.5


class HeldSnapshots:
    """Of node `me`. `holder` gives the reference to another node's SnapshotService, `spares` the folders that may have files
    of a version too."""

    def __init__(
        self,
        me: NodeId,
        snapshots: Snapshots,
        model_dir: Path,
        directory: Directory,
        holder: Callable[[NodeId], Ref],
        spares: Callable[[int], Sequence[Path]],
    ) -> None:
        self._me = me
        self._snapshots = snapshots
        self._folders = snapshots.folders
        self._model_dir = model_dir
        self._directory = directory
        self._holder = holder
        self._spares = spares
        self._beyond_mend: set[int] = set()
        self._turn = asyncio.Lock()
        self._looking = asyncio.Lock()
        """A folder is looked at once, whoever waits for it."""

    @asynccontextmanager
    async def held(self, version: int, *, torn: bool = False) -> AsyncGenerator[Path]:
        """The folder of the snapshot, in which whoever loads it finds every file until the block is left.

        It is whole, for an engine loads what it is given. With `torn` it may be damaged where nobody gives another: a replica
        sees that, and may have a checkpoint. Raises Unavailable when nobody gives it away for long, or it is published no more.
        """
        with self._folders.pinned(version):
            yield await self._hold(version, torn)

    async def _hold(self, version: int, torn: bool) -> Path:
        until_s = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                return await self._find(version, torn)
            except Unavailable:
                published = self._directory.snapshot
                outdated = published is not None and published.record.version > version
                if outdated or asyncio.get_running_loop().time() > until_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _find(self, version: int, torn: bool) -> Path:
        snapshot = self._directory.snapshot
        published = snapshot.record if snapshot is not None and snapshot.record.version == version else None
        digest = published.digest if published else ""
        async with self._looking:
            path = await asyncio.to_thread(self._folders.find_whole, version, digest)
        if path is None:
            try:
                if published is None:
                    raise Unavailable(f"snapshot {version} is not here, and is not the one that is published")
                path = await self.have(version, digest, published.node)
            except Unavailable as error:
                path = await self._mend(version, digest)
                if path is None and torn:
                    path = self._folders.find(version, digest)
                if path is None:
                    fault = self._folders.fault(version)
                    raise Unavailable(f"{fault}; {error}" if fault else str(error)) from error
                return path
        if published is not None and self._has_core:
            async with self._turn:
                return await to_its_end(self._folders.bring_to_disk, version, digest)
        return path

    async def _mend(self, version: int, digest: str) -> Path | None:
        """Tried once a version: to read all of it again and again would not help."""
        async with self._turn:
            if version in self._beyond_mend:
                return None
            try:
                path = await to_its_end(self._folders.mend, version, digest, self._spares(version))
            except StorageFull:
                return None
            if path is None and self._folders.fault(version):
                self._beyond_mend.add(version)
            return path

    @property
    def _has_core(self) -> bool:
        core = self._directory.core
        return core is not None and core.record.node == self._me

    async def have(self, version: int, digest: str, first: NodeId) -> Path:
        """Once, a snapshot that may not be published yet: `first` holds it, and others may."""
        async with self._turn:
            if version == 0 and self._make_first() == digest:
                return snapshot_path(self._folders.disk, version)
            nodes = [first, *(node for node in self._directory.nodes if node != first)]
            sources = [(node, self._holder(node)) for node in nodes if node != self._me]
            path = await fetch(self._me, self._snapshots, version, digest, sources)
            await asyncio.to_thread(self._folders.has_come, path)
            self._folders.keep_newest()
            return path

    def _make_first(self) -> str:
        """Version 0 from the model that the job begins with; its digest, or nothing where the model is not here."""
        try:
            return make_first_snapshot(self._model_dir, self._folders.disk)[1]
        except BadInput:
            return ""
