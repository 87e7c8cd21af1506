"""The names of KV blocks: a chained hash over the weights' version and every token up to the block's end.

Equal names mean equal KV: the same weights read the same tokens at the same positions. Two versions never share a
name, so a prefix cached under one version is a miss under the next.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

HASH_BYTES = 16
"""A cryptographic hash, cut: prompts come from strangers, and a forged collision would hand out another run's KV."""


def root_hash(version: int, salt: str = "") -> bytes:
    """The start of every chain under `version`; a `salt` keeps a name space of its own."""
    return sha256(f"gyre-kv:{version}:{salt}".encode()).digest()[:HASH_BYTES]


def next_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of the block that holds `token_ids` and follows the block named `previous`."""
    return sha256(previous + array("i", token_ids).tobytes()).digest()[:HASH_BYTES]


def block_hashes(token_ids: Sequence[int], version: int, block_tokens: int, salt: str = "") -> list[bytes]:
    """The names of the whole blocks of `token_ids`; a last partial block has none."""
    data = array("i", token_ids)
    width = block_tokens * data.itemsize
    packed = data.tobytes()
    names: list[bytes] = []
    previous = root_hash(version, salt)
    for start in range(0, len(packed) - width + 1, width):
        previous = sha256(previous + packed[start : start + width]).digest()[:HASH_BYTES]
        names.append(previous)
    return names
