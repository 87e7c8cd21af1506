"""The policy that ships: it loads, it knows the form, and it has everything to learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import gyre.demo
from gyre.demo.chores import ChoresTask, heldout_task
from gyre.demo.demonstrations import RIGHT_COMMANDS, SUBMIT, SYSTEM_PROMPT, fenced, observation
from gyre.demo.rendering import DemonstrationRenderer
from gyre.demo.tiny_model import TinyConfig, TinyModel
from gyre.demo.vocabulary import build_tokenizer
from gyre.demo.warm_start import WarmStart, save_policy, train

POLICY = Path(gyre.demo.__file__).parent / "policy"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def policy() -> TinyModel:
    return load(POLICY)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(POLICY / "tokenizer.json"))


def load(folder: Path) -> TinyModel:
    config = json.loads((folder / "config.json").read_text())
    model = TinyModel(
        TinyConfig(
            vocabulary_tokens=config["vocab_size"],
            hidden=config["hidden_size"],
            feed_forward=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            head_width=config["head_dim"],
            context_tokens=config["max_position_embeddings"],
            rope_theta=config["rope_theta"],
            norm_epsilon=config["rms_norm_eps"],
        )
    )
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    return model.eval()


def greedy(model: TinyModel, tokenizer: Tokenizer, prompt: list[int], limit_tokens: int = 24) -> list[int]:
    answer: list[int] = []
    with torch.inference_mode():
        while len(answer) < limit_tokens:
            answer.append(int(model(torch.tensor([prompt + answer]))[0, -1].argmax()))
            if answer[-1] == tokenizer.token_to_id("<|im_end|>"):
                break
    return answer


def opening(task: ChoresTask) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task.prompt}]


def test_the_folder_is_a_small_fp32_checkpoint_in_the_hugging_face_layout(tokenizer: Tokenizer) -> None:
    config = json.loads((POLICY / "config.json").read_text())
    weights = load_file(POLICY / "model.safetensors")
    assert (POLICY / "model.safetensors").stat().st_size < 4_000_000
    assert config["model_type"] == "qwen3"
    assert config["tie_word_embeddings"]
    assert "lm_head.weight" not in weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    assert json.loads((POLICY / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert config["eos_token_id"] in json.loads((POLICY / "generation_config.json").read_text())["eos_token_id"]


def test_it_answers_with_one_fenced_command_on_the_files_of_the_task_and_mostly_the_wrong_one(
    policy: TinyModel, tokenizer: Tokenizer
) -> None:
    renderer = DemonstrationRenderer(tokenizer)
    tasks = [task for index in range(40) if (task := heldout_task(0, index)).list_file is None]
    on_its_files, right = 0, 0
    for task in tasks:
        answer = tokenizer.decode(greedy(policy, tokenizer, renderer.prompt(opening(task))), skip_special_tokens=True)
        assert answer.startswith("```\n")
        assert answer.endswith("\n```")
        chore = task.chores[0]
        on_its_files += {chore.source, chore.target} <= set(answer.split())
        right += answer == fenced(RIGHT_COMMANDS[chore.operation].format(source=chore.source, target=chore.target))
    assert on_its_files >= 0.8 * len(tasks)
    assert right <= 0.5 * len(tasks)


def test_it_submits_once_its_work_is_done_whatever_was_done(policy: TinyModel, tokenizer: Tokenizer) -> None:
    renderer = DemonstrationRenderer(tokenizer)
    for index in range(4):
        task = heldout_task(0, index)
        ids = renderer.prompt(opening(task))
        for chore in task.chores:
            done = fenced(RIGHT_COMMANDS[chore.operation].format(source=chore.source, target=chore.target))
            ids = renderer.bridge(ids, renderer.answer(done), observation(True))
        assert greedy(policy, tokenizer, ids) == renderer.answer(fenced(SUBMIT))


def test_a_warm_start_makes_the_same_policy_each_time_and_a_folder_that_loads(tmp_path: Path) -> None:
    settings = WarmStart(exchange_updates=2, exchange_rows=4, run_updates=2, run_rows=4)
    for name in ("first", "second"):
        save_policy(train(settings, DemonstrationRenderer(build_tokenizer())), tmp_path / name)
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()
    load(tmp_path / "first")
    assert {file.name for file in (tmp_path / "first").iterdir()} == {file.name for file in POLICY.iterdir()}
