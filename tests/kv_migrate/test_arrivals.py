"""Pages that wait for the request that wants them: bounded, and of versions that are over first to go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre.kv_migrate.arrivals import Arrivals


def pages(*names: int) -> dict[bytes, list[memoryview]]:
    return {bytes([number]): [memoryview(bytes([number]))] for number in names}


def kept(arrivals: Arrivals) -> list[int]:
    return [number for number in range(256) if bytes([number]) in arrivals]


def test_a_page_is_taken_once() -> None:
    arrivals = Arrivals(100)
    arrivals.put(1, 10, pages(1, 2))
    assert arrivals.take(b"\x01") == [b"\x01"]
    assert arrivals.take(b"\x01") is None
    assert (kept(arrivals), arrivals.bytes) == ([2], 10)
    arrivals.take(b"\x02")
    assert arrivals.bytes == 0


def test_a_page_that_is_found_stays_and_is_good_when_it_is_gone_too() -> None:
    arrivals = Arrivals(100)
    arrivals.put(1, 10, pages(1))
    found = arrivals.find([b"\x01", b"\x02"])
    assert kept(arrivals) == [1]
    arrivals.take(b"\x01")
    assert found == [[b"\x01"], None]
    assert arrivals.find([b"\x01"]) == [None]


def test_without_room_versions_that_are_over_go_first_and_then_the_oldest() -> None:
    arrivals = Arrivals(30)
    arrivals.put(2, 10, pages(1))
    arrivals.put(1, 10, pages(2))
    arrivals.put(2, 10, pages(3))
    arrivals.put(2, 10, pages(4))
    assert kept(arrivals) == [1, 3, 4]
    arrivals.put(2, 10, pages(5))
    assert kept(arrivals) == [3, 4, 5]
    arrivals.put(3, 10, pages(6))
    assert kept(arrivals) == [4, 5, 6]
    arrivals.put(3, 10, pages(7))
    arrivals.put(3, 10, pages(8))
    assert kept(arrivals) == [6, 7, 8]


def test_a_late_pull_of_a_version_that_is_over_pushes_nothing_out() -> None:
    arrivals = Arrivals(20)
    arrivals.put(2, 10, pages(1))
    arrivals.put(2, 10, pages(2))
    arrivals.put(1, 10, pages(3))
    assert kept(arrivals) == [1, 2]


def test_a_pull_that_has_no_room_at_all_is_not_kept() -> None:
    arrivals = Arrivals(20)
    arrivals.put(1, 10, pages(1))
    arrivals.put(1, 21, pages(2))
    assert kept(arrivals) == [1]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 3), st.integers(1, 30), st.sets(st.integers(0, 20))),
            st.integers(0, 20),
        )
    )
)
def test_what_is_kept_is_bounded_and_what_is_taken_is_what_was_put(
    steps: list[tuple[int, int, set[int]] | int],
) -> None:
    arrivals = Arrivals(50)
    for step in steps:
        if isinstance(step, int):
            there = step in kept(arrivals)
            assert (arrivals.take(bytes([step])) == [bytes([step])]) == there
        else:
            version, size, names = step
            arrivals.put(version, size, pages(*names))
        assert arrivals.bytes <= 50
        assert bool(kept(arrivals)) == bool(arrivals.bytes)
