"""Weights within a run and a batch: the cases C3 and C4 for numbers; test_objectives has them for gradients."""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import fsum
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import BadInput
from gyre.loss.weights import batch_weight, run_weight

RUNS = st.lists(st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=20), min_size=1, max_size=6)


class LossPart(NamedTuple):
    """Token losses of some of a run's counted tokens, summed: what one micro-batch knows of the run."""

    loss_sum: float
    run_counted_tokens: int


def batch_loss(parts: Iterable[LossPart], scored_runs: int) -> float:
    return fsum(part.loss_sum * run_weight(part.run_counted_tokens) for part in parts) * batch_weight(scored_runs)


def test_c3_a_run_weighs_the_same_however_many_lineages_and_tokens_it_has() -> None:
    one_lineage = [LossPart(loss_sum=4 * 1.0, run_counted_tokens=4)]
    three_lineages = [LossPart(loss_sum=2 * 2.0, run_counted_tokens=6)] * 3
    assert batch_loss([*one_lineage, *three_lineages], scored_runs=2) == 1.5


def test_c4_two_micro_batches_of_unequal_size_are_one_mean() -> None:
    parts = [LossPart(loss_sum=6.0, run_counted_tokens=8), LossPart(loss_sum=6.0, run_counted_tokens=8)]
    assert batch_loss(parts, scored_runs=1) == 1.5


@settings(deadline=None)
@given(RUNS, st.randoms(use_true_random=False))
def test_c4_every_split_and_order_gives_the_same_loss(runs: list[list[float]], order: random.Random) -> None:
    whole = [LossPart(sum(losses), len(losses)) for losses in runs]
    split: list[LossPart] = []
    for losses in runs:
        cuts = sorted(order.sample(range(len(losses) + 1), k=order.randint(0, len(losses))))
        edges = zip([0, *cuts], [*cuts, len(losses)], strict=True)
        split += [LossPart(sum(losses[start:stop]), len(losses)) for start, stop in edges]
    order.shuffle(split)
    assert batch_loss(split, len(runs)) == pytest.approx(batch_loss(whole, len(runs)), abs=1e-12)


def test_a_scored_run_that_trains_nothing_still_counts() -> None:
    assert batch_loss([LossPart(4.0, 4)], scored_runs=2) == 0.5


@pytest.mark.parametrize("tokens", [0, -3])
def test_a_run_without_counted_tokens_has_no_weight(tokens: int) -> None:
    with pytest.raises(BadInput, match=f"run_counted_tokens: {tokens} is not allowed; at least 1"):
        run_weight(tokens)


def test_a_batch_without_scored_runs_makes_no_step() -> None:
    with pytest.raises(BadInput, match="scored_runs: 0 is not allowed; at least 1"):
        batch_weight(0)
