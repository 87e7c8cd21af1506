"""How much of a snapshot changes from version to version: `bench/delta_sizes.py [--lr LR] [--eps EPS] [OLD NEW]`, two .safetensors files.

Without files it takes the demo's policy and eight steps of its own, with the optimizer of the quickstart: 64 runs each, every run's
advantage by chance. A delta is the bitwise difference of two versions, the first bytes of all numbers together, then the
second ones, and so on (most first bytes do not change, and lie side by side so), by zlib at its quickest. Beside it:
the new version alone, laid out and packed alike, which needs no older one.
"""

from __future__ import annotations

import argparse
import random
import tomllib
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from gyre.demo.demonstrations import demonstrate
from gyre.demo.rendering import DemonstrationRenderer
from gyre.demo.tiny_model import TinyConfig, TinyModel
from gyre.demo.vocabulary import VOCABULARY_TOKENS, build_tokenizer

DEMO = Path(__file__).parents[1] / "gyre" / "demo"
STEPS = 8
RUNS = 64
MICRO_RUNS = 16

Weights = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(prog="delta_sizes", description="How much of a snapshot changes.")
    parser.add_argument("files", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--lr", type=float, help="instead of the quickstart's")
    parser.add_argument("--eps", type=float, help="the same")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.files:
        old, new = map(load_file, options.files)
        tell("from one to the other", old, new)
        return
    versions = trained(options.lr, options.eps)
    tell("the first step", versions[0], versions[1])
    tell("the eighth", versions[-2], versions[-1])
    tell("eight steps", versions[0], versions[-1])


def tell(what: str, old: Weights, new: Weights) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        before, after = (flat(weights, dtype) for weights in (old, new))
        difference = before ^ after
        numbers = (difference != 0).any(1).float().mean().item()
        size = difference.numel()
        print(
            f"{what}, {str(dtype).removeprefix('torch.')}: {numbers:.1%} of the numbers change, "
            f"{(difference != 0).float().mean().item():.1%} of the bytes; the delta is {packed(difference) / size:.1%} "
            f"of the snapshot, the snapshot alone packs to {packed(after) / size:.1%}"
        )


def flat(weights: Weights, dtype: torch.dtype) -> Tensor:
    """One row of bytes a number."""
    numbers = torch.cat([weights[name].flatten().to(dtype) for name in sorted(weights)])
    return numbers.view(torch.uint8).view(len(numbers), -1)


def packed(rows: Tensor) -> int:
    return len(zlib.compress(rows.T.contiguous().numpy().tobytes(), 1))


def trained(lr: float | None, eps: float | None) -> list[Weights]:
    """The shipped policy, and what it is after each step."""
    settings = tomllib.loads((DEMO / "quickstart.toml").read_text(encoding="utf-8"))["optimizer"]
    rate: float = lr or settings["lr"]
    torch.manual_seed(1)
    rng = random.Random(1)
    renderer = DemonstrationRenderer(build_tokenizer())
    model = TinyModel(TinyConfig(vocabulary_tokens=VOCABULARY_TOKENS))
    model.load_state_dict(load_file(str(DEMO / "policy" / "model.safetensors")))
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=tuple(settings["betas"]), eps=eps or settings["eps"], weight_decay=0.0
    )
    versions = [copy(model)]
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / settings["warmup_steps"])
        optimizer.zero_grad()
        for _ in range(RUNS // MICRO_RUNS):
            examples = [renderer.example(demonstrate(rng)) for _ in range(MICRO_RUNS)]
            loss = sum(
                (log_prob(model, example.token_ids, example.taught) * rng.gauss(0.0, 0.4) for example in examples),
                torch.zeros(()),
            )
            (loss / RUNS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad"])
        optimizer.step()
        versions.append(copy(model))
    return versions


def log_prob(model: TinyModel, token_ids: Sequence[int], taught: Sequence[bool]) -> Tensor:
    """The mean of a run's own tokens."""
    ids = torch.tensor(token_ids)
    entropy = functional.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
    own = torch.tensor(taught[1:], dtype=torch.float)
    return -(entropy * own).sum() / own.sum()


def copy(model: TinyModel) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    main()
