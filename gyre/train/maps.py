# pyright: basic
"""Weights between Hugging Face's layout (what engines load) and Megatron's (what the replica trains), both ways.

The two differ in names and in two joins: Megatron keeps query, key and value rows of each key-value head together in
`linear_qkv`, and the gate's rows above the up projection's in `linear_fc1`. Nothing is computed, so a weight that goes
there and back is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gyre.errors import BadInput
from gyre.train.shape import ModelShape

_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
}
_IN_LAYER = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
}
_QK_NORM = {
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
}


def to_megatron(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Megatron's weights by Megatron's names. Raises BadInput naming a weight that is missing or too many."""
    left = dict(weights)
    if shape.tied:
        left.pop("lm_head.weight", None)

    def take(name: str) -> Tensor:
        if name not in left:
            raise BadInput("model weights", name, f"this weight is missing for {shape.architecture}")
        return left.pop(name)

    out = {ours: take(theirs) for theirs, ours in _single_weights(shape).items()}
    for layer in range(shape.layers):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in _qkv_kinds(shape):
            parts = [take(f"{theirs}self_attn.{part}_proj.{kind}") for part in "qkv"]
            grouped = [part.reshape(shape.kv_heads, -1, shape.head_size, *part.shape[1:]) for part in parts]
            out[f"{ours}self_attention.linear_qkv.{kind}"] = torch.cat(grouped, 1).flatten(0, 2)
        gate, up = take(f"{theirs}mlp.gate_proj.weight"), take(f"{theirs}mlp.up_proj.weight")
        out[f"{ours}mlp.linear_fc1.weight"] = torch.cat([gate, up])
    if left:
        raise BadInput("model weights", min(left), f"this weight is not one of {shape.architecture}")
    return out


def to_hf(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Hugging Face's weights by Hugging Face's names: the inverse of `to_megatron`."""
    out = {theirs: weights[ours] for theirs, ours in _single_weights(shape).items()}
    queries = shape.heads // shape.kv_heads
    for layer in range(shape.layers):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in _qkv_kinds(shape):
            joined = weights[f"{ours}self_attention.linear_qkv.{kind}"]
            grouped = joined.reshape(shape.kv_heads, queries + 2, shape.head_size, *joined.shape[1:])
            for part, rows in zip("qkv", grouped.split([queries, 1, 1], dim=1), strict=True):
                out[f"{theirs}self_attn.{part}_proj.{kind}"] = rows.flatten(0, 2)
        gate, up = weights[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        out[f"{theirs}mlp.gate_proj.weight"], out[f"{theirs}mlp.up_proj.weight"] = gate, up
    return out


def read_hf_weights(model_dir: Path) -> dict[str, Tensor]:
    """All weights of the `model*.safetensors` files in `model_dir`. Raises BadInput when there are none to read."""
    paths = sorted(model_dir.glob("model*.safetensors"))
    if not paths:
        raise BadInput("model.path", str(model_dir), "a folder with model*.safetensors is expected")
    weights: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError) as error:
            raise BadInput("model weights", path.name, f"the file cannot be read ({error})") from error
    return weights


def _single_weights(shape: ModelShape) -> dict[str, str]:
    """Hugging Face's name -> Megatron's, for the weights that are the same in both."""
    names = dict(_OUTSIDE)
    if not shape.tied:
        names["lm_head.weight"] = "output_layer.weight"
    in_layer = _IN_LAYER | (_QK_NORM if shape.qk_norm else {})
    for layer in range(shape.layers):
        for theirs, ours in in_layer.items():
            names[f"model.layers.{layer}.{theirs}"] = f"decoder.layers.{layer}.{ours}"
    return names


def _qkv_kinds(shape: ModelShape) -> tuple[str, ...]:
    return ("weight", "bias") if shape.qkv_bias else ("weight",)
