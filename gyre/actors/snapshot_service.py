"""The snapshots of a node as other nodes have them: whole ones, and those that are being fetched.

    snapshots = Snapshots(SnapshotFolders(site.job.snapshots))
    site.refs["snapshots"] = system.spawn("snapshots", lambda: SnapshotService(snapshots))

A version is served as soon as its first chunk is here (gyre.actors.snapshot_fetch fills it, gyre.train.gathering keeps
it), so that the node that published it does not send a copy to each. Only what a manifest lists can be had, by number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gyre.actors.messages_snapshots import Chunk, GetChunk, GetHeld, GetManifest, Held, SnapshotManifest
from gyre.actors.runtime import Actor, handles
from gyre.actors.snapshot_folders import SnapshotFolders
from gyre.errors import Refused
from gyre.train.gathering import Gathering, checked_manifest, clear_gatherings, gathering_path, read_chunk
from gyre.train.snapshot import MANIFEST, ChunkPlace, SnapshotTorn


class Snapshots:
    """What this node holds, on disk or in shared memory. Its methods read files: they are for a thread."""

    def __init__(self, folders: SnapshotFolders) -> None:
        self.folders = folders
        self.sent_bytes = 0
        """To other nodes, of chunks."""
        self._fetched: dict[tuple[int, str], Gathering | None] = {}
        self._whole: dict[tuple[int, str], tuple[Path, tuple[ChunkPlace, ...]]] = {}

    @contextmanager
    def fetched(self, version: int, digest: str) -> Generator[None]:
        """While a version is fetched, which is once at a time. Raises Refused for a second one."""
        if (version, digest) in self._fetched:
            raise Refused(f"snapshot {version} is being fetched already")
        self._fetched[version, digest] = None
        try:
            yield
        finally:
            del self._fetched[version, digest]

    def serve_on(self, gathering: Gathering) -> None:
        """Serve what is there of a version that is fetched. What fetches that are over have left is deleted."""
        self._fetched[gathering.manifest.version, gathering.digest] = gathering
        for parent in self.folders.parents:
            clear_gatherings(parent, [gathering_path(parent, *key) for key in self._fetched])

    def held(self, version: int, digest: str) -> bytes | None:
        """As of Held. Raises Refused."""
        gathering = self._fetched.get((version, digest))
        if gathering is None:
            self._find(version, digest)
            return None
        return gathering.have.to_bytes((len(gathering.chunks) + 7) // 8, "little")

    def manifest(self, version: int, digest: str) -> bytes:
        """Raises Refused."""
        gathering = self._fetched.get((version, digest))
        try:
            if gathering is not None:
                return gathering.manifest_bytes()
        except OSError:
            pass  # it has its final name by now
        path, _ = self._find(version, digest)
        try:
            return (path / MANIFEST).read_bytes()
        except OSError as error:
            raise _not_held(version) from error

    def chunk(self, version: int, digest: str, number: int) -> bytes:
        """Raises Refused."""
        gathering = self._fetched.get((version, digest))
        try:
            if gathering is not None and number >= 0 and gathering.have >> number & 1:
                return gathering.read(number)
        except (OSError, EOFError):
            pass  # it has its final name by now
        path, places = self._find(version, digest)
        if not 0 <= number < len(places):
            raise Refused(f"snapshot {version} has chunks 0 to {len(places) - 1}, and {number} is asked for")
        try:
            return read_chunk(path, places[number])
        except (OSError, EOFError) as error:
            self._whole.pop((version, digest), None)
            raise Refused(f"chunk {number} of snapshot {version} cannot be read here any more: {error}") from error

    def _find(self, version: int, digest: str) -> tuple[Path, tuple[ChunkPlace, ...]]:
        """A version that is here whole: its folder and its chunks. Raises Refused."""
        key = (version, digest)
        if key in self._whole and self._whole[key][0].is_dir():
            return self._whole[key]
        self._whole.pop(key, None)  # it is gone, or lies elsewhere by now
        path = self.folders.find(version, digest) or self.folders.find(version)
        if path is None:
            raise _not_held(version)
        try:
            manifest = checked_manifest((path / MANIFEST).read_bytes(), version, digest)
        except OSError as error:
            raise _not_held(version) from error
        except SnapshotTorn as torn:
            raise Refused(f"another snapshot {version} is held here: {torn}") from torn
        self._whole[key] = (path, manifest.chunks)
        return self._whole[key]


class SnapshotService(Actor):
    """Gives other nodes what this one holds of a snapshot."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    @handles(GetHeld, concurrent=True)
    async def held(self, message: GetHeld) -> Held:
        return Held(await asyncio.to_thread(self._snapshots.held, message.version, message.digest))

    @handles(GetManifest, concurrent=True)
    async def manifest(self, message: GetManifest) -> SnapshotManifest:
        content = await asyncio.to_thread(self._snapshots.manifest, message.version, message.digest)
        return SnapshotManifest(message.version, message.digest, content)

    @handles(GetChunk, concurrent=True)
    async def chunk(self, message: GetChunk) -> Chunk:
        snapshots = self._snapshots
        data = await asyncio.to_thread(snapshots.chunk, message.version, message.digest, message.chunk)
        snapshots.sent_bytes += len(data)
        return Chunk(data, await asyncio.to_thread(snapshots.held, message.version, message.digest))


def _not_held(version: int) -> Refused:
    return Refused(f"snapshot {version} is not held here")
