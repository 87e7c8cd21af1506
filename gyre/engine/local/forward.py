"""One forward pass over a ragged batch: sequences that decode one token, and chunks of prompts.

The core makes a `Part` of each sequence; `forward` writes the new tokens' keys and values into the KV memory and
returns the logits of the parts that want them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.engine.local.decode_window import DecodeWindow
from gyre.engine.local.kv_memory import KvMemory
from gyre.engine.local.shape import ModelShape
from gyre.engine.local.weights import Weights


@dataclass(frozen=True)
class Part:
    """The next tokens of one sequence: `token_ids` come at positions `start` …, into the memory of `blocks`."""

    owner: int
    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    """At least the blocks up to the last new token."""
    wants_logits: bool
    """Whether the logits after the part's last token are needed."""


def forward(
    shape: ModelShape,
    weights: Weights,
    memory: KvMemory,
    window: DecodeWindow,
    decodes: Sequence[Part],
    prompts: Sequence[Part],
) -> Tensor:
    """Logits [parts that want them, vocabulary] in float32: the decodes' first, then the prompts'.

    `decodes` have one token each, in the order of the rows of `window`.
    """
    parts = [*decodes, *prompts]
    positions = torch.tensor([part.start + i for part in parts for i in range(len(part.token_ids))])
    slots = torch.tensor([_slot(memory, part, part.start + i) for part in parts for i in range(len(part.token_ids))])
    batch = _DecodeBatch(memory, window, decodes) if decodes else None
    chunks = [_PromptChunk(memory, part) for part in prompts]

    x = weights.embedding[torch.tensor([token for part in parts for token in part.token_ids])]
    cos, sin = weights.rope_cos[positions].unsqueeze(1), weights.rope_sin[positions].unsqueeze(1)
    rotated_heads, half = shape.heads + shape.kv_heads, shape.head_dim // 2
    count = x.shape[0]
    for index, layer in enumerate(weights.layers):
        qkv = F.linear(F.rms_norm(x, (shape.hidden,), layer.attention_norm, shape.norm_eps), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(count, rotated_heads + shape.kv_heads, shape.head_dim)
        qk = qkv[:, :rotated_heads]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (shape.head_dim,), None, shape.norm_eps) * layer.qk_norm
        qk = qk * cos + qk.roll(half, -1) * sin
        query, key, value = qk[:, : shape.heads], qk[:, shape.heads :], qkv[:, rotated_heads:]
        key_slots = slots + 2 * index * memory.block_tokens
        memory.slots.index_copy_(0, key_slots, key.reshape(count, -1))
        memory.slots.index_copy_(0, key_slots + memory.block_tokens, value.reshape(count, -1))
        mixed: list[Tensor] = []
        row = len(decodes)
        if batch is not None:
            mixed.append(batch.attend(shape, index, query[:row], key[:row], value[:row]))
        for chunk in chunks:
            mixed.append(chunk.attend(shape, memory, index, query[row : row + chunk.rows]))
            row += chunk.rows
        attention = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        x = x + F.linear(attention, layer.out, layer.out_bias)
        gate, up = F.linear(F.rms_norm(x, (shape.hidden,), layer.mlp_norm, shape.norm_eps), layer.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    x = x[torch.tensor(_logit_rows(parts), dtype=torch.long)]
    return F.linear(F.rms_norm(x, (shape.hidden,), weights.norm, shape.norm_eps), weights.head).float()


class _DecodeBatch:
    """One new token each: a batch over the rows of the window, padded to the longest."""

    def __init__(self, memory: KvMemory, window: DecodeWindow, parts: Sequence[Part]) -> None:
        longest = max(part.start for part in parts) + 1
        self._positions = torch.tensor([part.start for part in parts])
        self._rows = torch.arange(len(parts))
        self._kv = window.kv[:, : len(parts), :, :longest]
        self._mask = (torch.arange(longest) <= self._positions[:, None])[:, None, None, :]

    def attend(self, shape: ModelShape, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._kv[2 * layer], self._kv[2 * layer + 1]
        keys[self._rows, :, self._positions] = key
        values[self._rows, :, self._positions] = value
        grouped = query.reshape(-1, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
        return out.reshape(-1, shape.heads * shape.head_dim)


class _PromptChunk:
    """Several new tokens of one sequence, each seeing what is before it."""

    def __init__(self, memory: KvMemory, part: Part) -> None:
        self.rows = len(part.token_ids)
        self._end = part.start + self.rows
        used = (self._end - 1) // memory.block_tokens + 1
        self._table = torch.tensor(list(part.blocks[:used])) * memory.rows_per_block
        self._mask = torch.arange(self._end) <= torch.arange(part.start, self._end)[:, None]

    def attend(self, shape: ModelShape, memory: KvMemory, layer: int, query: Tensor) -> Tensor:
        size = (-1, shape.kv_heads, shape.head_dim)
        keys = memory.rows.index_select(0, self._table + 2 * layer).view(size)[: self._end].transpose(0, 1)
        values = memory.rows.index_select(0, self._table + (2 * layer + 1)).view(size)[: self._end].transpose(0, 1)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=self._mask,
            enable_gqa=shape.heads != shape.kv_heads,
        )
        return out[0].transpose(0, 1).reshape(self.rows, shape.heads * shape.head_dim)


def _slot(memory: KvMemory, part: Part, position: int) -> int:
    """The row of `memory.slots` for the first layer's key at `position`."""
    block, offset = part.blocks[position // memory.block_tokens], position % memory.block_tokens
    return block * memory.rows_per_block * memory.block_tokens + offset


def _logit_rows(parts: Sequence[Part]) -> list[int]:
    rows: list[int] = []
    end = 0
    for part in parts:
        end += len(part.token_ids)
        if part.wants_logits:
            rows.append(end - 1)
    return rows
