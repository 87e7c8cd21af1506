"""The bytes of the KV cache: fixed-size blocks in one anonymous mapping, which gets its pages as they are used.

A block is contiguous (layer by layer, keys then values), so that it leaves and arrives as one piece of memory. The
mapping starts as zeros and is given back whole: a release really returns the memory to the system.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from gyre.engine.local.shape import ModelShape

BLOCK_LAYOUT = "layer,kv,token,head,dim"


class KvMemory:
    """`blocks` blocks of `block_tokens` tokens. Readers use `rows`, the writer of new tokens `slots`."""

    def __init__(self, shape: ModelShape, blocks: int, block_tokens: int, dtype: torch.dtype) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.rows_per_block = shape.layers * 2
        width = shape.kv_heads * shape.head_dim
        self.block_bytes = self.rows_per_block * block_tokens * width * dtype.itemsize
        self._mapping = mmap.mmap(-1, blocks * self.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = torch.frombuffer(self._mapping, dtype=dtype)
        self.rows: Tensor = flat.view(blocks * self.rows_per_block, block_tokens * width)
        """One row a block, layer and kind (key or value)."""
        self.slots: Tensor = flat.view(blocks * self.rows_per_block * block_tokens, width)
        """One row a block, layer, kind and token."""

    def view(self, block: int) -> memoryview:
        """The bytes of one block, not copied. Valid while somebody holds the block."""
        start = block * self.block_bytes
        return memoryview(self._mapping)[start : start + self.block_bytes]

    def zero(self) -> None:
        """Forget everything; the system takes the pages back and gives zeros again."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def layout_name(shape: ModelShape, block_tokens: int, dtype: torch.dtype) -> str:
    """Names what a block's bytes mean. Only engines of equal layout exchange blocks."""
    kind = str(dtype).removeprefix("torch.")
    return f"{shape.family}-{shape.digest}/{BLOCK_LAYOUT}/{block_tokens}/{kind}"
