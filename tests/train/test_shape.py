"""config.json, in the older and the newer layout, and what of it the replica cannot train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import BadInput
from gyre.train.shape import read_shape

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def folder(tmp_path: Path, **changes: Any) -> Path:
    config = {key: value for key, value in (QWEN3 | changes).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_model_is_read_from_its_config(tmp_path: Path) -> None:
    shape = read_shape(folder(tmp_path, rope_theta=1e6))
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_size) == (3, 4, 2, 32)
    assert (shape.tied, shape.qk_norm, shape.qkv_bias, shape.rope_theta) == (True, True, False, 1e6)


def test_the_rotary_base_is_found_in_both_layouts(tmp_path: Path) -> None:
    newer = folder(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_shape(newer).rope_theta == 5e5
    assert read_shape(folder(tmp_path, rope_scaling=None)).rope_theta == 10000.0


def test_what_a_config_leaves_out_has_its_architectures_default(tmp_path: Path) -> None:
    shape = read_shape(folder(tmp_path, model_type="llama", head_dim="absent", num_key_value_heads="absent"))
    assert (shape.head_size, shape.kv_heads) == (32, 4)
    assert read_shape(folder(tmp_path, head_dim="absent")).head_size == 128


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("use_sliding_window", True),
        ("quantization_config", {"bits": 4}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("num_hidden_layers", 0),
        ("vocab_size", "512"),
        ("hidden_size", "absent"),
        ("num_key_value_heads", 3),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=key.replace("rope_scaling", "rope_type")):
        read_shape(folder(tmp_path, **{key: value}))


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInput, match=r"config\.json"):
        read_shape(tmp_path)
    with pytest.raises(BadInput, match=r"config\.json"):
        read_shape(tmp_path / "nowhere")
