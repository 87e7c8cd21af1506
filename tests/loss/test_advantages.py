"""Advantages within a group: the cases C1, C2, C5, C6, and what holds for any rewards."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.loss.advantages import group_advantages

REWARDS = st.lists(st.floats(-10, 10).map(lambda value: round(value, 4)), min_size=2, max_size=16)


def test_c1_a_run_counts_once_however_many_lineages_it_left() -> None:
    lineages = {"a": 3, "b": 1}
    rewards = {"a": 1.0, "b": 0.0}
    assert group_advantages([rewards[run] for run in lineages], "std") == (1.0, -1.0)
    assert group_advantages([rewards[run] for run in lineages], "mean") == (0.5, -0.5)


def test_c2_baselines_never_cross_groups() -> None:
    batch = [[1.0, 3.0], [5.0]]
    assert [group_advantages(rewards, "mean") for rewards in batch] == [(-1.0, 1.0), (0.0,)]


def test_c5_a_run_whose_evaluator_crashed_is_in_no_baseline() -> None:
    finished, timed_out, crashed = 1.0, 0.4, None
    scored = [reward for reward in (finished, timed_out, crashed) if reward is not None]
    assert group_advantages(scored, "mean") == pytest.approx((0.3, -0.3))


def test_c5_a_group_left_with_one_scored_run_trains_nothing() -> None:
    assert group_advantages([0.4], "std") == (0.0,)
    assert group_advantages([], "std") == ()


def test_c6_runs_of_one_task_are_one_group_in_whatever_requests_they_arrive() -> None:
    arrivals = [("task", 1.0), ("task", 0.0), ("task", 1.0), ("task", 0.0)]
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for task, reward in arrivals:
        groups[task].append(reward)
    assert [group_advantages(rewards, "mean") for rewards in groups.values()] == [(0.5, -0.5, 0.5, -0.5)]


def test_the_scale_multiplies_the_advantage() -> None:
    assert group_advantages([1.0, 0.0], "std", 0.25) == (0.25, -0.25)
    assert group_advantages([1.0, 0.0], "mean", 3.0) == (1.5, -1.5)


def test_equal_rewards_have_no_advantage_even_when_rounding_parts_them() -> None:
    assert group_advantages([0.1 + 0.2, 0.3, 0.3], "std") == (0.0, 0.0, 0.0)
    assert group_advantages([0.0, 0.0], "std") == (0.0, 0.0)


@settings(deadline=None)
@given(REWARDS)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    for kind in ("std", "mean"):
        advantages = group_advantages(rewards, kind)
        assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
        ranked = sorted(zip(rewards, advantages, strict=True))
        assert [advantage for _, advantage in ranked] == sorted(advantages)


@settings(deadline=None)
@given(REWARDS, st.floats(0.1, 10), st.floats(-5, 5))
def test_std_advantages_do_not_depend_on_the_scale_or_the_zero_of_rewards(
    rewards: list[float], factor: float, shift: float
) -> None:
    other = [reward * factor + shift for reward in rewards]
    assert group_advantages(other, "std") == pytest.approx(group_advantages(rewards, "std"), abs=1e-5)


@settings(deadline=None)
@given(REWARDS)
def test_std_advantages_have_population_deviation_one(rewards: list[float]) -> None:
    advantages = group_advantages(rewards, "std")
    expected = 0.0 if len(set(rewards)) == 1 else float(len(rewards))
    assert sum(advantage**2 for advantage in advantages) == pytest.approx(expected, abs=1e-6)
