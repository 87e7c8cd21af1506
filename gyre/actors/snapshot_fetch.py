"""Have this node hold a snapshot: its chunks are asked of other nodes, several at a time, and served on meanwhile.

    path = await fetch("node-b", snapshots, record.version, record.digest, [("node-a", peers.ref("node-a", …)), …])

Which chunk is asked of whom is decided by gyre.kv_migrate.chunks. Each that comes is checked against the manifest, and the
manifest against the digest that was published, so no source is trusted with the content. One that dies, sends something
else or does not answer is gone on without. What a fetch that was cut short has left is gone on with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gyre.actors.messages_snapshots import Chunk, GetChunk, GetHeld, GetManifest, Held, SnapshotManifest
from gyre.actors.runtime import Ref
from gyre.actors.snapshot_service import Snapshots
from gyre.errors import GyreError, Refused, StorageFull, Unavailable
from gyre.kv_migrate.chunks import Ask, Chunks
from gyre.train.gathering import Gathering, checked_manifest

T = TypeVar("T")

ASK_S = 5.0
CHUNK_S = 15.0
LOOK_S = 0.1
"""Between two looks at what a node that fetches too holds by now."""
PATIENCE_S = 0.5
"""Without a chunk, until others that fetch are counted on less; or three times as long as the slowest chunk took."""
GIVE_UP_S = 10.0
"""For others that fetch to come by what is missing."""
ABSENT_S = 2.0
"""For one that holds something to be found, where none does or can be reached."""


async def fetch(me: str, snapshots: Snapshots, version: int, digest: str, sources: Sequence[tuple[str, Ref]]) -> Path:
    """The folder of the version, whole. `sources` are other nodes, and each one's SnapshotService.

    Raises Unavailable when its files cannot be read or written, and with each source's reason when none can give it;
    StorageFull; and Refused for a version that is being fetched already. What has come is kept for the next try.
    """
    try:
        with snapshots.fetched(version, digest):
            return await _fetched(me, snapshots, version, digest, dict(sources))
    except OSError as error:
        raise Unavailable(f"snapshot {version} cannot be kept: {error}") from error


async def _fetched(me: str, snapshots: Snapshots, version: int, digest: str, refs: dict[str, Ref]) -> Path:
    folders = snapshots.folders
    found = await to_its_end(folders.find_whole, version, digest)
    if found is not None:
        return found
    gathering = await to_its_end(folders.find_gathering, version, digest)
    if gathering is None:
        manifest = await _manifest(version, digest, refs)
        gathering = await to_its_end(folders.begin, version, digest, manifest)
    try:
        return await _gather(me, snapshots, gathering, refs)
    except StorageFull as full:
        gathering = await to_its_end(folders.go_on_on_disk, gathering, full)
    return await _gather(me, snapshots, gathering, refs)


async def _gather(me: str, snapshots: Snapshots, gathering: Gathering, refs: dict[str, Ref]) -> Path:
    await to_its_end(snapshots.serve_on, gathering)
    await _Fetch(me, gathering, refs).run()
    return await to_its_end(gathering.commit)


async def to_its_end(work: Callable[..., T], *args: object) -> T:
    """In a thread. Who is cancelled meanwhile waits for it: the next fetch writes to the same folder."""
    doing = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        while not doing.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([doing])
        doing.exception()  # nobody is left to be told
        raise


async def _manifest(version: int, digest: str, refs: dict[str, Ref]) -> bytes:
    """Of the first source that has it."""
    now_s = asyncio.get_running_loop().time
    until_s = now_s() + ABSENT_S
    while True:
        reasons: dict[str, str] = {}
        for name, ref in refs.items():
            try:
                found = (await ref.ask(GetManifest(version, digest), ASK_S, SnapshotManifest)).manifest
                checked_manifest(found, version, digest)
                return found
            except GyreError as error:
                reasons[name] = str(error)
        if not refs or now_s() > until_s:
            raise _none_has_it(version, reasons)
        await asyncio.sleep(LOOK_S)


def _none_has_it(version: int, reasons: dict[str, str]) -> Unavailable:
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "there is nobody to ask"
    return Unavailable(f"snapshot {version} cannot be had: {told}")


class _Fetch:
    """One fetch: asks under way, and what is known of the sources."""

    def __init__(self, me: str, gathering: Gathering, refs: dict[str, Ref]) -> None:
        self._gathering = gathering
        self._refs = refs
        self._chunks = Chunks(me, len(gathering.chunks), gathering.have, list(refs))
        self._absent: set[str] = set()
        """Sources that cannot be reached, or hold nothing of it."""
        self._unseen = set(refs)
        self._news = asyncio.Event()
        self._came_s = asyncio.get_running_loop().time()
        self._slowest_s = 0.0
        self._failed: GyreError | OSError | None = None

    async def run(self) -> None:
        """Until all chunks are there. Raises Unavailable or StorageFull."""
        async with asyncio.TaskGroup() as group:
            looking = [group.create_task(self._look(name), name=f"look at {name}") for name in self._refs]
            asking: set[asyncio.Task[None]] = set()
            while self._failed is None and not self._chunks.done:
                while (ask := self._chunks.next()) is not None:
                    task = group.create_task(self._ask(ask), name=f"chunk {ask.chunk} of {ask.source}")
                    asking.add(task)
                    task.add_done_callback(asking.discard)
                if self._is_stuck():
                    reasons = {name: self._chunks.reason(name) for name in self._refs}
                    self._failed = _none_has_it(self._gathering.manifest.version, reasons)
                    break
                await self._wait()
            for task in (*looking, *asking):
                task.cancel()
        if self._failed is not None:
            raise self._failed

    def _is_stuck(self) -> bool:
        chunks = self._chunks
        if self._unseen or chunks.in_flight or chunks.can_go_on:
            return False
        others = any(name not in self._absent for name in chunks.gatherers)
        return asyncio.get_running_loop().time() - self._came_s > (GIVE_UP_S if others else ABSENT_S)

    async def _wait(self) -> None:
        """For news; without any, others that fetch are counted on less."""
        patience_s = max(PATIENCE_S, 3 * self._slowest_s)
        self._news.clear()
        try:
            async with asyncio.timeout(patience_s):
                await self._news.wait()
        except TimeoutError:
            self._chunks.patience_ended()

    async def _look(self, name: str) -> None:
        """Know what the source holds, as long as that may grow."""
        message = GetHeld(self._gathering.manifest.version, self._gathering.digest)
        while True:
            if name in self._chunks.gatherers:
                try:
                    self._hear(name, (await self._refs[name].ask(message, ASK_S, Held)).chunks)
                except GyreError as error:  # it may be reached again, or begin to fetch it, at any moment
                    self._lose(name, error)
            if name in self._unseen:
                self._unseen.discard(name)
                self._news.set()
            await asyncio.sleep(LOOK_S)

    def _hear(self, name: str, held: bytes | None) -> None:
        self._absent.discard(name)
        if self._chunks.holds(name, None if held is None else int.from_bytes(held, "little")):
            self._news.set()

    def _lose(self, name: str, error: GyreError) -> None:
        self._absent.add(name)
        self._chunks.gone(name, str(error))

    async def _ask(self, ask: Ask) -> None:
        now_s = asyncio.get_running_loop().time
        asked_s = now_s()
        message = GetChunk(self._gathering.manifest.version, self._gathering.digest, ask.chunk)
        try:
            answer = await self._refs[ask.source].ask(message, CHUNK_S, Chunk)
        except Refused as refusal:
            self._chunks.failed(ask, str(refusal))
        except GyreError as error:
            self._lose(ask.source, error)
        else:
            self._hear(ask.source, answer.held)
            await self._keep(ask, answer.data)
            self._came_s = now_s()
            self._slowest_s = max(self._slowest_s, self._came_s - asked_s)
        self._news.set()

    async def _keep(self, ask: Ask, data: bytes) -> None:
        try:
            right = await to_its_end(self._gathering.put, ask.chunk, data)
        except (OSError, StorageFull) as error:
            self._failed = error
            return
        if right:
            self._chunks.arrived(ask)
        else:
            self._chunks.failed(ask, f"chunk {ask.chunk} that it sent is not what the manifest says")
