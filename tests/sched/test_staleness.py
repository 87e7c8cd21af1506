"""How far launches may run ahead, and what is too old to train on (case C11)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre.sched.staleness import capacity, lag, withheld

COUNT = st.integers(0, 10_000)
BATCH = st.integers(1, 64)
BOUND = st.integers(0, 8)


def test_c11_restarted_at_version_10_with_40_consumed() -> None:
    assert capacity(launched=40, consumed=40, batch_groups=4, staleness=1) == 8
    # Even if the restart had lost what was launched before it:
    assert capacity(launched=0, consumed=40, batch_groups=4, staleness=1) == 8


def test_c11_no_launch_beyond_the_bound() -> None:
    assert [capacity(launched, 40, 4, 1) for launched in (41, 44, 47, 48, 60)] == [7, 4, 1, 0, 0]


def test_a_bound_of_0_launches_one_batch_at_a_time() -> None:
    assert [capacity(launched, 8, 8, 0) for launched in (8, 12, 16)] == [8, 4, 0]


@given(COUNT, COUNT, BATCH, BOUND)
def test_capacity_keeps_the_bound_and_never_starves_a_batch(
    launched: int, consumed: int, batch: int, staleness: int
) -> None:
    free = capacity(launched, consumed, batch, staleness)
    assert 0 <= free <= (staleness + 1) * batch
    outstanding = launched - consumed
    if outstanding >= 0:
        assert free == 0 or outstanding + free == (staleness + 1) * batch
    if outstanding < batch:
        assert free > 0


@given(COUNT, BATCH, BOUND)
def test_a_restart_changes_nothing(step: int, batch: int, staleness: int) -> None:
    assert capacity(step * batch, step * batch, batch, staleness) == capacity(0, 0, batch, staleness)


def test_lag_is_counted_from_the_lowest_version_that_sampled() -> None:
    assert (lag(10, 10), lag(10, 7), lag(10, -1), lag(3, 4)) == (0, 3, 0, 0)


def test_tokens_over_the_bound_are_withheld_and_those_at_it_are_not() -> None:
    assert [withheld(10, version, 1) for version in (10, 9, 8, -1)] == [False, False, True, False]
    assert [withheld(10, version, 0) for version in (10, 9)] == [False, True]
