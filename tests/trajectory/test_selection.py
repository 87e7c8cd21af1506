"""Which lineages are trained: role, then most sampled tokens, then oldest; at most J_max."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import BadInput
from gyre.ids import CallId, RunId
from gyre.trajectory.records import Lineage, LineageInfo, LineageRole
from gyre.trajectory.selection import LineageView, choose, describe

MAIN, SUMMARY, SUB, SUB_SUMMARY, AUXILIARY = LineageRole


def view(name: str, role: LineageRole, sampled_tokens: int, order: int = 0) -> LineageView:
    call = CallId(name)
    return LineageView(call, order, role, (call,), sampled_tokens + 1, sampled_tokens)


def names(views: tuple[LineageView, ...]) -> list[str]:
    return [view.leaf for view in views]


def test_roles_come_in_their_order_whatever_their_size() -> None:
    views = [view("d", SUB_SUMMARY, 900), view("c", SUB, 90), view("b", SUMMARY, 9), view("a", MAIN, 1)]
    assert names(choose(views, 5)) == ["a", "b", "c", "d"]


def test_within_a_role_most_sampled_tokens_come_first_and_of_equals_the_oldest() -> None:
    views = [view("late", SUB, 5, order=9), view("early", SUB, 5, order=2), view("large", SUB, 6, order=10)]
    assert names(choose(views, 5)) == ["large", "early", "late"]


def test_no_more_than_j_max_are_chosen() -> None:
    views = [view(str(order), SUB, 5, order) for order in range(7)]
    assert names(choose([*views, view("main", MAIN, 1, 8)], 5)) == ["main", "0", "1", "2", "3"]


def test_auxiliary_and_empty_lineages_take_no_place() -> None:
    views = [view("title", AUXILIARY, 50), view("nothing", MAIN, 0), view("sub", SUB, 1)]
    assert names(choose(views, 1)) == ["sub"]


def test_j_max_below_one_is_refused() -> None:
    with pytest.raises(BadInput, match="j_max: 0 is not allowed; at least 1"):
        choose([], 0)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(list(LineageRole)), st.integers(0, 4)), max_size=12),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_the_choice_does_not_depend_on_the_order_of_the_views(
    kinds: list[tuple[LineageRole, int]], j_max: int, order: random.Random
) -> None:
    views = [view(str(place), role, tokens, place) for place, (role, tokens) in enumerate(kinds)]
    chosen = choose(views, j_max)
    order.shuffle(views)
    assert choose(views, j_max) == chosen


def test_a_lineage_is_described_by_its_counted_tokens() -> None:
    lineage = Lineage(
        run=RunId("run"),
        attempt=1,
        index=2,
        role=SUB,
        token_ids=array("i", (5, 6, 7, 8)).tobytes(),
        counted=bytes((0, 0, 1, 1)),
        logprobs=array("f", (0, -1, -1, -1)).tobytes(),
        versions=array("i", (-1, 1, 4, 3)).tobytes(),
    )
    assert describe(lineage) == LineageInfo(index=2, role=SUB, tokens=4, counted_tokens=2, lowest_version=3)
