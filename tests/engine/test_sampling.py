"""Sampling: the distribution, its log-probabilities, and noise that depends on seed and position only."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.engine.local.sampling import Draw, sample

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])


def draw(position: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, seed: int = 5) -> Draw:
    return Draw(temperature, top_p, top_k, seed, before=[0] * position)


def counts(count: int, **options: float) -> list[int]:
    tokens, _ = sample(LOGITS.expand(count, -1), [draw(position, **options) for position in range(count)])  # type: ignore[arg-type]
    return torch.bincount(torch.tensor(tokens), minlength=5).tolist()


def test_tokens_come_as_often_as_their_probability_says() -> None:
    drawn = counts(20_000)
    expected = (torch.softmax(LOGITS, -1) * 20_000).tolist()
    assert all(abs(found - right) < 4 * max(right, 1) ** 0.5 for found, right in zip(drawn, expected, strict=True))
    assert drawn[4] == 0


def test_the_logprob_is_that_of_the_logits_over_the_temperature() -> None:
    tokens, logprobs = sample(LOGITS[None], [draw(0, temperature=0.5)])
    assert abs(logprobs[0] - float(torch.log_softmax(LOGITS / 0.5, -1)[tokens[0]])) < 1e-6


def test_temperature_zero_takes_the_likeliest_and_reports_the_plain_logprob() -> None:
    tokens, logprobs = sample(LOGITS[None], [draw(0, temperature=0.0)])
    assert tokens == [0]
    assert abs(logprobs[0] - float(torch.log_softmax(LOGITS, -1)[0])) < 1e-6


def test_greedy_and_sampled_rows_do_not_disturb_each_other() -> None:
    together, _ = sample(LOGITS.expand(3, -1), [draw(1), draw(2, temperature=0.0), draw(3)])
    alone = [sample(LOGITS[None], [item])[0][0] for item in (draw(1), draw(2, temperature=0.0), draw(3))]
    assert together == alone


def test_top_k_leaves_the_k_likeliest() -> None:
    drawn = counts(2_000, top_k=2)
    assert drawn[2:] == [0, 0, 0]
    assert drawn[1] > 0


def test_top_p_leaves_the_fewest_that_reach_it() -> None:
    # softmax: 0.644, 0.237, 0.087, 0.032
    assert counts(2_000, top_p=0.6)[1:] == [0, 0, 0, 0]
    drawn = counts(2_000, top_p=0.7)
    assert drawn[1] > 0
    assert drawn[2:] == [0, 0, 0]


def test_top_p_and_top_k_do_not_change_the_reported_logprob() -> None:
    tokens, logprobs = sample(LOGITS[None], [draw(0, top_k=1)])
    assert tokens == [0]
    assert abs(logprobs[0] - float(torch.log_softmax(LOGITS, -1)[0])) < 1e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**62), st.integers(0, 10_000))
def test_the_same_seed_and_position_sample_the_same_token(seed: int, position: int) -> None:
    row = draw(position, seed=seed)
    assert sample(LOGITS[None], [row]) == sample(LOGITS[None], [row])


def test_other_positions_and_other_seeds_have_other_noise() -> None:
    flat = torch.zeros(1, 1000)
    drawn = {sample(flat, [draw(position, seed=seed)])[0][0] for position in range(10) for seed in range(10)}
    assert len(drawn) > 80
