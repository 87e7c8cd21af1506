"""A second copy of every journal, with another node's gateway: the death of a node then loses no settled call.

A gateway has one `Replication`, and each of its journals a `ReplicaLink`: it sends what the journal's files hold and the
peer does not, always from the files, so that catching up after a while without the peer, or with a new one, is the same
as keeping up. A closed run's lineages follow its journal. The peer's side is gyre.proxy.held_copies.

An answer waits for the peer as it waits for the disk, and a run is closed when its copy is whole. While there is no peer,
or it cannot be reached, or takes longer than `COPY_S`, nothing waits for it: that is logged once a run, and told by
`Replication.status` and the metric `gyre_journal_copy_behind_bytes` until it has all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol, TypeVar

import xxhash

from gyre.actors.messages_journals import AskHeld, Attempt, Copies, CopyJournal, Held, PutAway
from gyre.deadline import outlive_request
from gyre.errors import GyreError, Refused
from gyre.ids import NodeId, RunId
from gyre.proxy.held_copies import LINEAGES, PIECE_BYTES, checksum_of
from gyre.proxy.journals import segment_path, segments
from gyre.sched.placement import NOWHERE

R = TypeVar("R")

COPY_S = 5.0
"""The longest an answer waits for the peer."""
NO_PEER = "no other node can have it"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_log = logging.getLogger(__name__)


class Peer(Protocol):
    """The way to the peer: a reference to its gateway's actor."""

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R: ...


class Replication:
    """All journals of the gateway of node `me`, as they are copied. Until it is told of a peer, one is waited for."""

    def __init__(self, me: NodeId) -> None:
        self.me = me
        self.node = NOWHERE
        """Whose gateway has the copies."""
        self.peer: Peer | None = None
        self.why = NO_PEER
        """Why there is no way to a peer, while there is none."""
        self._told = False
        self._links: dict[Attempt, ReplicaLink] = {}

    def link(self, attempt: Attempt, folder: Path) -> ReplicaLink:
        """Copy the journal in `folder` from now on."""
        link = self._links[attempt] = ReplicaLink(self, attempt, folder)
        if self._told:
            link.begin()
        return link

    def go_to(self, node: NodeId, peer: Peer | None, why: str = NO_PEER) -> None:
        """Have the copies with this node; one that is new gets all that there is. Without a way to it, `why` is told."""
        same = self._told and node == self.node and (peer is None) == (self.peer is None)
        self.node, self.peer, self.why, self._told = node, peer, why, True
        if not same:
            for link in self._links.values():
                link.begin()

    def closed(self, attempt: Attempt, folder: Path, lineages: Path | None) -> ReplicaLink:
        """The journal is closed and lies in `folder` now; beside it the lineages that are to be had of it."""
        link = self._links.get(attempt) or self.link(attempt, folder)
        link.closed(folder, lineages)
        return link

    def keep(self, attempts: Collection[Attempt]) -> None:
        """Of the closed journals only these are to have a copy."""
        for attempt, link in tuple(self._links.items()):
            if link.is_closed and attempt not in attempts:
                self.forget(attempt)

    def forget(self, attempt: Attempt) -> None:
        """Copy this journal no more."""
        if (link := self._links.pop(attempt, None)) is not None:
            link.end()

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._links

    def status(self) -> Copies:
        behind = [(size, link.why) for link in self._links.values() if (size := link.behind_bytes())]
        why = next((why for _, why in behind if why), "")
        return Copies(self.node, len(behind), sum(size for size, _ in behind), why)

    async def close(self) -> None:
        """Stop copying. What the peer lacks it gets when the journals are opened again."""
        tasks = [task for link in self._links.values() if (task := link.end()) is not None]
        self._links.clear()
        await asyncio.gather(*tasks, return_exceptions=True)


class ReplicaLink:
    """One journal and its copy. Positions are (file, bytes of it); the files are the segments, and then the lineages."""

    def __init__(self, replication: Replication, attempt: Attempt, folder: Path) -> None:
        self._replication = replication
        self._attempt = attempt
        self._folder = folder
        self._lineages: Path | None = None
        self.is_closed = False
        self.why = ""
        """Why the copy lags, while it does."""
        self._whole = False
        """The peer has said that it has all files of the closed journal."""
        self._written = (0, 0)
        self._copied = (0, 0)
        self._agreed = False
        """Whether the peer was asked what it holds since it could be reached last."""
        self._changed = asyncio.Condition()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------ the journal's side

    def wrote(self, segment: int, size: int) -> None:
        """The journal's files now reach so far."""
        self._written = segment, size
        self._news.set()

    def closed(self, folder: Path, lineages: Path | None) -> None:
        self._folder, self._lineages, self.is_closed = folder, lineages, True
        if files := self._files():
            self._written = len(files) - 1, files[-1].stat().st_size
        self._news.set()

    async def caught_up(self) -> None:
        """Return when the peer has all that was written so far, or when it is not to be waited for."""
        wanted = self._written
        await self._until(lambda: self._copied >= wanted)

    async def whole(self) -> None:
        """As `caught_up`, of a closed journal: when the copy is one that can be taken over."""
        await self._until(lambda: self._whole)

    def behind_bytes(self) -> int:
        if self._copied >= self._written:
            return 0
        try:
            sizes = [path.stat().st_size for path in self._files()[self._copied[0] :]]
        except OSError:  # it is put away at this moment
            return 1
        return max(1, sum(sizes) - self._copied[1])

    async def _until(self, reached: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(COPY_S), self._changed:
                await self._changed.wait_for(lambda: bool(self.why) or reached())
        except TimeoutError:
            self._fall_behind(f"the peer did not take it within {COPY_S:g} s")

    # ------------------------------------------------------------------------------------------ the way to the peer

    def begin(self) -> None:
        """Begin with the peer as it is now, of which nothing is known."""
        self.end()
        self._copied, self._agreed, self._whole = (0, 0), False, False
        work = self._keep_up() if self._replication.peer is not None else self._lag()
        self._task = asyncio.get_running_loop().create_task(work, name=f"copy the journal of {self._attempt.run}")

    def end(self) -> asyncio.Task[None] | None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task

    async def _lag(self) -> None:
        self._fall_behind(self._replication.why)
        await self._wake()

    async def _keep_up(self) -> None:
        outlive_request()
        pause_s = _SHORTEST_PAUSE_S
        while True:
            try:
                while self._copied < self._written:
                    await self._copy_on()
                    pause_s = _SHORTEST_PAUSE_S
                if self.is_closed and not self._whole:
                    await self._put_away()
            except GyreError as error:
                self._agreed = False
                self._fall_behind(str(error))
                await self._wake()
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                continue
            except OSError as error:  # the folder was put away a moment ago, or the disk fails
                self._fall_behind(f"it cannot be read ({error})")
                await self._wake()
                await asyncio.sleep(pause_s)
                continue
            if self.why:
                _log.info("run %s: its journal's copy has all again", self._attempt.run)
                self.why = ""
            await self._wake()
            await self._news.wait()
            self._news.clear()

    async def _copy_on(self) -> None:
        """Send one piece; the first time, find out where to begin."""
        number, offset = self._copied
        path = self._file(number)
        if not self._agreed:
            held = await self._ask(AskHeld(*self._named, self._name(number)))
            whole = await asyncio.to_thread(checksum_of, path, held.bytes)
            # A copy that is not the beginning of what we have is no copy: it is made anew.
            self._copied = number, held.bytes if whole == held.checksum else 0
            self._agreed = True
            return
        data = await asyncio.to_thread(_piece, path, offset)
        if not data:
            if number >= self._written[0]:
                raise OSError(f"{path.name} ends before what was written to it")
            self._copied, self._agreed = (number + 1, 0), False
            return
        checksum = xxhash.xxh3_64_intdigest(data)
        held = await self._ask(CopyJournal(*self._named, self._name(number), offset, data, checksum))
        if held.bytes != offset + len(data):
            self._agreed = False
            return
        self._copied = number, held.bytes
        await self._wake()

    async def _put_away(self) -> None:
        sizes = {self._name(number): path.stat().st_size for number, path in enumerate(self._files())}
        try:
            await self._ask(PutAway(*self._named, sizes))
        except Refused:  # the peer has lost some of it meanwhile
            self._copied = 0, 0
            raise
        self._whole = True

    @property
    def _named(self) -> tuple[NodeId, RunId, int]:
        return self._replication.me, self._attempt.run, self._attempt.attempt

    async def _ask(self, message: object) -> Held:
        peer = self._replication.peer
        assert peer is not None, "the link begins anew when the peer changes"
        return await peer.ask(message, COPY_S, Held)

    # ------------------------------------------------------------------------------------------ its files

    def _files(self) -> list[Path]:
        return [*segments(self._folder), *([self._lineages] if self._lineages is not None else ())]

    def _file(self, number: int) -> Path:
        if self._lineages is not None and number >= self._written[0]:
            return self._lineages
        return segment_path(self._folder, number)

    def _name(self, number: int) -> str:
        return LINEAGES if self._file(number) == self._lineages else segment_path(self._folder, number).name

    def _fall_behind(self, reason: str) -> None:
        if not self.why:
            run = self._attempt.run
            _log.warning("run %s goes on without the copy of its journal: %s", run, reason)
        self.why = reason

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _piece(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PIECE_BYTES)
