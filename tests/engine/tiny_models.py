"""Random tiny models in Hugging Face's layout, small enough to make in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FAMILIES = ("llama", "qwen3")


def make_model(folder: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A model of `family` with weights from `seed`; `changes` replace keys of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": family == "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "torch_dtype": "float32",
    } | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(random_weights(config, seed), str(folder / "model.safetensors"))
    return folder


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=noise) / columns**0.5

    def gain(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=noise)

    # A tied embedding at full size would make every token predict itself.
    scale = hidden**-0.5 if config["tie_word_embeddings"] else 1.0
    tensors = {"model.embed_tokens.weight": scale * torch.randn(config["vocab_size"], hidden, generator=noise)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        tensors[prefix + "input_layernorm.weight"] = gain(hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = gain(hidden)
        for name, rows in (("q", heads * width), ("k", kv_heads * width), ("v", kv_heads * width)):
            tensors[f"{attention}{name}_proj.weight"] = matrix(rows, hidden)
            if config["attention_bias"]:
                tensors[f"{attention}{name}_proj.bias"] = 0.1 * torch.randn(rows, generator=noise)
        tensors[attention + "o_proj.weight"] = matrix(hidden, heads * width)
        if config["attention_bias"]:
            tensors[attention + "o_proj.bias"] = 0.1 * torch.randn(hidden, generator=noise)
        if config["model_type"] == "qwen3":
            tensors[attention + "q_norm.weight"] = gain(width)
            tensors[attention + "k_norm.weight"] = gain(width)
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner)
    tensors["model.norm.weight"] = gain(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors
