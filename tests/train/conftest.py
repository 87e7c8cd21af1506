"""Tiny models in Hugging Face's layout, made from a seed, and lineages for them; replica processes that train on those."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gyre.ids import RunId
from gyre.trajectory.records import Lineage, LineageRole

if TYPE_CHECKING:
    from core_process import Core, MakeCore, Zygote

VOCAB = 61

MakeModel = Callable[..., Path]
MakeLineage = Callable[..., Lineage]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """A model folder of `architecture` with random weights, norms and biases included."""

    def make(architecture: str = "qwen3", seed: int = 0, name: str = "model", **changes: Any) -> Path:
        import torch
        from safetensors.torch import save_file

        config: dict[str, Any] = {
            "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture] + "ForCausalLM"],
            "model_type": architecture,
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }
        if architecture == "qwen3":
            config["head_dim"] = 12
        config |= changes
        hidden, ffn = config["hidden_size"], config["intermediate_size"]
        head = config.get("head_dim", hidden // config["num_attention_heads"])
        queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
        sizes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config["vocab_size"], hidden),
            "model.norm.weight": (hidden,),
        }
        if not config["tie_word_embeddings"]:
            sizes["lm_head.weight"] = (config["vocab_size"], hidden)
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            for part, rows in (("q", queries), ("k", keys), ("v", keys)):
                sizes[f"{at}self_attn.{part}_proj.weight"] = (rows, hidden)
                if architecture == "qwen2":
                    sizes[f"{at}self_attn.{part}_proj.bias"] = (rows,)
            sizes[f"{at}self_attn.o_proj.weight"] = (hidden, queries)
            sizes[f"{at}mlp.gate_proj.weight"] = sizes[f"{at}mlp.up_proj.weight"] = (ffn, hidden)
            sizes[f"{at}mlp.down_proj.weight"] = (hidden, ffn)
            sizes[f"{at}input_layernorm.weight"] = sizes[f"{at}post_attention_layernorm.weight"] = (hidden,)
            if architecture == "qwen3":
                sizes[f"{at}self_attn.q_norm.weight"] = sizes[f"{at}self_attn.k_norm.weight"] = (head,)
        generator = torch.Generator().manual_seed(seed)
        weights = {
            key: torch.rand(size, generator=generator) + 0.5
            if "norm" in key
            else torch.randn(size, generator=generator) * 0.15
            for key, size in sizes.items()
        }
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text("{}")
        save_file(weights, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def make_lineage() -> MakeLineage:
    """A lineage of `tokens` random tokens of which `counted_tokens` were sampled, off-policy by a little."""

    def make(run: str, index: int = 0, tokens: int = 20, counted_tokens: int = 6, seed: int = 0) -> Lineage:
        dice = random.Random(f"{run} {index} {seed}")
        counted = [0] * tokens
        for place in dice.sample(range(1, tokens), counted_tokens):
            counted[place] = 1
        return Lineage(
            run=RunId(run),
            attempt=1,
            index=index,
            role=LineageRole.MAIN,
            token_ids=array("i", [dice.randrange(VOCAB) for _ in range(tokens)]).tobytes(),
            counted=array("B", counted).tobytes(),
            logprobs=array("f", [dice.uniform(-6.0, -2.0) if flag else 0.0 for flag in counted]).tobytes(),
            versions=array("i", [0 if flag else -1 for flag in counted]).tobytes(),
        )

    return make


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    from core_process import Zygote

    program = Path(__file__).with_name("replica_zygote.py")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Zygote(process)


@pytest.fixture
async def make_core(
    tmp_path: Path, make_model: MakeModel, make_lineage: MakeLineage, zygote: Zygote
) -> AsyncIterator[MakeCore]:
    """Makes the folder of a core's replica, which is killed after the test. Its gateway has a lineage of each run of `RUNS`,
    and one of the run `outside` whose tokens no model has."""
    from core_process import RUNS, SECRET, Core, Gateway

    from gyre.actors.remote import serve
    from gyre.actors.runtime import ActorSystem

    outside = dataclasses.replace(make_lineage("outside"), token_ids=array("i", [1000] * 20).tobytes())
    lineages = {RunId(run): make_lineage(run) for run in RUNS} | {outside.run: outside}
    made: list[Core] = []

    def make(name: str, model: Path | None = None, **section: int) -> Core:
        made.append(Core(tmp_path / name, model or make_model(name=f"{name}-model"), server.address, zygote, **section))
        return made[-1]

    async with ActorSystem.running("test") as system:
        gateway = system.spawn("gateway", lambda: Gateway(lineages))
        async with serve(gateway, f"unix:{tmp_path}/gateway.sock", SECRET) as server:
            yield make
            for core in made:
                await core.end(signal.SIGKILL)
