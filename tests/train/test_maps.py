"""Hugging Face <-> Megatron: the same model on both sides, and the same weights after going there and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gyre.errors import BadInput
from gyre.train.maps import join_weights
from gyre.train.megatron import MegatronModel, start_groups
from gyre.train.shape import read_shape
from gyre.train.tensor_file import MappedFile

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


def files(folder: Path) -> list[MappedFile]:
    return [MappedFile(path) for path in sorted(folder.glob("model*.safetensors"))]


def loaded(folder: Path) -> MegatronModel:
    start_groups()
    model = MegatronModel(read_shape(folder))
    model.load(files(folder))
    return model


def weights_of(model: MegatronModel) -> dict[str, torch.Tensor]:
    return join_weights({name: parameter.detach() for name, parameter in model.named.items()}, model.pieces)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_logits_and_gradients_equal_those_of_transformers(make_model: MakeModel, variant: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model(**variant)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ours = loaded(folder)
    ours.zero_grads()
    token_ids = torch.randint(ours.shape.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))

    logits = theirs(input_ids=token_ids).logits
    positions = torch.arange(40).expand(3, 40)
    torch.testing.assert_close(ours.ddp(token_ids, positions, None), logits, atol=2e-5, rtol=0)

    expected = torch.log_softmax(logits[:, :-1], -1).gather(2, token_ids[:, 1:, None])[..., 0]
    found = ours.log_probs(token_ids, 1.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    expected.sum().backward()
    found.sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in join_weights({name: p.main_grad for name, p in ours.named.items()}, ours.pieces).items():
        torch.testing.assert_close(parameter, gradients[name], atol=2e-4, rtol=1e-4, msg=lambda text, n=name: n + text)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_weights_that_go_there_and_back_are_the_same_to_the_bit(make_model: MakeModel, variant: dict[str, Any]) -> None:
    folder = make_model(**variant)
    weights, back = load_file(folder / "model.safetensors"), weights_of(loaded(folder))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_taken_as_the_numbers_they_are(make_model: MakeModel, dtype: torch.dtype) -> None:
    folder = make_model("qwen3")
    halves = {name: weight.to(dtype) for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors")
    back = weights_of(loaded(folder))
    assert all(torch.equal(back[name], half.float()) for name, half in halves.items())


def test_a_tied_models_second_copy_of_the_embedding_is_left_out(make_model: MakeModel) -> None:
    folder = make_model("llama", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    copy = weights["model.embed_tokens.weight"] + 1.0
    save_file(weights | {"lm_head.weight": copy}, folder / "model.safetensors")
    assert weights_of(loaded(folder)).keys() == weights.keys()


@pytest.mark.parametrize("change", ["missing", "too many", "another size"])
def test_weights_that_are_not_the_architectures_are_refused_by_name(make_model: MakeModel, change: str) -> None:
    folder = make_model("llama")
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.k_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "another size":
        weights[name] = weights[name][1:].clone()
    else:
        name = "model.layers.1.self_attn.k_proj.bias"
        weights[name] = torch.zeros(4)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(BadInput, match=name):
        loaded(folder)


def test_weights_in_several_files_are_read_together(make_model: MakeModel) -> None:
    folder = make_model("llama")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for place, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: weights[name] for name in part}, folder / f"model-{place:05d}-of-00002.safetensors")
    back = weights_of(loaded(folder))
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"cut",
        (10**6).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2**63).to_bytes(8, "little"),
        *(
            len(header).to_bytes(8, "little") + header + bytes(64)
            for header in (
                b'{"w": 1}',
                b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}',
                b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}',
                b'{"w": {"dtype": "F32", "shape": [40], "data_offsets": [0, 160]}}',
                b'{"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}}',
                b'{"w": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}',
            )
        ),
    ],
)
def test_a_file_that_is_none_of_tensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.safetensors"):
        MappedFile(path)
