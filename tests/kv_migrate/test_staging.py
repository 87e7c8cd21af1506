"""Staging memory: used again, never shared by two, and given back to the system when it is no longer needed."""

from __future__ import annotations

import os
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.kv_migrate.staging import Staging, StagingPool

MIB = 1 << 20


def test_its_memory_outlives_it_as_long_as_somebody_has_a_view() -> None:
    staging = Staging(10)
    descriptor, gone = staging.fd, weakref.ref(staging)
    view = staging.view[:10]
    del staging
    assert gone() is None
    view[:] = b"0123456789"
    assert bytes(view) == b"0123456789"
    try:
        still_open = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        still_open = ""
    assert "gyre-staging" not in still_open


def test_what_was_given_back_is_taken_again_the_smallest_that_fits() -> None:
    pool = StagingPool(keep_bytes=100 * MIB)
    small, large = pool.take(MIB), pool.take(8 * MIB)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(MIB // 2) is small
    assert pool.take(MIB // 2) is large
    assert pool.take(MIB // 2) not in (small, large)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5 * MIB), st.booleans()), max_size=30))
def test_no_two_have_the_same_and_no_more_is_kept_idle_than_allowed(steps: list[tuple[int, bool]]) -> None:
    pool = StagingPool(keep_bytes=6 * MIB)
    taken: list[Staging] = []
    for size, back in steps:
        if back and taken:
            pool.give_back(taken.pop())
        else:
            staging = pool.take(size)
            assert len(staging.view) >= size
            assert all(staging is not other for other in taken)
            taken.append(staging)
        assert sum(idle.size for idle in pool._idle) <= 6 * MIB
