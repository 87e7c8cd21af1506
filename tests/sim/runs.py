"""What every run of a simulated job does, and what it is worth."""

from __future__ import annotations

import random

from gyre.ids import RunId

CALLS = 2
CALL_TOKENS = 6
"""Tokens of an answer."""
LINEAGE_TOKENS = 40
COUNTED_TOKENS = 10


def reward_of(run: RunId) -> float:
    return float(random.Random(f"reward {run}").random() < 0.5)
