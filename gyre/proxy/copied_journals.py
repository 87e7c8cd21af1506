"""A gateway's part in the copies of journals: a peer has those of its own, and it has those of others.

Where no journal has a copy (a lone node, or `journal.copies = 0`), nothing is waited for, nothing is taken over, and every
other order is refused.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from gyre.actors.messages_journals import AskHeld, Attempt, Copies, CopyJournal, CopyTo, Held, PutAway, Taken, TakeOver
from gyre.errors import Refused
from gyre.ids import NodeId
from gyre.proxy.closed_runs import lineages_path
from gyre.proxy.held_copies import HeldCopies
from gyre.proxy.journals import closed_folder, open_folder
from gyre.proxy.replication import NO_PEER, Peer, ReplicaLink, Replication


class CopiedJournals:
    """Of the gateway of `node`. `copies_dir` has those of others; None where there are none."""

    def __init__(self, node: NodeId, journal_dir: Path, trajectories_dir: Path, copies_dir: Path | None) -> None:
        self._journal_dir = journal_dir
        self._trajectories_dir = trajectories_dir
        self._replication = None if copies_dir is None else Replication(node)
        self._held = None if copies_dir is None else HeldCopies(copies_dir)

    async def close(self) -> None:
        if self._replication is not None:
            await self._replication.close()

    # ------------------------------------------------------------------------------------------ our own

    def link(self, attempt: Attempt) -> ReplicaLink | None:
        """What has the open journal copied, from now on."""
        if self._replication is None:
            return None
        return self._replication.link(attempt, open_folder(self._journal_dir, attempt.run, attempt.attempt))

    def copy_to(self, order: CopyTo, peer: Peer | None) -> None:
        """Have the journals' copies there from now on: those of open runs, and of the closed ones that are named."""
        replication = self._ours()
        why = f"where {order.node} is reached is not known just now" if order.node else NO_PEER
        replication.go_to(order.node, peer, why)
        replication.keep(order.closed)
        for attempt in order.closed:
            folder, lineages = self._left_by(attempt)
            if attempt not in replication and folder.is_dir():
                replication.closed(attempt, folder, lineages)

    async def closed(self, attempt: Attempt) -> None:
        """Until what a closed run left outlives this node, or is not to be waited for."""
        folder, lineages = self._left_by(attempt)
        if self._replication is not None and folder.is_dir():
            await self._replication.closed(attempt, folder, lineages).whole()

    def forget(self, attempt: Attempt) -> None:
        """Copy this journal no more."""
        if self._replication is not None:
            self._replication.forget(attempt)

    def status(self) -> Copies:
        return self._ours().status()

    @property
    def behind_bytes(self) -> int:
        return 0 if self._replication is None else self._replication.status().behind_bytes

    def _left_by(self, attempt: Attempt) -> tuple[Path, Path | None]:
        """A closed run's journal and lineages, on disk."""
        closed = closed_folder(self._journal_dir, attempt.run, attempt.attempt)
        folder = closed if closed.is_dir() else open_folder(self._journal_dir, attempt.run, attempt.attempt)
        lineages = lineages_path(self._trajectories_dir, attempt.run, attempt.attempt)
        return folder, lineages if lineages.exists() else None

    def _ours(self) -> Replication:
        if self._replication is None:
            raise Refused("this gateway's journals have no copies")
        return self._replication

    # ------------------------------------------------------------------------------------------ those of others

    async def hold(self, message: AskHeld | CopyJournal | PutAway) -> Held:
        """What the gateway of another node asks of its copies here."""
        held = self._held
        if held is None:
            raise Refused("this gateway keeps no copies")
        match message:
            case AskHeld():
                return await asyncio.to_thread(held.held, message)
            case CopyJournal():
                return await asyncio.to_thread(held.copy, message)
            case PutAway():
                return await asyncio.to_thread(held.put_away, message)

    async def take_over(self, order: TakeOver) -> Taken:
        """Make runs of a node that is gone ours, as far as their copies here are whole."""
        if self._held is None:
            return Taken(())
        folders = self._journal_dir, self._trajectories_dir
        return Taken(await asyncio.to_thread(self._held.take_over, order.attempts, *folders))
