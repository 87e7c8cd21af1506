"""The weights of one model, from safetensors to the fused tensors that `forward` multiplies with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gyre.engine.local.shape import ModelShape
from gyre.errors import BadInput


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: Qwen3's norm of queries and keys."""
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    rope_cos: Tensor
    rope_sin: Tensor
    """[context, head_dim]; the first half has its sign turned, so that a rotation is x * cos + roll(x) * sin."""


def load_weights(folder: Path, shape: ModelShape, dtype: torch.dtype) -> Weights:
    """The weights in `folder`, whole and of the right shape. Raises BadInput and touches nothing when they are not."""
    read = _Reader(folder, dtype)
    hidden, query, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    embedding = read("model.embed_tokens.weight", shape.vocab_size, hidden)
    layers: list[Layer] = []
    for index in range(shape.layers):
        prefix = f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        bias = shape.attention_bias
        layers.append(
            Layer(
                attention_norm=read(f"{prefix}input_layernorm.weight", hidden),
                qkv=torch.cat(
                    [
                        read(f"{attention}q_proj.weight", query, hidden),
                        read(f"{attention}k_proj.weight", kv, hidden),
                        read(f"{attention}v_proj.weight", kv, hidden),
                    ]
                ),
                qkv_bias=torch.cat(
                    [
                        read(f"{attention}q_proj.bias", query),
                        read(f"{attention}k_proj.bias", kv),
                        read(f"{attention}v_proj.bias", kv),
                    ]
                )
                if bias
                else None,
                qk_norm=torch.cat(
                    [
                        read(f"{attention}q_norm.weight", shape.head_dim).expand(shape.heads, -1),
                        read(f"{attention}k_norm.weight", shape.head_dim).expand(shape.kv_heads, -1),
                    ]
                )
                if shape.family == "qwen3"
                else None,
                out=read(f"{attention}o_proj.weight", hidden, query),
                out_bias=read(f"{attention}o_proj.bias", hidden) if bias else None,
                mlp_norm=read(f"{prefix}post_attention_layernorm.weight", hidden),
                gate_up=torch.cat(
                    [
                        read(f"{prefix}mlp.gate_proj.weight", shape.intermediate, hidden),
                        read(f"{prefix}mlp.up_proj.weight", shape.intermediate, hidden),
                    ]
                ),
                down=read(f"{prefix}mlp.down_proj.weight", hidden, shape.intermediate),
            )
        )
    cos, sin = _rope_tables(shape, dtype)
    return Weights(
        embedding=embedding,
        layers=tuple(layers),
        norm=read("model.norm.weight", hidden),
        head=embedding if shape.tied else read("lm_head.weight", shape.vocab_size, hidden),
        rope_cos=cos,
        rope_sin=sin,
    )


def digest(weights: Weights) -> str:
    """Names these weights: equal for equal ones, wherever they were read from."""
    found = xxhash.xxh3_128()
    for part in (weights.embedding, weights.norm, weights.head, *weights.layers):
        for tensor in [part] if isinstance(part, Tensor) else vars(part).values():
            if tensor is not None:
                found.update(cast(Any, tensor).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


class _Reader:
    """Reads tensors by name from the one file of a folder, or from its shards."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}
        for path in _files(folder):
            try:
                with safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType]
                    for name in cast("list[str]", file.keys()):
                        self._tensors[name] = cast(Tensor, file.get_tensor(name))
            except (OSError, SafetensorError) as error:
                raise BadInput("weights", str(path), f"it must be a whole safetensors file ({error})") from error

    def __call__(self, name: str, *size: int) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise BadInput("weights", name, "the model needs this tensor and the folder has none of that name")
        if tuple(tensor.shape) != size:
            raise BadInput("weights", f"{name} {tuple(tensor.shape)}", f"its shape must be {size}")
        return tensor.to(self._dtype)


def _files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        yield folder / "model.safetensors"
        return
    weight_map = cast("dict[str, Any]", json.loads(index.read_text(encoding="utf-8")))["weight_map"]
    for name in sorted({str(file) for file in cast("dict[str, str]", weight_map).values()}):
        yield folder / name


def _rope_tables(shape: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequency = 1.0 / (shape.rope_theta**steps)
    scaling = shape.rope_scaling
    if scaling is not None:
        wavelength = 2 * torch.pi / frequency
        longest = scaling.original_context_tokens / scaling.low_freq_factor
        shortest = scaling.original_context_tokens / scaling.high_freq_factor
        blend = (scaling.original_context_tokens / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blended = (1 - blend) * frequency / scaling.factor + blend * frequency
        frequency = torch.where(
            wavelength > longest, frequency / scaling.factor, torch.where(wavelength < shortest, frequency, blended)
        )
    positions = torch.arange(shape.context_tokens, dtype=torch.float32) / shape.rope_factor
    angle = torch.outer(positions, frequency)
    sin = angle.sin()
    return torch.cat([angle.cos()] * 2, dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)
