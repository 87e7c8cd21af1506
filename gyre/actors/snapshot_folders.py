"""Where a node keeps snapshots: on disk what was made here, in shared memory what it has from other nodes.

    <job's folder>/snapshots/v00000007     durable: the core's node has the published one here
    /dev/shm/gyre-…-snapshots/v00000007    a copy of what other nodes hold: no disk is between them and an engine

Shared memory outlives gyred, engines and replicas, and not the machine; what is gone with it is had from other nodes again.
It takes the version that is in use and the one that comes, and what it has no room for goes to disk.

What an earlier gyred left may have changed since: every byte of a folder is looked at before it is first used, and again
when one of its files has changed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import BadInput, StorageFull, Unavailable
from gyre.jobdir import JobDir, is_private, make_private
from gyre.train.gathering import Gathering, begin_gathering, checked_manifest, find_gathering
from gyre.train.snapshot import (
    MANIFEST,
    SnapshotTorn,
    digest_of,
    keep_newest,
    list_snapshots,
    read_manifest,
    snapshot_path,
    verify,
)
from gyre.train.whole_folder import clear_unfinished, first_fault, remove_whole, write_whole

KEEP_SNAPSHOTS = 4
"""On disk."""

log = logging.getLogger("gyre.actors.snapshots")


@dataclass(frozen=True)
class _Seen:
    """What a look at every byte of a folder has found."""

    stamp: tuple[tuple[str, int, int, int], ...]
    """Of its files: name, inode, size in bytes, and when it last changed in ns. Another stamp: it is looked at again."""
    fault: str
    """Empty when the folder is what its own manifest says."""


class SnapshotFolders:
    """Those of one node. `memory` is made when it is first needed; without `memory_bytes` all are on disk.

    Its methods read and write files: they are for a thread, but for `pinned`.
    """

    def __init__(
        self, disk: Path, memory: Path | None = None, memory_bytes: int = 0, say: Callable[[str], None] = log.info
    ) -> None:
        self.disk = disk
        self._memory = memory if memory_bytes else None
        self._memory_bytes = memory_bytes
        self._say = say
        self._pinned: Counter[int] = Counter()
        self._full = False
        """Whether the last one did not go to shared memory: that is told once."""
        self._seen: dict[Path, _Seen] = {}

    @property
    def parents(self) -> tuple[Path, ...]:
        """The folders that snapshots are in, the disk's first. One of shared memory that is not ours is never read."""
        memory = self._memory
        return (self.disk, memory) if memory is not None and is_private(memory) else (self.disk,)

    @contextmanager
    def pinned(self, version: int) -> Generator[None]:
        """While somebody opens the files of the version: no other takes its room."""
        self._pinned[version] += 1
        try:
            yield
        finally:
            self._pinned[version] -= 1

    # ------------------------------------------------------------------------------------------ what is here

    def find(self, version: int, digest: str = "") -> Path | None:
        """The folder of the version; with `digest`, none that is of another content.

        One whose manifest cannot be read is taken for it: who loads it says that it is torn.
        """
        for parent in self.parents:
            path = snapshot_path(parent, version)
            if path.is_dir() and not (digest and _digest(path) not in ("", digest)):
                return path
        return None

    def find_whole(self, version: int, digest: str = "") -> Path | None:
        """As `find`, and what is there was found to be what its manifest says. A folder that is not is told of once."""
        for parent in self.parents:
            path = snapshot_path(parent, version)
            if path.is_dir() and not (digest and _digest(path) != digest) and not self._look(path, version).fault:
                return path
        return None

    def fault(self, version: int) -> str:
        """What is wrong with the one that is here, as far as it was looked at; empty when nothing is."""
        seen = (self._seen.get(snapshot_path(parent, version)) for parent in self.parents)
        return next((each.fault for each in seen if each is not None and each.fault), "")

    def has_come(self, path: Path) -> None:
        """The folder was just written or fetched, and is whole. Others of its version that were found torn go."""
        for parent in self.parents:
            other = parent / path.name
            if other != path and other in self._seen and self._seen[other].fault and other.is_dir():
                remove_whole(other)
        self._seen = {seen: found for seen, found in self._seen.items() if seen.is_dir()}
        self._seen[path] = _Seen(_stamp(path), "")

    def mend(self, version: int, digest: str, spares: Sequence[Path]) -> Path | None:
        """A torn one made whole, on disk, with files of other folders that are what its manifest says; None if it cannot be.

        Raises StorageFull.
        """
        torn = self.find(version, digest)
        if torn is None:
            return None

        def fill(folder: Path) -> None:
            for entry in read_manifest(torn).files:
                source = next((each for each in (*spares, torn) if not first_fault(each, (entry,))), torn)
                shutil.copyfile(source / entry.name, folder / entry.name)
            shutil.copyfile(torn / MANIFEST, folder / MANIFEST)
            verify(folder, digest)

        try:
            write_whole(path := snapshot_path(self.disk, version), fill)
        except (OSError, SnapshotTorn):
            return None
        self.has_come(path)
        return path

    def _look(self, path: Path, version: int) -> _Seen:
        seen, stamp = self._seen.get(path), _stamp(path)
        if seen is None or seen.stamp != stamp:
            self._seen[path] = seen = _Seen(stamp, _fault(path, version))
            if seen.fault and path.is_dir():  # else it was just deleted
                self._say(f"snapshot {version} is damaged here, and no engine gets it: {seen.fault}")
        return seen

    def find_gathering(self, version: int, digest: str) -> Gathering | None:
        """What an earlier fetch has left of it."""
        found = (find_gathering(parent, version, digest) for parent in self.parents)
        return next((each for each in found if each is not None), None)

    # ------------------------------------------------------------------------------------------ what comes

    def begin(self, version: int, digest: str, manifest: bytes) -> Gathering:
        """Raises SnapshotTorn when the manifest is not the one of that digest, StorageFull when the disk is too."""
        size_bytes = sum(entry.size_bytes for entry in checked_manifest(manifest, version, digest).files)
        if self._memory is not None:
            try:
                self._make_room(self._memory, version, size_bytes)
                gathering = begin_gathering(self._memory, version, digest, manifest)
            except (OSError, BadInput, StorageFull) as error:
                self._say_full(version, error)
            else:
                self._full = False
                return gathering
        return begin_gathering(self.disk, version, digest, manifest)

    def go_on_on_disk(self, gathering: Gathering, full: StorageFull) -> Gathering:
        """With what has come of it, when shared memory has no room any more. Raises `full` when it was on disk already."""
        if gathering.path.parent == self.disk:
            raise full
        version, digest = gathering.manifest.version, gathering.digest
        self._say_full(version, full)
        moved = begin_gathering(self.disk, version, digest, gathering.manifest_bytes())
        for number in range(len(gathering.chunks)):
            if gathering.have >> number & 1:
                moved.put(number, gathering.read(number))
        shutil.rmtree(gathering.path, ignore_errors=True)
        return moved

    def bring_to_disk(self, version: int, digest: str) -> Path:
        """The folder of a snapshot that is here whole, which the machine's end does not take along.

        Raises SnapshotTorn, StorageFull, and Unavailable when it is not here any more.
        """
        path, kept = self.find_whole(version, digest), snapshot_path(self.disk, version)
        if path == kept:
            return kept
        if path is None:
            raise Unavailable(f"snapshot {version} is not here whole any more")

        def fill(folder: Path) -> None:
            for file in path.iterdir():
                shutil.copyfile(file, folder / file.name)
            verify(folder, digest)

        write_whole(kept, fill)
        self._seen[kept] = _Seen(_stamp(kept), "")
        for other, copy in list_snapshots(path.parent):
            if not self._pinned[other]:
                remove_whole(copy)
        return kept

    # ------------------------------------------------------------------------------------------ what goes

    def keep_newest(self) -> None:
        """On disk: the newest few, and what is pinned. What is not newer than all of that takes no shared memory any more."""
        keep_newest(self.disk, KEEP_SNAPSHOTS, [version for version, count in self._pinned.items() if count])
        newest = max((version for version, _ in list_snapshots(self.disk)), default=-1)
        for parent in self.parents[1:]:
            for version, path in list_snapshots(parent):
                if version <= newest and not self._pinned[version]:
                    remove_whole(path)

    def clear_unfinished(self) -> None:
        """Only for when nobody writes."""
        for parent in self.parents:
            clear_unfinished(parent)

    def _make_room(self, memory: Path, version: int, size_bytes: int) -> None:
        """Of those before it only the newest stays, and what is pinned. Raises StorageFull, OSError, BadInput."""
        bound_mib = self._memory_bytes >> 20
        if 2 * size_bytes > self._memory_bytes:
            raise StorageFull(f"two of {_mib(size_bytes)} do not fit node.snapshot_memory_mib = {bound_mib}")
        make_private(memory)
        held = list_snapshots(memory)
        newest = max((found for found, _ in held if found != version), default=-1)
        for found, path in held:
            if found not in (newest, version) and not self._pinned[found]:
                remove_whole(path)
        used_bytes = sum(file.stat().st_size for file in memory.glob("*/*"))
        if used_bytes + size_bytes > self._memory_bytes:
            raise StorageFull(f"{_mib(used_bytes)} of node.snapshot_memory_mib = {bound_mib} are in use")
        status = os.statvfs(memory)
        if (free_bytes := status.f_bavail * status.f_frsize) < size_bytes:
            raise StorageFull(f"{memory.parent} has {_mib(free_bytes)} left")

    def _say_full(self, version: int, error: Exception) -> None:
        if not self._full:
            self._say(f"snapshot {version} goes to disk, and not to shared memory as long as this lasts: {error}")
        self._full = True


def held_by(job: JobDir) -> dict[int, Path]:
    """Every version that the node of this folder has, oldest first; as `find` would have it."""
    parents = SnapshotFolders(job.snapshots, job.snapshots_in_memory, 1).parents
    found = {version: path for parent in reversed(parents) for version, path in list_snapshots(parent)}
    return dict(sorted(found.items()))


def _digest(path: Path) -> str:
    try:
        return digest_of((path / MANIFEST).read_bytes())
    except OSError:
        return ""


def _stamp(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    try:
        files = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    except OSError:  # it was just deleted, or cannot be read: who looks at its bytes says so
        return ()
    return tuple((name, status.st_ino, status.st_size, status.st_ctime_ns) for name, status in files)


def _fault(path: Path, version: int) -> str:
    try:
        of = verify(path).version
    except SnapshotTorn as torn:
        return str(torn)
    except OSError as error:
        return f"{path.name}: {error.filename} cannot be read ({error.strerror})"
    return "" if of == version else f"{path.name}: {MANIFEST} is of version {of}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"
