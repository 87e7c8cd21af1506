"""The shape of a model, read from the `config.json` of a folder in Hugging Face's layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from gyre.errors import BadInput

FAMILIES = ("llama", "qwen3")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True)
class ModelShape:
    family: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_factor: float
    """Linear stretching of positions; 1 leaves them as they are."""
    rope_scaling: RopeScaling | None
    context_tokens: int
    tied: bool
    attention_bias: bool
    eos_token_ids: frozenset[int]

    @property
    def digest(self) -> str:
        """Equal for two models whose weights are interchangeable."""
        fields = {key: value for key, value in vars(self).items() if key != "eos_token_ids"}
        return sha256(repr(sorted(fields.items())).encode()).hexdigest()[:12]


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in `folder`. Raises BadInput for one that the local engine cannot serve."""
    config = _read_json(folder / "config.json")
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise BadInput("model_type", family, f"the local engine serves {' and '.join(FAMILIES)}")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise BadInput("hidden_act", activation, "the local engine knows silu")
    if config.get("use_sliding_window") or config.get("mlp_bias"):
        raise BadInput("config.json", family, "sliding windows and MLP biases are not served by the local engine")
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        factor, scaling = _rope_scaling(config)
        return ModelShape(
            family=family,
            vocab_size=int(config["vocab_size"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_factor=factor,
            rope_scaling=scaling,
            context_tokens=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            eos_token_ids=_eos(folder, config),
        )
    except KeyError as error:
        raise BadInput("config.json", str(folder), f"the key {error} is required") from error
    except (TypeError, ValueError) as error:
        raise BadInput("config.json", str(folder), f"a value has the wrong type ({error})") from error


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`.
    return cast("dict[str, Any]", config.get("rope_parameters") or config.get("rope_scaling") or {})


def _rope_scaling(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = _rope(config)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return 1.0, None
    if kind == "linear":
        return float(rope["factor"]), None
    if kind == "llama3":
        return 1.0, RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_context_tokens=int(rope["original_max_position_embeddings"]),
        )
    raise BadInput("rope_type", kind, "the local engine knows default, linear and llama3")


def _eos(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    generation = folder / "generation_config.json"
    found: Any = config.get("eos_token_id")
    if generation.exists():
        found = _read_json(generation).get("eos_token_id", found)
    if found is None:
        return frozenset()
    return frozenset(int(token) for token in (found if isinstance(found, list) else [found]))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput("model", str(path), f"it must be readable ({error.strerror})") from error
    except ValueError as error:
        raise BadInput("model", str(path), f"it must be JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadInput("model", str(path), "it must hold a JSON object")
    return cast("dict[str, Any]", value)
