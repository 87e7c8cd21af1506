"""The contract of a carrier of blocks between peers.

A peer registers what it serves and tells its address. The receiving peer pulls: it names the blocks it wants in a
manifest, receives them into memory of its own, checks each one, and only then does its owner commit them. The source
holds every block from the moment it agrees until the receiver has it all, or is gone, or the deadline has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gyre.errors import Refused
from gyre.wire import record


@record("kv_manifest")
@dataclass(frozen=True)
class Manifest:
    """What is asked for, and under which conditions it means the same on both sides."""

    transfer: str
    version: int
    layout: str
    blocks: tuple[bytes, ...]


@dataclass(frozen=True)
class Received:
    """The blocks that the source had, in the manifest's order: name and bytes, each checked."""

    blocks: tuple[tuple[bytes, memoryview], ...]

    @property
    def bytes(self) -> int:
        return sum(len(data) for _, data in self.blocks)


class DamagedBlock(Refused):
    """A block's bytes are not those that the source sent. Nothing of the transfer is to be used."""


class BlockLease(Protocol):
    """Blocks held for one transfer. `end` may be called more than once."""

    @property
    def blocks(self) -> Sequence[memoryview | None]:
        """The bytes of each block of the manifest; None for one that is not here."""
        ...

    def end(self) -> None: ...


class BlockSource(Protocol):
    """What a peer serves."""

    async def lease(self, manifest: Manifest) -> BlockLease:
        """Hold the manifest's blocks. Raises Refused when the version or the layout differs."""
        ...


class Transport(Protocol):
    def register(self, source: BlockSource) -> None:
        """Serve the blocks of `source` to peers."""
        ...

    def describe(self) -> str:
        """The address that peers pull from."""
        ...

    async def pull(self, address: str, manifest: Manifest, block_bytes: int, deadline_s: float) -> Received:
        """Fetch blocks of `block_bytes` each from the peer at `address`.

        Raises Refused (the peer said no), DamagedBlock, or Unavailable (not reached, or not done by the deadline).
        """
        ...

    async def fence(self, grace_s: float) -> None:
        """Give transfers to peers `grace_s` to end, then cut them off. When it returns, no lease of before is held."""
        ...

    async def close(self) -> None:
        """Stop serving; what is under way is cut off."""
        ...
