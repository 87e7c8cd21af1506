"""What the two ends of a transfer say to each other, after they have greeted.

    receiver                              source
    Open: the manifest              ->
                                    <-    Offer: which blocks will come; or Refusal
    Fetch: a span of bytes          ->                                            (on any connection, any number)
                                    <-    Granted, then the bytes; or Refusal
    AskChecksums                    ->
                                    <-    Checksums
    Acknowledge                     ->    (the source lets go of the blocks; no answer)

A connection that has broken is made anew, and the transfer goes on under its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.kv_migrate.manifest import Manifest
from gyre.wire import record


@record("kv_open")
@dataclass(frozen=True)
class Open:
    manifest: Manifest
    carrier: str
    """The receiver's kind of transport: the bytes travel only between two of one kind."""
    hold_s: float
    """How long the blocks are to be held at most."""


@record("kv_offer")
@dataclass(frozen=True)
class Offer:
    """The blocks that the source has lie one behind the other, in the manifest's order."""

    block_bytes: int
    """Of each of them."""
    missing: tuple[int, ...]
    """The numbers in the manifest of those that it does not have, upwards."""
    engine: str
    """With the Transfer Engine: the source's engine, and where in its memory the bytes lie."""
    place: int


@record("kv_refusal")
@dataclass(frozen=True)
class Refusal:
    reason: str


@record("kv_fetch")
@dataclass(frozen=True)
class Fetch:
    transfer: str
    epoch: int
    begin: int
    end: int


@record("kv_granted")
@dataclass(frozen=True)
class Granted:
    pass


@record("kv_ask_checksums")
@dataclass(frozen=True)
class AskChecksums:
    transfer: str
    epoch: int


@record("kv_checksums")
@dataclass(frozen=True)
class Checksums:
    """Of the blocks that were offered, one behind the other. Packed: a transfer has thousands."""

    sums: bytes
    """xxh3 of each, eight bytes with the highest first."""
    taken_back: tuple[int, ...]
    """The places here of those that the source's owner has taken back meanwhile: their sums mean nothing."""


@record("kv_acknowledge")
@dataclass(frozen=True)
class Acknowledge:
    transfer: str
    epoch: int
