"""Hugging Face <-> Megatron: the same model on both sides, and the same weights after going there and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gyre.errors import BadInput
from gyre.train.maps import read_hf_weights, to_hf, to_megatron
from gyre.train.megatron import MegatronModel, start_groups
from gyre.train.shape import read_shape

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MakeModel = Callable[..., Path]

VARIANTS: list[dict[str, Any]] = [
    {"architecture": "llama"},
    {"architecture": "llama", "tie_word_embeddings": True, "num_key_value_heads": 1},
    {"architecture": "qwen2", "rope_theta": 1e6},
    {"architecture": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 4},
    {"architecture": "qwen3"},
    {"architecture": "qwen3", "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_logits_and_gradients_equal_those_of_transformers(make_model: MakeModel, variant: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model(**variant)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    start_groups()
    shape = read_shape(folder)
    ours = MegatronModel(shape)
    ours.load(to_megatron(read_hf_weights(folder), shape))
    ours.zero_grads()
    token_ids = torch.randint(shape.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))

    logits = theirs(input_ids=token_ids).logits
    positions = torch.arange(40).expand(3, 40)
    torch.testing.assert_close(ours.ddp(token_ids, positions, None), logits, atol=2e-5, rtol=0)

    expected = torch.log_softmax(logits[:, :-1], -1).gather(2, token_ids[:, 1:, None])[..., 0]
    found = ours.log_probs(token_ids, 1.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    expected.sum().backward()
    found.sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in to_hf({name: p.main_grad for name, p in ours.named.items()}, shape).items():
        torch.testing.assert_close(parameter, gradients[name], atol=2e-4, rtol=1e-4, msg=lambda text, n=name: n + text)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_weights_that_go_there_and_back_are_the_same_to_the_bit(make_model: MakeModel, variant: dict[str, Any]) -> None:
    folder = make_model(**variant)
    weights, shape = read_hf_weights(folder), read_shape(folder)
    back = to_hf(to_megatron(weights, shape), shape)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_a_tied_models_second_copy_of_the_embedding_is_left_out(make_model: MakeModel) -> None:
    folder = make_model("llama", tie_word_embeddings=True)
    weights = read_hf_weights(folder)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    assert "output_layer.weight" not in to_megatron(weights, read_shape(folder))


@pytest.mark.parametrize("change", ["missing", "too many"])
def test_weights_that_are_not_the_architectures_are_refused_by_name(make_model: MakeModel, change: str) -> None:
    folder = make_model("llama")
    weights, name = read_hf_weights(folder), "model.layers.1.self_attn.k_proj.weight"
    if change == "missing":
        del weights[name]
    else:
        name = "model.layers.1.self_attn.k_proj.bias"
        weights[name] = torch.zeros(4)
    with pytest.raises(BadInput, match=name):
        to_megatron(weights, read_shape(folder))


def test_weights_in_several_files_are_read_together(make_model: MakeModel) -> None:
    from safetensors.torch import save_file

    folder = make_model("llama")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="safetensors"):
        read_hf_weights(folder)
    names = sorted(weights)
    for place, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: weights[name] for name in part}, folder / f"model-{place:05d}-of-00002.safetensors")
    assert read_hf_weights(folder).keys() == weights.keys()
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"cut")
    with pytest.raises(BadInput, match="00002-of-00002"):
        read_hf_weights(folder)
