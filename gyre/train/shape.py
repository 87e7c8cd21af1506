"""What a model folder's config.json says about the model: the architectures a replica can train, in one record.

Read by the replica to build its Megatron model and by `maps` to carry weights between the two layouts. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gyre.errors import BadInput

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelShape:
    """A decoder with RMSNorm, SwiGLU, rotary positions and grouped-query attention."""

    architecture: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    norm_eps: float
    rope_theta: float
    context_tokens: int
    tied: bool
    """The output layer is the embedding."""

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "qwen3"


def read_shape(model_dir: Path) -> ModelShape:
    """The shape of the model in `model_dir`. Raises BadInput for what the replica cannot train exactly."""
    path = model_dir / "config.json"
    try:
        plain: Any = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput("model.path", str(model_dir), f"config.json cannot be read ({error})") from error
    if not isinstance(plain, dict):
        raise BadInput("config.json", plain, "a JSON object is expected")
    config = cast(dict[str, Any], plain)
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise BadInput("config.json model_type", architecture, f"one of {', '.join(ARCHITECTURES)} is expected")
    _refuse_variants(config)
    hidden_size, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    kv_heads = _integer(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise BadInput("config.json num_key_value_heads", kv_heads, f"it must divide num_attention_heads ({heads})")
    return ModelShape(
        architecture=cast(str, architecture),
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        ffn_size=_integer(config, "intermediate_size"),
        layers=_integer(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=_integer(config, "head_dim", 128 if architecture == "qwen3" else hidden_size // heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(_rope(config).get("rope_theta", 10000.0)),
        context_tokens=_integer(config, "max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def require_shares(shape: ModelShape, ranks: int) -> None:
    """Raises BadInput when the model cannot be shared out among so many ranks."""
    of = {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
    }
    odd = [f"{key} ({size})" for key, size in of.items() if size % ranks]
    if odd:
        raise BadInput("cells.train_ranks", ranks, f"it must divide the model's {', '.join(odd)}")


def _refuse_variants(config: Mapping[str, Any]) -> None:
    fixed: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": config.get("model_type") == "qwen2",
        "mlp_bias": False,
        "use_sliding_window": False,
        "quantization_config": None,
    }
    for key, allowed in fixed.items():
        if config.get(key, allowed) != allowed:
            raise BadInput(f"config.json {key}", config[key], f"the replica trains {key} = {allowed!r} only")
    rope_type = _rope(config).get("rope_type", _rope(config).get("type", "default"))
    if rope_type != "default":
        raise BadInput("config.json rope_type", rope_type, "the replica trains rope_type = 'default' only")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary parameters, as both the older and the newer layout of config.json give them."""
    newer = config.get("rope_parameters") or {}
    older = config.get("rope_scaling") or {}
    theta = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    return {**older, **theta, **newer}


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"config.json {key}", value, "a whole number of at least 1 is expected")
    return value
