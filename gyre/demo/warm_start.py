"""Makes the demo's policy from nothing: `python -m gyre.demo.warm_start --out DIR`.

Builds the tokenizer, renders scripted demonstrations (`demonstrations`), trains a small model on them with one
thread and a fixed seed, and writes a checkpoint folder in the Hugging Face layout. `gyre/demo/policy` holds the
result; nothing else has trained it.

Training has two phases. First single exchanges, in large batches: on these the model learns to copy file names within
about a hundred updates. Then whole runs. A little loss on the prompts helps the copying to form.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from gyre.demo.demonstrations import demonstrate, short_exchange
from gyre.demo.rendering import DemonstrationRenderer, TrainingExample
from gyre.demo.tiny_model import TinyConfig, TinyModel
from gyre.demo.vocabulary import END_OF_TEXT, TURN_END, UNKNOWN, VOCABULARY_TOKENS, build_tokenizer, token_id


@dataclass(frozen=True)
class WarmStart:
    """The settings of a warm start; the defaults made the shipped policy."""

    seed: int = 0
    exchange_updates: int = 150
    exchange_rows: int = 128
    run_updates: int = 850
    run_rows: int = 32
    learning_rate: float = 2e-3
    warm_up_updates: int = 50
    prompt_weight: float = 0.05

    @property
    def updates(self) -> int:
        return self.exchange_updates + self.run_updates


def train(settings: WarmStart, renderer: DemonstrationRenderer) -> TinyModel:
    """Trains a fresh model and returns it; prints the loss on the taught tokens now and then."""
    torch.manual_seed(settings.seed)
    model = TinyModel(TinyConfig(vocabulary_tokens=VOCABULARY_TOKENS))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    recent: list[float] = []
    for update, batch in enumerate(_batches(settings, renderer)):
        rate = settings.learning_rate * min(1.0, (update + 1) / settings.warm_up_updates)
        for group in optimizer.param_groups:
            group["lr"] = rate * (1.0 - 0.97 * update / settings.updates)
        token_ids, taught, present = _padded(batch)
        entropy = functional.cross_entropy(
            model(token_ids[:, :-1]).flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none"
        ).view(len(batch), -1)
        targets, known = taught[:, 1:], present[:, 1:]
        weight = targets + settings.prompt_weight * (known - targets)
        optimizer.zero_grad()
        ((entropy * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(((entropy * targets).sum() / targets.sum()).item())
        if update % 50 == 49 or update == settings.updates - 1:
            print(f"update {update + 1}/{settings.updates}: loss {sum(recent) / len(recent):.3f}", flush=True)
            recent.clear()
    return model


def save_policy(model: TinyModel, folder: Path) -> None:
    """Writes the checkpoint folder: weights, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    turn_end, end_of_text = token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", model.hugging_face_config(turn_end, end_of_text))
    _write_json(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "temperature": 1.0,
            "eos_token_id": [turn_end, end_of_text],
            "pad_token_id": end_of_text,
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.config.context_tokens,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "unk_token": UNKNOWN,
            "clean_up_tokenization_spaces": False,
        },
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gyre.demo.warm_start", description="Make the demo's policy from nothing."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the checkpoint folder to write")
    parser.add_argument("--seed", type=int, default=WarmStart.seed, help="seed of the demonstrations and of the model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    save_policy(train(WarmStart(seed=arguments.seed), DemonstrationRenderer(build_tokenizer())), arguments.out)


def _batches(settings: WarmStart, renderer: DemonstrationRenderer) -> Iterator[list[TrainingExample]]:
    rng = random.Random(f"warm start/{settings.seed}")
    for _ in range(settings.exchange_updates):
        exchanges = (short_exchange(rng) for _ in range(settings.exchange_rows))
        yield [renderer.example(exchange) for exchange in exchanges]
    pool: list[list[TrainingExample]] = []
    for _ in range(settings.run_updates):
        if not pool:
            # Runs of like length go into one batch, so that little of it is padding.
            runs = [renderer.example(demonstrate(rng)) for _ in range(8 * settings.run_rows)]
            runs.sort(key=lambda run: len(run.token_ids))
            pool = [runs[at : at + settings.run_rows] for at in range(0, len(runs), settings.run_rows)]
            rng.shuffle(pool)
        yield pool.pop()


def _padded(batch: list[TrainingExample]) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(len(row.token_ids) for row in batch)
    token_ids = torch.zeros(len(batch), longest, dtype=torch.long)
    taught, present = torch.zeros(len(batch), longest), torch.zeros(len(batch), longest)
    for index, row in enumerate(batch):
        count = len(row.token_ids)
        token_ids[index, :count] = torch.tensor(row.token_ids)
        taught[index, :count] = torch.tensor(row.taught, dtype=torch.float)
        present[index, :count] = 1.0
    return token_ids, taught, present


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
