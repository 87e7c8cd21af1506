# pyright: basic
"""Weights between Hugging Face's layout (what engines load) and Megatron's (what the replica trains), both ways.

The two differ in names and in two joins: Megatron keeps query, key and value rows of each key-value head together in
`linear_qkv`, and the gate's rows above the up projection's in `linear_fc1`. A replica of several ranks shares most weights
out among them, along one dimension of Hugging Face's. All of this is one list of pieces; nothing is computed, so a weight
that goes there and back is the same to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.errors import BadInput
from gyre.train.ranks import ALONE, Ranks
from gyre.train.shape import ModelShape
from gyre.train.tensor_file import MappedFile, MappedTensor

_BLOCK_BYTES = 1 << 20
"""Copied at a time: small enough to stay in the processor's cache between its check and its copy."""


@dataclass(frozen=True)
class Piece:
    """One of Hugging Face's weights, and where each rank has its part of it."""

    theirs: str
    shape: tuple[int, ...]
    """Of the whole, in Hugging Face's layout."""
    ours: str
    """Megatron's weight that it lies in."""
    lies: Callable[[Tensor], Tensor]
    """The view of that, in any layout of its first dimension, which has the part's rows in their order."""
    split: int | None
    """The dimension along which the ranks share it; None: each has the whole."""
    of_heads: bool = False
    """Each rank has the whole, and a gradient of its own heads' use of it only."""

    def part(self, whole: Tensor, ranks: Ranks, rank: int | None = None) -> Tensor:
        """The view of the whole that is the part of this rank, or of that one."""
        if self.split is None:
            return whole
        size = self.shape[self.split] // ranks.count
        return whole.narrow(self.split, (ranks.rank if rank is None else rank) * size, size)

    def part_shape(self, ranks: Ranks) -> tuple[int, ...]:
        return tuple(size // ranks.count if place == self.split else size for place, size in enumerate(self.shape))


def pieces(shape: ModelShape) -> tuple[Piece, ...]:
    """All weights of the model."""
    hidden, ffn, head = shape.hidden_size, shape.ffn_size, shape.head_size
    queries = shape.heads // shape.kv_heads

    def itself(weight: Tensor) -> Tensor:
        return weight

    def of_group(first: int, past: int) -> Callable[[Tensor], Tensor]:
        """The heads `first` up to `past` of each key-value head's."""
        return lambda weight: weight.unflatten(0, (-1, queries + 2, head))[:, first:past]

    found = [
        Piece("model.embed_tokens.weight", (shape.vocab_size, hidden), "embedding.word_embeddings.weight", itself, 0),
        Piece("model.norm.weight", (hidden,), "decoder.final_layernorm.weight", itself, None),
    ]
    if not shape.tied:
        found.append(Piece("lm_head.weight", (shape.vocab_size, hidden), "output_layer.weight", itself, 0))
    heads_of = {
        "q": (of_group(0, queries), shape.heads),
        "k": (of_group(queries, queries + 1), shape.kv_heads),
        "v": (of_group(queries + 1, queries + 2), shape.kv_heads),
    }
    for layer in range(shape.layers):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        attention, qkv = f"{theirs}self_attn.", f"{ours}self_attention.linear_qkv."
        for part, (lies, heads) in heads_of.items():
            found.append(Piece(f"{attention}{part}_proj.weight", (heads * head, hidden), f"{qkv}weight", lies, 0))
            if shape.qkv_bias:
                found.append(Piece(f"{attention}{part}_proj.bias", (heads * head,), f"{qkv}bias", lies, 0))
            if shape.qk_norm and part != "v":
                norm = f"{ours}self_attention.{part}_layernorm.weight"
                found.append(Piece(f"{attention}{part}_norm.weight", (head,), norm, itself, None, of_heads=True))
        projection = f"{ours}self_attention.linear_proj.weight"
        found += [
            Piece(f"{attention}o_proj.weight", (hidden, shape.heads * head), projection, itself, 1),
            Piece(f"{theirs}mlp.gate_proj.weight", (ffn, hidden), f"{ours}mlp.linear_fc1.weight", _upper_half, 0),
            Piece(f"{theirs}mlp.up_proj.weight", (ffn, hidden), f"{ours}mlp.linear_fc1.weight", _lower_half, 0),
            Piece(f"{theirs}mlp.down_proj.weight", (hidden, ffn), f"{ours}mlp.linear_fc2.weight", itself, 1),
            Piece(f"{theirs}input_layernorm.weight", (hidden,), f"{ours}input_layernorm.weight", itself, None),
            Piece(
                f"{theirs}post_attention_layernorm.weight", (hidden,), f"{ours}pre_mlp_layernorm.weight", itself, None
            ),
        ]
    return tuple(found)


def model_hash(of: Iterable[Piece]) -> str:
    """Two models with the same hash have the same weights by name and size, however many ranks share them."""
    state = hashlib.sha256()
    for piece in of:
        state.update(f"{piece.theirs} {piece.shape}\n".encode())
    return state.hexdigest()[:32]


def read_weights(
    files: Sequence[MappedFile], shape: ModelShape, ours: Callable[[str], Tensor], ranks: Ranks = ALONE
) -> None:
    """Fill Megatron's weights, `ours` by name, with the rank's part of what is in the files, in one pass over each.

    Raises BadInput naming a weight that is missing, too many or of another size, and then nothing was filled; and
    ChunkChanged for a file that is not what it was, when some may have been.
    """
    wanted = {piece.theirs: piece for piece in pieces(shape)}
    _require_fitting({tensor.name: tensor for file in files for tensor in file.tensors}, wanted, shape)
    for file in files:
        for tensor in file.tensors:
            if tensor.name in wanted:  # and not the second copy of a tied embedding
                piece = wanted[tensor.name]
                _read(file, tensor, piece, piece.lies(ours(piece.ours)), ranks)
        file.check_until(file.size_bytes)


def _read(file: MappedFile, tensor: MappedTensor, piece: Piece, target: Tensor, ranks: Ranks) -> None:
    source = piece.part(tensor.values, ranks).view(target.shape)
    rows = piece.part_shape(ranks)[0]
    first = ranks.rank * rows if piece.split == 0 else 0
    row_bytes = tensor.values[0].numel() * tensor.values.element_size()
    each = rows // target.shape[0]
    """Of their rows, in one entry of the target's first dimension."""
    step = max(1, _BLOCK_BYTES // (each * row_bytes))
    for begin in range(0, target.shape[0], step):
        past = min(begin + step, target.shape[0])
        file.check_until(tensor.begin + (first + past * each) * row_bytes)
        target[begin:past].copy_(source[begin:past])


def _require_fitting(given: Mapping[str, MappedTensor], wanted: Mapping[str, Piece], shape: ModelShape) -> None:
    for name, piece in wanted.items():
        if name not in given:
            raise BadInput("model weights", name, f"this weight is missing for {shape.architecture}")
        found = tuple(given[name].values.shape)
        if found != piece.shape:
            raise BadInput(f"model weights {name}", found, f"{piece.shape} by config.json")
    left = given.keys() - wanted.keys() - ({"lm_head.weight"} if shape.tied else set[str]())
    if left:
        raise BadInput("model weights", min(left), f"this weight is not one of {shape.architecture}")


def join_weights(ours: Mapping[str, Tensor], of: Iterable[Piece], ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """Hugging Face's weights, a copy in host memory, of all ranks' parts. Only the first rank gets them."""
    out: dict[str, Tensor] = {}
    for piece in of:
        lies = piece.lies(ours[piece.ours])
        part = torch.empty(piece.part_shape(ranks), dtype=lies.dtype)
        part.view(lies.shape).copy_(lies)
        parts = [part] if piece.split is None else ranks.gather(part)
        if ranks.first:
            out[piece.theirs] = parts[0] if len(parts) == 1 else torch.cat(parts, piece.split or 0)
    return out


def share_weights(
    whole: Mapping[str, Tensor], ours: Mapping[str, Tensor], of: Iterable[Piece], ranks: Ranks = ALONE
) -> None:
    """The inverse: fill each rank's parts with what the first rank has whole. `whole` of another is not looked at."""
    for piece in of:
        lies = piece.lies(ours[piece.ours])
        part = torch.empty(piece.part_shape(ranks), dtype=lies.dtype)
        if ranks.first:
            parts = [piece.part(whole[piece.theirs], ranks, rank).contiguous() for rank in range(ranks.count)]
            ranks.scatter(parts, part)
        else:
            ranks.scatter([], part)
        lies.copy_(part.view(lies.shape))


def _upper_half(weight: Tensor) -> Tensor:
    return weight.chunk(2)[0]


def _lower_half(weight: Tensor) -> Tensor:
    return weight.chunk(2)[1]
