"""Which chunk is asked of whom: everything is asked for once, and the one who has all is asked for about one copy."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.kv_migrate.chunks import FAILED_CHUNKS, WINDOW, Ask, Chunks, all_of

COUNT = st.integers(1, 40)
NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True)


def asks(chunks: Chunks) -> list[Ask]:
    """All that is asked now."""
    found: list[Ask] = []
    while (ask := chunks.next()) is not None:
        found.append(ask)
    return found


def test_of_several_that_have_all_each_is_asked_for_different_chunks() -> None:
    chunks = Chunks("me", 10, 0, ["a", "b"])
    chunks.holds("a", None)
    chunks.holds("b", None)
    found = asks(chunks)
    assert len(found) == 2 * WINDOW
    assert {ask.source for ask in found} == {"a", "b"}
    assert len({ask.chunk for ask in found}) == len(found)


def test_who_gathers_too_has_a_share_of_its_own_and_gives_it_on() -> None:
    chunks = Chunks("b", 6, 0, ["core", "c"])
    chunks.holds("core", None)
    assert [ask.chunk for ask in asks(chunks)] == [0, 2], "c has 1, 3 and 5 from the core"
    chunks.holds("c", 0b000010)
    assert asks(chunks) == [Ask("c", 1)]
    for ask in (Ask("core", 0), Ask("core", 2), Ask("c", 1)):
        chunks.arrived(ask)
    assert asks(chunks) == [Ask("core", 4)]


def test_a_gatherer_that_brings_nothing_is_not_waited_for_longer_than_patience_lasts() -> None:
    chunks = Chunks("b", 4, 0b1001, ["core", "c", "d"])
    chunks.holds("core", None)
    assert asks(chunks) == []
    chunks.patience_ended()
    assert asks(chunks) == [Ask("core", 1), Ask("core", 2)]


def test_a_gatherer_that_comes_by_something_after_all_is_counted_on_again() -> None:
    chunks = Chunks("b", 20, 0, ["core", "c"])
    chunks.holds("core", None)
    chunks.patience_ended()
    assert [ask.chunk for ask in asks(chunks)] == [0, 1], "all is my share"
    chunks.holds("c", 0b10)
    for chunk in (0, 1):
        chunks.arrived(Ask("core", chunk))
    assert [ask.chunk for ask in asks(chunks)] == [2, 4]


def test_a_gatherer_that_is_only_slow_is_not_counted_on_at_last() -> None:
    chunks = Chunks("b", 40, sum(1 << chunk for chunk in range(0, 40, 2)), ["core", "c"])
    chunks.holds("core", None)
    chunks.holds("c", 0b1)  # which is here
    assert asks(chunks) == []
    chunks.patience_ended()
    assert [ask.source for ask in asks(chunks)] == ["core", "core"]


def test_what_was_asked_of_one_who_is_lost_is_asked_of_others() -> None:
    chunks = Chunks("me", 2, 0, ["a", "b"])
    for name in ("a", "b"):
        chunks.holds(name, None)
    asked = {ask.source: ask.chunk for ask in asks(chunks)}
    chunks.gone("a", "it is gone")
    chunks.patience_ended()
    assert asks(chunks) == [Ask("b", asked["a"])]
    assert chunks.reason("a") == "it is gone"


def test_a_wrong_chunk_is_asked_of_another_and_a_source_of_many_no_more() -> None:
    chunks = Chunks("me", FAILED_CHUNKS, 0, ["a"])
    chunks.holds("a", None)
    for failed in range(FAILED_CHUNKS):
        assert chunks.can_go_on
        ask = chunks.next()
        assert ask == Ask("a", failed)
        chunks.failed(ask, "it is wrong")
    assert not chunks.can_go_on
    assert chunks.next() is None
    assert chunks.reason("a") == "it is wrong"
    chunks.holds("a", None)
    assert chunks.next() is None


@settings(deadline=None)
@given(st.data(), COUNT, NAMES)
def test_nothing_is_asked_twice_at_a_time_nor_of_who_does_not_hold_it(
    data: st.DataObject, count: int, names: list[str]
) -> None:
    """Whatever is told, in any order."""
    chunks = Chunks("me", count, data.draw(st.integers(0, all_of(count))), names)
    held: dict[str, int] = dict.fromkeys(names, 0)
    flying: list[Ask] = []
    failed: set[Ask] = set()
    lost: set[str] = set()
    for _ in range(60):
        name = data.draw(st.sampled_from(names))
        match data.draw(st.sampled_from(["holds", "whole", "ask", "ask", "arrived", "failed", "gone", "patience"])):
            case "holds":
                held[name] = data.draw(st.integers(0, all_of(count)))
                chunks.holds(name, held[name])
            case "whole":
                held[name] = all_of(count)
                chunks.holds(name, None)
            case "ask" if (ask := chunks.next()) is not None:
                assert held[ask.source] >> ask.chunk & 1
                assert ask.source not in lost
                assert ask not in failed
                assert ask.chunk not in [other.chunk for other in flying]
                flying.append(ask)
                assert sum(other.source == ask.source for other in flying) <= WINDOW
            case "arrived" | "failed" as what if flying:
                ask = flying.pop(0)
                if what == "arrived":
                    chunks.arrived(ask)
                else:
                    failed.add(ask)
                    chunks.failed(ask, "wrong")
                    if sum(other.source == ask.source for other in failed) >= FAILED_CHUNKS:
                        lost.add(ask.source)
                        flying = [other for other in flying if other.source != ask.source]
            case "gone":
                held[name] = 0
                flying = [ask for ask in flying if ask.source != name]
                chunks.gone(name, "it is gone")
            case _:
                chunks.patience_ended()
        assert chunks.in_flight == len(flying)


@settings(deadline=None, max_examples=40)
@given(st.data(), COUNT, NAMES)
def test_it_is_done_in_the_end_whenever_one_that_has_all_stays(
    data: st.DataObject, count: int, names: list[str]
) -> None:
    """The others hold anything, send wrong chunks and go."""
    chunks = Chunks("me", count, 0, [*names, "core"])
    chunks.holds("core", None)
    came = 0
    for _ in range(20 * count + 200):
        if chunks.done:
            break
        name = data.draw(st.sampled_from(names))
        if data.draw(st.integers(0, 9)) == 0:
            chunks.gone(name, "it is gone")
        else:
            chunks.holds(name, data.draw(st.none() | st.integers(0, all_of(count))))
        if (ask := chunks.next()) is None:
            chunks.patience_ended()
        elif ask.source != "core" and data.draw(st.booleans()):
            chunks.failed(ask, "wrong")
        else:
            came += 1
            chunks.arrived(ask)
    assert chunks.done
    assert came == count
    assert not chunks.can_go_on


@pytest.mark.parametrize("gatherers", [1, 3, 8, 100])
def test_who_has_all_sends_about_one_copy_however_many_gather(gatherers: int) -> None:
    """Each link takes one chunk a round; who gathers hears of what others hold with each chunk, and now and then."""
    count, dice = 128, random.Random(gatherers)
    names = [f"n{number}" for number in range(gatherers)]
    have = dict.fromkeys(names, 0)
    nodes = {name: Chunks(name, count, 0, ["core", *(other for other in names if other != name)]) for name in names}
    for node in nodes.values():
        node.holds("core", None)
    sent = rounds = 0
    while not all(node.done for node in nodes.values()):
        rounds += 1
        assert rounds < 20 * count
        for name in dice.sample(names, len(names)):
            node = nodes[name]
            for other in dice.sample(names, min(len(names), 5)):
                if other != name:
                    node.holds(other, have[other])
            ask = node.next()
            if ask is None:
                continue
            sent += ask.source == "core"
            node.arrived(ask)
            have[name] |= 1 << ask.chunk
    assert count <= sent <= count * 1.1
