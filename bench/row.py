"""One figure of a benchmark, and what it is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    name: str
    value: float
    unit: str
    goal: str
    """What the value should be, for people: "<= 2"."""
    holds: bool
