"""The messages by which a node's gateway keeps copies of its journals at a peer's, and a node takes over what one left.

A copy's files are named as in the journal's folder, and beside them `lineages`, which a run leaves when it closes.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.actors.messages import Place
from gyre.ids import NodeId, RunId
from gyre.wire import record


@record("journal.attempt")
@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, which has a journal of its own."""

    run: RunId
    attempt: int


# ---------------------------------------------------------------------------------------------- gateway to gateway


@record("journal.held")
@dataclass(frozen=True)
class AskHeld:
    """What is held of a file that `node` writes? -> Held."""

    node: NodeId
    run: RunId
    attempt: int
    file: str


@record("journal.copy")
@dataclass(frozen=True)
class CopyJournal:
    """Bytes of a file from `offset` on; what is held behind that is not the writer's and goes. -> Held."""

    node: NodeId
    run: RunId
    attempt: int
    file: str
    offset: int
    data: bytes
    checksum: int
    """xxh3-64 of the data."""


@record("journal.put_away")
@dataclass(frozen=True)
class PutAway:
    """The run is closed, and these are its files and their bytes: the copy is whole. -> Held, or Refused when it is not."""

    node: NodeId
    run: RunId
    attempt: int
    files: dict[str, int]


@record("journal.holds")
@dataclass(frozen=True)
class Held:
    """On disk: so many bytes of the file, with this xxh3-64."""

    bytes: int
    checksum: int


# ---------------------------------------------------------------------------------------------- gyred to gateway


@record("journal.copy_to")
@dataclass(frozen=True)
class CopyTo:
    """Which node's gateway has the copies from now on, and where it is reached. -> Ok.

    No node: there is none to be had. No place: it is not known just now. Of the closed runs those of `closed` have a
    copy, and no others.
    """

    node: NodeId
    place: Place | None
    closed: tuple[Attempt, ...]


@record("journal.get_copies")
@dataclass(frozen=True)
class GetCopies:
    """How do the copies of a node's journals stand? A node that is not `node` asks that one. -> Copies."""

    node: NodeId


@record("journal.copies")
@dataclass(frozen=True)
class Copies:
    peer: NodeId
    """Which has them; empty where there is none."""
    behind_runs: int
    behind_bytes: int
    """Of journals that the peer is not known to have."""
    why: str
    """Why it has not, as last heard."""


@record("journal.take_over")
@dataclass(frozen=True)
class TakeOver:
    """To a node, from the leader: make these runs of a node that is gone your own, as far as you have whole copies. -> Taken.

    May be repeated.
    """

    attempts: tuple[Attempt, ...]


@record("journal.taken")
@dataclass(frozen=True)
class Taken:
    """Those of them that are the node's own now, their journals and their lineages."""

    attempts: tuple[Attempt, ...]
