"""The engine without its process: batching, memory pressure, and what other implementations compute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gyre.engine.local.core import EngineConfig, EngineCore
from gyre.engine.local.requests import Output, SampleRequest, merge
from gyre.errors import BadInput, Refused

from .tiny_models import FAMILIES, make_model

torch.set_num_threads(1)


def request(rid: str, input_ids: list[int], max_new_tokens: int, **changes: Any) -> SampleRequest:
    fields: dict[str, Any] = {
        "rid": rid,
        "input_ids": tuple(input_ids),
        "max_new_tokens": max_new_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": frozenset(),
        "ignore_eos": True,
        "seed": None,
        "extra_key": None,
        "stream": True,
        "stream_interval": 1,
    }
    return SampleRequest(**fields | changes)


def run(core: EngineCore, *requests: SampleRequest) -> dict[str, Output]:
    """Each request's whole output. The core must not stand still."""
    for item in requests:
        core.submit(item)
    return finish(core)


def finish(core: EngineCore) -> dict[str, Output]:
    whole: dict[str, Output] = {}
    while core.has_work:
        assert core.step()
        for output in core.take_outputs():
            whole[output.rid] = merge(whole[output.rid], output) if output.rid in whole else output
    for output in core.take_outputs():
        whole[output.rid] = merge(whole[output.rid], output) if output.rid in whole else output
    return whole


def prompt(length: int, salt: int = 0) -> list[int]:
    return [3 + (7 * i + i * i + salt * 13) % 300 for i in range(length)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", request.param)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "untied qwen3 with biases": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "llama without grouped heads": ("llama", {"num_key_value_heads": 4}),
    "llama 3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "rope of transformers 4": ("llama", {"rope_theta": 20000.0, "rope_scaling": None}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    folder = make_model(tmp_path / "m", family, **changes)
    core = EngineCore(EngineConfig(folder, 0, prompt_tokens_per_step=40))
    sampled = run(
        core,
        request("long", prompt(100), 20, temperature=1.0, seed=1),
        request("short", prompt(13, salt=5), 20, temperature=1.0, seed=2),
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for rid, ids in (("long", prompt(100)), ("short", prompt(13, salt=5))):
        output = sampled[rid]
        with torch.no_grad():
            logits = reference(torch.tensor([ids + list(output.token_ids)])).logits[0]
        right = torch.log_softmax(logits, -1)[len(ids) - 1 : -1].gather(1, torch.tensor(output.token_ids)[:, None])[
            :, 0
        ]
        assert (right - torch.tensor(output.logprobs)).abs().max() < 1e-5


def test_sharded_weights_are_read(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    shutil.copy(model / "config.json", tmp_path / "config.json")
    weight_map = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, str(tmp_path / shard))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}'.replace("'", '"'))
    whole, sharded = EngineCore(EngineConfig(model, 0)), EngineCore(EngineConfig(tmp_path, 0))
    one, two = run(whole, request("r", prompt(20), 8))["r"], run(sharded, request("r", prompt(20), 8))["r"]
    assert one.token_ids == two.token_ids
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 25)), min_size=1, max_size=5),
    block_tokens=st.sampled_from([1, 4, 16]),
    blocks=st.integers(8, 40),
    pieces=st.sampled_from([2, 7, 512]),
)
def test_answers_do_not_depend_on_company_block_size_or_memory(
    model: Path, lengths: list[tuple[int, int]], block_tokens: int, blocks: int, pieces: int
) -> None:
    """With too little memory sequences make way for each other and come back; their tokens stay."""
    tokens = max(blocks * block_tokens, 112)
    core = EngineCore(EngineConfig(model, 0, block_tokens, tokens, prompt_tokens_per_step=pieces))
    wanted = [request(f"r{i}", prompt(size, salt=i % 3), new) for i, (size, new) in enumerate(lengths)]
    together = run(core, *wanted)
    reference = EngineCore(EngineConfig(model, 0))
    for item in wanted:
        reference.flush()
        alone = run(reference, item)[item.rid]
        assert together[item.rid].token_ids == alone.token_ids
    assert core.store.index.unused, "every block came back"


def test_memory_pressure_retracts_the_youngest_and_says_so(model: Path) -> None:
    core = EngineCore(EngineConfig(model, 0, block_tokens=4, cache_tokens=64))
    outputs = run(core, *(request(f"r{i}", prompt(10, salt=i), 30) for i in range(4)))
    assert outputs["r0"].retractions == 0
    assert sum(output.retractions for output in outputs.values()) > 0
    assert all(len(output.token_ids) == 30 for output in outputs.values())


def test_requests_over_the_batch_limit_wait_their_turn(model: Path) -> None:
    core = EngineCore(EngineConfig(model, 0, max_running=2))
    for index in range(5):
        core.submit(request(f"r{index}", prompt(5, salt=index), 4))
    core.step()
    assert (core.load.running, core.load.waiting) == (2, 3)
    assert len(finish(core)) == 5


def test_a_prefix_that_is_being_computed_is_waited_for_not_computed_twice(model: Path) -> None:
    core = EngineCore(EngineConfig(model, 0))
    shared = prompt(64)
    outputs = run(core, *(request(f"r{i}", [*shared, 5 + i, 9], 4) for i in range(8)))
    assert [outputs[f"r{i}"].cached_tokens for i in range(8)] == [0] + [64] * 7


def test_an_answer_ends_with_the_context(model: Path) -> None:
    core = EngineCore(EngineConfig(model, 0, cache_tokens=64))
    output = run(core, request("r", prompt(50), 100))["r"]
    assert len(output.token_ids) == 14
    assert output.finish is not None
    assert output.finish.kind == "length"


def test_the_models_own_end_of_text_stops_an_answer(model: Path) -> None:
    free = run(EngineCore(EngineConfig(model, 0)), request("r", prompt(20), 12))["r"].token_ids
    folder = model.parent / "other-eos"
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [319, {free[4]}]}}')
    output = run(EngineCore(EngineConfig(folder, 0)), request("r", prompt(20), 12, ignore_eos=False))["r"]
    assert output.token_ids == free[: free.index(free[4]) + 1]


def test_a_seed_samples_the_same_tokens_also_when_the_request_is_continued(model: Path) -> None:
    core = EngineCore(EngineConfig(model, 0))
    whole = run(core, request("whole", prompt(30), 40, temperature=1.0, seed=77))["whole"].token_ids
    start = run(core, request("start", prompt(30), 15, temperature=1.0, seed=77))["start"].token_ids
    rest = run(core, request("rest", prompt(30) + list(start), 25, temperature=1.0, seed=77))["rest"].token_ids
    assert start + rest == whole
    assert run(core, request("other", prompt(30), 40, temperature=1.0, seed=78))["other"].token_ids != whole


def test_kv_of_two_versions_is_never_published(model: Path) -> None:
    """A request that lived across an update leaves nothing that another could find."""
    other = make_model(model.parent / "v1", json.loads((model / "config.json").read_text())["model_type"], seed=9)
    core = EngineCore(EngineConfig(model, 0))
    core.submit(request("live", prompt(40), 60))
    for _ in range(10):
        core.step()
    core.pause("in_place")
    core.update_weights(other, 1, flush=True)
    core.resume()
    answer = finish(core)["live"]
    assert [span[0] for span in answer.spans] == [0, 1]
    again = run(core, request("again", prompt(40) + list(answer.token_ids), 5))["again"]
    assert again.cached_tokens == 0
    fresh = run(EngineCore(EngineConfig(other, 1)), request("again", prompt(40) + list(answer.token_ids), 5))["again"]
    assert again.token_ids == fresh.token_ids


def test_a_key_that_is_not_the_version_has_a_cache_of_its_own(model: Path) -> None:
    core = EngineCore(EngineConfig(model, 4))
    cached = [
        run(core, request(f"r{index}", prompt(40), 2, extra_key=key))[f"r{index}"].cached_tokens
        for index, key in enumerate([None, "4", "5", "5", "4"])
    ]
    assert cached == [0, 32, 0, 32, 32]


def test_weights_change_only_under_an_idle_or_paused_engine(model: Path) -> None:
    core = EngineCore(EngineConfig(model, 0))
    core.submit(request("r", prompt(10), 5))
    core.step()
    with pytest.raises(Refused, match="1 live requests"):
        core.update_weights(model, 1, flush=True)
    assert core.version == 0


def test_weights_of_another_shape_or_torn_weights_leave_the_old_ones(model: Path, tmp_path: Path) -> None:
    core = EngineCore(EngineConfig(model, 0))
    before = run(core, request("a", prompt(10), 5))["a"].token_ids
    wider = make_model(tmp_path / "wider", "llama", intermediate_size=128)
    torn = tmp_path / "torn"
    shutil.copytree(model, torn)
    (torn / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    for folder in (wider, torn, tmp_path / "nowhere"):
        with pytest.raises(BadInput):
            core.update_weights(folder, 1, flush=True)
    assert core.version == 0
    assert run(core, request("b", prompt(10), 5))["b"].token_ids == before


def test_weights_that_have_diverged_abort_the_request_and_harm_nobody_after(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"][0] = float("nan")
    save_file(tensors, str(broken / "model.safetensors"))
    core = EngineCore(EngineConfig(model, 0))
    right = run(core, request("before", prompt(10), 20))["before"].token_ids
    core.update_weights(broken, 1, flush=True)
    output = run(core, request("bad", prompt(30), 20))["bad"]
    assert output.finish is not None
    assert (output.finish.kind, output.finish.message) == ("abort", "the model's logits are not finite")
    core.update_weights(model, 2, flush=True)
    assert run(core, request("after", prompt(10), 20))["after"].token_ids == right


def test_released_memory_refuses_requests_until_it_is_back(model: Path) -> None:
    core = EngineCore(EngineConfig(model, 0))
    before = run(core, request("a", prompt(40), 5))["a"].token_ids
    core.release_memory(weights=True, kv=True)
    core.release_memory(weights=True, kv=True)
    with pytest.raises(Refused, match="released"):
        core.submit(request("b", prompt(40), 5))
    core.resume_memory(kv=True)
    with pytest.raises(Refused, match="update its weights"):
        core.submit(request("b", prompt(40), 5))
    core.update_weights(model, 0, flush=True)
    output = run(core, request("c", prompt(40), 5))["c"]
    assert output.token_ids == before
    assert output.cached_tokens == 0


def test_released_memory_goes_back_to_the_system(tmp_path: Path) -> None:
    def resident_mib() -> float:
        return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024

    folder = make_model(tmp_path / "m", "llama", num_key_value_heads=4, head_dim=64)
    core = EngineCore(EngineConfig(folder, 0, cache_tokens=16384))
    before = resident_mib()
    for index in range(8):
        run(core, request(f"r{index}", [3 + (i * (index + 2)) % 300 for i in range(1900)], 1))
    filled = resident_mib()
    # 2 layers of keys and values, 256 floats a token each: 4 KiB a token, 15,200 tokens.
    assert filled - before > 40
    core.release_memory(weights=True, kv=True)
    assert filled - resident_mib() > 40


def test_memory_comes_back_when_the_folder_of_the_weights_is_gone(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    core = EngineCore(EngineConfig(tmp_path / "m", 0))
    core.release_memory(weights=True, kv=True)
    shutil.rmtree(tmp_path / "m")
    core.resume_memory(kv=True)
    with pytest.raises(Refused):
        core.submit(request("a", prompt(4), 2))
    core.update_weights(model, 1, flush=True)
    assert len(run(core, request("b", prompt(4), 2))["b"].token_ids) == 2


def test_memory_is_not_released_under_a_live_request(model: Path) -> None:
    core = EngineCore(EngineConfig(model, 0))
    core.submit(request("r", prompt(10), 5))
    with pytest.raises(Refused, match="1 live requests"):
        core.release_memory(weights=True, kv=True)
    assert len(finish(core)["r"].token_ids) == 5


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    folder = make_model(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadInput, match=field):
        EngineCore(EngineConfig(folder, 0))


def test_a_token_outside_the_vocabulary_is_refused(model: Path) -> None:
    with pytest.raises(BadInput, match="token ids are below 320"):
        EngineCore(EngineConfig(model, 0)).submit(request("r", [5, 320], 5))
