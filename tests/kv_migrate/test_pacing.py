"""How quickly an engine fetches what no request waits for: never more than the rate, never held up without need."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.kv_migrate.pacing import ASIDE_S, BURST_S, Budget, Pacer

RATE = 1000.0
counts = st.integers(1, 5000)
takes = st.lists(st.tuples(st.floats(0, 3), counts), min_size=1, max_size=40)
"""Seconds after the one before, and how much."""


def taken(budget: Budget, count: int, now_s: float) -> float:
    """Try until there is enough; when that was."""
    while wait_s := budget.take(count, RATE, now_s):
        now_s += wait_s
    return now_s


def play(budget: Budget, steps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    given: list[tuple[float, int]] = []
    now_s = 0.0
    for after_s, count in steps:
        now_s = taken(budget, count, now_s + after_s)
        given.append((now_s, count))
    return given


@given(takes, st.integers(0, 39), st.integers(0, 39))
def test_in_no_stretch_of_time_more_is_given_than_its_worth(steps: list[tuple[float, int]], one: int, two: int) -> None:
    given = play(Budget(), steps)
    first, last = sorted((one % len(given), two % len(given)))
    *before, (end_s, _) = given[first : last + 1]
    worth = RATE * (end_s - given[first][0] + BURST_S)
    assert sum(count for _, count in before) <= worth + 1e-6, "and the last, which is paid for after it"


@given(takes)
def test_whoever_takes_as_soon_as_may_be_has_the_whole_rate(steps: list[tuple[float, int]]) -> None:
    given = play(Budget(), [(0.0, count) for _, count in steps])
    assert given[-1][0] <= sum(count for _, count in given[:-1]) / RATE + 1e-6


@given(takes, st.floats(0, 100))
def test_little_is_given_at_once_after_a_pause_and_no_pause_is_worth_more_than_the_burst(
    steps: list[tuple[float, int]], pause_s: float
) -> None:
    budget = Budget()
    *_, (end_s, count) = play(budget, steps)
    now_s = end_s + count / RATE + BURST_S + pause_s
    burst = int(RATE * BURST_S)
    assert [taken(budget, each, now_s) for each in (burst // 2, burst // 2, burst)] == pytest.approx([now_s] * 3)
    assert taken(budget, 1, now_s) == pytest.approx(now_s + BURST_S)


@given(takes, st.integers(0, 40))
def test_what_is_overtaken_stands_aside_for_a_moment_and_then_has_its_rate(
    steps: list[tuple[float, int]], place: int
) -> None:
    budget = Budget()
    given = play(budget, steps[:place])
    now_s, owed_s = (given[-1][0], given[-1][1] / RATE) if given else (0.0, 0.0)
    budget.overtake(now_s)
    assert budget.take(100, RATE, now_s) >= ASIDE_S - 1e-9
    assert taken(budget, 100, now_s) <= now_s + max(owed_s, ASIDE_S) + 1e-6, "and not for longer"


async def test_who_has_no_rate_never_waits_and_whoever_was_cancelled_holds_nobody_up() -> None:
    pacer = Pacer()
    await pacer.turn(0.0)(1 << 40)
    waiting = [asyncio.ensure_future(pacer.turn(1e6)(1000)) for _ in range(5)]
    await pacer.turn(0.0)(1 << 40)
    await asyncio.sleep(0)
    assert not any(turn.done() for turn in waiting)
    for turn in waiting[:4]:
        turn.cancel()
    await waiting[4]
    assert [turn.cancelled() for turn in waiting] == [True] * 4 + [False]
