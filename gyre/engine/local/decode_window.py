"""The KV of the sequences that decode, once more, laid out as attention reads it.

Blocks are right for sharing and moving; reading a batch out of them costs a copy of the whole context at every step.
A sequence is therefore copied here once, when it begins to decode, and grows by one token a step. Rows are kept
without holes, so that the batch is a plain slice.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gyre.engine.local.kv_memory import KvMemory
from gyre.engine.local.shape import ModelShape


class Decoding(Protocol):
    """A sequence about to read one token at position `start`; `owner` is its name for as long as its KV is unbroken."""

    @property
    def owner(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...


class DecodeWindow:
    """`kv` is [layers * 2, rows, kv heads, tokens, head dim], keys and values in turn."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self._planes = shape.layers * 2
        self._heads = shape.kv_heads
        self._dim = shape.head_dim
        self._dtype = dtype
        self._owners: list[int] = []
        self._tokens: list[int] = []
        self.kv = torch.empty(0, 0, 0, 0, 0)

    def clear(self) -> None:
        """Give the memory back. Sequences that still decode are copied in again."""
        self._owners, self._tokens = [], []
        self.kv = torch.empty(0, 0, 0, 0, 0)

    def arrange(self, memory: KvMemory, parts: Sequence[Decoding]) -> list[int]:
        """Make room for `parts` and nobody else. Returns their indices in the order of the rows."""
        index_of = {part.owner: index for index, part in enumerate(parts)}
        for row in reversed(range(len(self._owners))):
            if self._owners[row] not in index_of:
                self._remove(row)
        longest = max((part.start + 1 for part in parts), default=0)
        self._reserve(len(parts), -(-longest // memory.block_tokens) * memory.block_tokens)
        held = set(self._owners)
        for part in parts:
            if part.owner not in held:
                self._copy_in(memory, part)
        for row, owner in enumerate(self._owners):
            self._tokens[row] = parts[index_of[owner]].start + 1
        return [index_of[owner] for owner in self._owners]

    def _remove(self, row: int) -> None:
        last = len(self._owners) - 1
        if row != last:
            tokens = self._tokens[last]
            self.kv[:, row, :, :tokens] = self.kv[:, last, :, :tokens]
            self._owners[row], self._tokens[row] = self._owners[last], tokens
        self._owners.pop()
        self._tokens.pop()

    def _copy_in(self, memory: KvMemory, part: Decoding) -> None:
        used = -(-part.start // memory.block_tokens)
        if used:
            table = torch.tensor(part.blocks[:used])
            rows = memory.rows.view(memory.blocks, self._planes, memory.block_tokens, self._heads, self._dim)[table]
            whole = rows.permute(1, 3, 0, 2, 4).reshape(self._planes, self._heads, -1, self._dim)
            self.kv[:, len(self._owners), :, : part.start] = whole[:, :, : part.start]
        self._owners.append(part.owner)
        self._tokens.append(part.start)

    def _reserve(self, rows: int, tokens: int) -> None:
        _, have_rows, _, have_tokens, _ = self.kv.shape
        if rows <= have_rows and tokens <= have_tokens:
            return
        # Doubling, so that a sequence that grows is copied rarely.
        new_rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows)
        new_tokens = have_tokens if tokens <= have_tokens else max(tokens, 2 * have_tokens)
        grown = self._zeros((self._planes, new_rows, self._heads, new_tokens, self._dim))
        for row, used in enumerate(self._tokens):
            grown[:, row, :, :used] = self.kv[:, row, :, :used]
        self.kv = grown

    def _zeros(self, size: tuple[int, ...]) -> Tensor:
        """Zeros that take no memory before they are written: rows of short sequences stay short."""
        count = torch.Size(size).numel()
        mapping = mmap.mmap(-1, count * self._dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapping, dtype=self._dtype).view(size)
