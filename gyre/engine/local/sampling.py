"""From logits to a token and its log-probability, for a batch.

The log-probability is that of the softmax of logits / temperature, before top-p and top-k: at temperature 1 it is the
model's own. Noise is a function of (seed, position) alone, so a request that is continued on another engine with its
seed samples what it would have sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """How one row is sampled. `before` are all tokens before the new one."""

    temperature: float
    top_p: float
    top_k: int
    """-1: all tokens."""
    seed: int
    before: Sequence[int]

    @property
    def position(self) -> int:
        """The place of the new token in the whole sequence."""
        return len(self.before)


Sampler = Callable[[Tensor, Sequence[Draw]], tuple[list[int], list[float]]]
"""The token of each row of logits and its log-probability: `sample`, or what stands in for the model's own choice."""


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """The token of each row and its log-probability."""
    scale = torch.tensor([draw.temperature or 1.0 for draw in draws])
    logprobs = torch.log_softmax(logits / scale[:, None], dim=-1)
    if all(draw.temperature == 0 for draw in draws):
        tokens = logprobs.argmax(dim=-1)
    else:
        probabilities = logprobs.exp().double()
        for row, draw in enumerate(draws):
            if draw.temperature == 0:
                probabilities[row] = torch.nn.functional.one_hot(logprobs[row].argmax(), logits.shape[-1])
            elif draw.top_p < 1 or 0 < draw.top_k < logits.shape[-1]:
                _cut(probabilities[row], draw)
        # Inverse of the cumulative distribution: `right` never lands on a token of probability 0.
        cumulative = probabilities.cumsum(dim=-1)
        total = cumulative[:, -1]
        noise = torch.tensor([_uniform(draw.seed, draw.position) for draw in draws], dtype=torch.float64)
        point = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, point[:, None], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def _cut(probabilities: Tensor, draw: Draw) -> None:
    """Zero what top-k and top-p leave out; the token that crosses top-p stays in."""
    ordered, order = probabilities.sort(descending=True)
    outside = ordered.cumsum(0) - ordered >= draw.top_p
    if draw.top_k > 0:
        outside[draw.top_k :] = True
    outside[0] = False
    probabilities[order[outside]] = 0.0


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    word = int.from_bytes(sha256(f"{seed}:{position}".encode()).digest()[:8], "little")
    return (word >> 11) * 2.0**-53
