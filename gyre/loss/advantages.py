"""Advantages within one group (DESIGN §7): each scored run's reward against the mean of the group's rewards.

A run has one reward, however many lineages it left. Runs without a reward (their evaluator or the infrastructure
failed) are not given to this function at all. Groups never see each other's rewards: a call is about one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt
from typing import Literal

_EQUAL = 1e-9
"""Rewards closer than this, relative to the largest, are one reward: rounding is no signal."""


def group_advantages(
    rewards: Sequence[float], kind: Literal["std", "mean"] = "std", scale: float = 1.0
) -> tuple[float, ...]:
    """The advantage of each scored run of one group, from their rewards.

    `std` divides the distance to the mean by the population standard deviation, `mean` by nothing; both are
    multiplied by `scale`. Fewer than two rewards, or equal ones, give advantages of 0: such a group trains nothing.
    """
    if len(rewards) < 2 or max(rewards) - min(rewards) <= _EQUAL * max(map(abs, rewards)):
        return (0.0,) * len(rewards)
    mean = fsum(rewards) / len(rewards)
    distances = [reward - mean for reward in rewards]
    spread = sqrt(fsum(distance**2 for distance in distances) / len(rewards)) if kind == "std" else 1.0
    return tuple(distance / spread * scale for distance in distances)
