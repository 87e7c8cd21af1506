"""The contract of a carrier of blocks between peers.

A peer registers what it serves and tells its address. The receiving peer pulls: it names the blocks it wants in a
manifest, receives them into staging memory that nobody reads, checks each one, and only then does its owner commit them.

The source holds every block from the moment it agrees until the first of these: the receiver acknowledges that it has
them; no connection of the transfer is left for `leases.RESUME_S`; the time that the receiver asked for is over; a fence.
A fence ends an epoch. What belongs to an epoch that has ended (a manifest, an acknowledgement) has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gyre.errors import Refused, Unavailable
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.pacing import Turn, at_once
from gyre.kv_migrate.staging import Staging


class SourceLost(Unavailable):
    """The source cannot be reached, was lost for good, or hangs: it is no use to ask it again right away."""


@dataclass(frozen=True)
class Received:
    """What came of a manifest, in its order. A block that the source had not, or that came damaged, is left out."""

    blocks: tuple[tuple[bytes, memoryview], ...]
    """Name and bytes, each checked. The bytes lie in the staging memory."""
    damaged: int
    """Blocks that are left out because their bytes were not those that the source has, or had taken back meanwhile."""

    @property
    def bytes(self) -> int:
        return sum(len(data) for _, data in self.blocks)


class BlockLease(Protocol):
    """Blocks held for one transfer. `end` may be called more than once."""

    @property
    def blocks(self) -> Sequence[memoryview | None]:
        """The bytes of each block of the manifest; None for one that is not here."""
        ...

    def intact(self, number: int) -> bool:
        """Whether the block of that number has been what it was ever since it was leased.

        Always so where a lease keeps the owner from changing it. Where it does not, this is asked after the bytes were
        read, and a block that is not intact by then is damaged, whatever its checksum.
        """
        ...

    def end(self) -> None: ...


class BlockSource(Protocol):
    """What a peer serves."""

    async def lease(self, manifest: Manifest) -> BlockLease:
        """Hold the manifest's blocks. Raises Refused when the model, the version or the layout differs."""
        ...


class Transport(Protocol):
    """One way to move bytes. Every method may be cancelled at any moment; nothing of a cancelled pull is to be used."""

    share_bytes: int
    """More than this is better pulled in several transfers, where a source that is silent shall be given up soon: of a
    whole transfer it may have something to do before its first word."""

    @property
    def epoch(self) -> int:
        """Goes into the manifests of those who pull from here. It only grows, also from one process to the next."""
        ...

    def register(self, source: BlockSource) -> None:
        """Serve the blocks of `source` to peers."""
        ...

    def describe(self) -> str:
        """The address that peers pull from: the kind, the host and the port. A peer of another kind refuses it."""
        ...

    async def pull(
        self,
        address: str,
        manifest: Manifest,
        block_bytes: int,
        staging: Staging,
        deadline_s: float,
        turn: Turn = at_once,
    ) -> Received:
        """Fetch blocks of `block_bytes` each into `staging`, which has room for all of the manifest's.

        Nothing is fetched before `turn` has been awaited for it. A connection that breaks is made anew and the pull goes on
        where it was. When this returns or raises, nothing is written to `staging` any more. Raises Refused (the peer said
        no), BadInput (an address of another form or kind), SourceLost (not reached, lost for good, or silent for longer than
        the transport allows) or Unavailable (not done by the deadline).
        """
        ...

    async def fence(self, grace_s: float) -> None:
        """End the epoch: refuse what is new of it, give what is under way `grace_s`, then cut it off.

        When it returns, no lease of before is held.
        """
        ...

    async def close(self) -> None:
        """Stop serving; what is under way is cut off."""
        ...


def check_room(manifest: Manifest, block_bytes: int, staging: Staging) -> None:
    """What every pull looks at first."""
    wanted = len(manifest.blocks) * block_bytes
    if wanted > len(staging.view):
        raise Refused(f"{wanted} bytes were asked for, and the staging memory has {len(staging.view)}")
