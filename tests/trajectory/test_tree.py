"""The trajectory tree by example: the cases C7, C8, C9 and C15 as far as they are the tree's, forks, and bad input."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gyre.errors import BadInput
from gyre.ids import CallId, RunId
from gyre.trajectory.records import LineageRole
from gyre.trajectory.tree import Fork, ForkCause, Tree

MAIN, SUMMARY, SUB, SUB_SUMMARY, AUXILIARY = LineageRole


def new_tree() -> Tree:
    return Tree(RunId("run"), 1)


def add(
    tree: Tree,
    call: str,
    base: str | None,
    suffix: Sequence[int],
    output: Sequence[int],
    *,
    role: LineageRole = MAIN,
    delivered: bool = True,
    version: int = 0,
) -> Fork | None:
    return tree.add_call(
        CallId(call),
        None if base is None else CallId(base),
        suffix,
        output,
        [-0.5] * len(output),
        [version] * len(output),
        role,
        delivered,
    )


def counted_tokens(tree: Tree, j_max: int = 5) -> list[int]:
    return [sum(lineage.counted) for lineage in tree.select(j_max)]


def paths(tree: Tree, j_max: int = 5) -> list[tuple[LineageRole, list[int], list[int]]]:
    """(role, token ids, counted flags) of the selected lineages."""
    selected = [(lineage.role, lineage.arrays()) for lineage in tree.select(j_max)]
    return [(role, list(ids), list(counted)) for role, (ids, counted, _, _) in selected]


# ------------------------------------------------------------------------------------------------ growth


def test_a_thread_of_calls_is_one_lineage_whose_prompts_extend_each_other() -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2, 3], [10, 11])
    add(tree, "b", "a", [4], [12])
    add(tree, "c", "b", [5, 6], [13])
    assert list(tree.prompt_ids(CallId("c"))) == [1, 2, 3, 10, 11, 4, 12, 5, 6]
    assert list(tree.output_ids(CallId("c"))) == [13]
    assert tree.prompt_tokens(CallId("c")) == 9
    assert [(view.leaf, view.calls) for view in tree.lineages()] == [("c", ("a", "b", "c"))]
    assert paths(tree) == [(MAIN, [1, 2, 3, 10, 11, 4, 12, 5, 6, 13], [0, 0, 0, 1, 1, 0, 1, 0, 0, 1])]
    assert tree.tokens == 10
    assert tree.sampled_tokens == 4
    assert not tree.forks
    assert tree.check() == ()


def test_c7_eight_turns_spliced_by_their_recorded_ids_are_one_lineage() -> None:
    """The proxy names the base by the ids it minted, so that what the harness re-serialised never enters."""
    tree = new_tree()
    add(tree, "0", None, [1, 2], [100, 101, 102])
    for turn in range(1, 8):
        add(tree, str(turn), str(turn - 1), [3, turn], [100 + turn, 200 + turn])
    (view,) = tree.lineages()
    assert len(view.calls) == 8
    for earlier, later in zip(view.calls, view.calls[1:], strict=False):
        whole = tree.prompt_ids(earlier) + tree.output_ids(earlier)
        assert tree.prompt_ids(later)[: len(whole)] == whole
    assert counted_tokens(tree) == [3 + 7 * 2]
    assert not tree.forks


def test_c8_a_background_sub_agent_between_the_calls_of_the_main_thread() -> None:
    tree = new_tree()
    add(tree, "A1", None, [1, 2], [10])
    add(tree, "B1", None, [1, 3], [20], role=SUB)
    add(tree, "A2", "A1", [4], [11])
    add(tree, "B2", "B1", [5], [21], role=SUB)
    assert [(view.role, view.calls) for view in tree.lineages()] == [(MAIN, ("A1", "A2")), (SUB, ("B1", "B2"))]
    assert paths(tree) == [(MAIN, [1, 2, 10, 4, 11], [0, 0, 1, 0, 1]), (SUB, [1, 3, 20, 5, 21], [0, 0, 1, 0, 1])]


def test_c9_a_shared_prefix_is_in_the_tree_once_and_its_samples_count_once() -> None:
    tree = new_tree()
    add(tree, "stem", None, [1, 2, 3], [10, 11])
    add(tree, "short", "stem", [], [12])
    add(tree, "long", "stem", [], [13, 14, 15, 16])
    assert sum(counted_tokens(tree)) == 7
    assert tree.tokens == 10
    assert sum(view.tokens for view in tree.lineages()) == 15


def test_c15_turns_kept_behind_a_new_summary_are_context_there() -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2], [10, 11])
    add(tree, "b", "a", [3], [12, 13])
    add(tree, "summarise", "b", [8], [14, 15], role=SUMMARY)
    add(tree, "c", None, [1, 9, 14, 15, 3, 12, 13, 4], [16])  # the last turn (3, 12, 13) verbatim behind the summary
    assert paths(tree) == [
        (MAIN, [1, 9, 14, 15, 3, 12, 13, 4, 16], [0, 0, 0, 0, 0, 0, 0, 0, 1]),
        (SUMMARY, [1, 2, 10, 11, 3, 12, 13, 8, 14, 15], [0, 0, 1, 1, 0, 1, 1, 0, 1, 1]),
    ]


def test_without_a_base_the_longest_prefix_is_found_through_prompts_and_outputs() -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2, 3], [10, 11])
    assert add(tree, "b", None, [1, 2, 3, 10, 11, 4], [12]) is None
    assert tree.tokens == 7
    assert [view.calls for view in tree.lineages()] == [("a", "b")]


def test_a_prompt_goes_through_whichever_of_two_equal_samples_it_matches_further() -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2], [10, 11])
    add(tree, "twin", None, [1, 2], [10, 11])
    add(tree, "b", "a", [3, 4], [12])
    add(tree, "c", None, [1, 2, 10, 11, 3, 4, 12, 5], [13])
    assert [view.calls for view in tree.lineages()] == [("twin",), ("a", "b", "c")]


def test_of_equal_samples_a_prompt_means_the_newest_that_reached_the_harness() -> None:
    tree = new_tree()
    for call, delivered in (("old", True), ("answered", True), ("lost", False)):
        add(tree, call, None, [1, 2], [10, 11], delivered=delivered)
    add(tree, "next", None, [1, 2, 10, 11, 3], [12])
    assert [view.calls for view in tree.lineages()] == [("old",), ("answered", "next")]


def test_equal_samples_stay_two_and_both_count() -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2], [10, 11])
    add(tree, "twin", None, [1, 2], [10, 11])
    assert tree.tokens == 6
    assert counted_tokens(tree) == [2, 2]


# ------------------------------------------------------------------------------------------------ what counts


def test_a_lineage_carries_log_probs_and_versions_where_its_tokens_were_sampled() -> None:
    tree = new_tree()
    tree.add_call(CallId("a"), None, [1, 2], [10, 11], [-0.25, -0.5], [3, 4], MAIN, True)
    (lineage,) = tree.select(5)
    _, counted, logprobs, versions = lineage.arrays()
    assert list(counted) == [0, 0, 1, 1]
    assert list(logprobs) == [0.0, 0.0, -0.25, -0.5]
    assert list(versions) == [-1, -1, 3, 4]
    assert (lineage.run, lineage.attempt, lineage.index) == ("run", 1, 0)
    assert list(tree.output_logprobs(CallId("a"))) == [-0.25, -0.5]
    assert list(tree.output_versions(CallId("a"))) == [3, 4]


def test_an_answer_that_never_reached_the_harness_is_out_of_training() -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2], [10])
    add(tree, "lost", "a", [3], [11, 12], delivered=False)
    assert paths(tree) == [(MAIN, [1, 2, 10], [0, 0, 1])]
    assert tree.sampled_tokens == 1
    assert list(tree.output_ids(CallId("lost"))) == [11, 12]


def test_an_answer_counts_once_it_was_delivered_or_came_back() -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2], [10], delivered=False)
    assert counted_tokens(tree) == []
    tree.deliver(CallId("a"))
    assert counted_tokens(tree) == [1]
    add(tree, "b", "a", [3], [11], delivered=False)
    add(tree, "c", "b", [4], [12])
    assert tree.delivered(CallId("b"))
    assert counted_tokens(tree) == [3]


def test_half_an_answer_that_the_harness_kept_is_context() -> None:
    tree = new_tree()
    add(tree, "cut", None, [1, 2], [10, 11, 12], delivered=False)
    add(tree, "next", None, [1, 2, 10, 11, 3], [13])
    assert paths(tree) == [(MAIN, [1, 2, 10, 11, 3, 13], [0, 0, 0, 0, 0, 1])]
    assert list(tree.output_ids(CallId("cut"))) == [10, 11, 12]
    assert tree.check() == ()


def test_auxiliary_calls_are_never_selected_and_hide_no_thread() -> None:
    tree = new_tree()
    add(tree, "title", None, [7], [70], role=AUXILIARY)
    add(tree, "a", None, [1], [10])
    add(tree, "topic", "a", [8], [71], role=AUXILIARY)
    add(tree, "after-topic", "topic", [9], [72], role=AUXILIARY)
    assert [(view.role, view.leaf) for view in tree.lineages()] == [
        (AUXILIARY, "title"),
        (MAIN, "a"),
        (AUXILIARY, "after-topic"),
    ]
    assert paths(tree) == [(MAIN, [1, 10], [0, 1])]


def test_what_an_auxiliary_call_sampled_inside_a_thread_is_context_of_it() -> None:
    tree = new_tree()
    add(tree, "a", None, [1], [10])
    add(tree, "aside", "a", [2], [70, 71], role=AUXILIARY)
    add(tree, "b", "aside", [3], [11])
    assert paths(tree) == [(MAIN, [1, 10, 2, 70, 71, 3, 11], [0, 1, 0, 0, 0, 0, 1])]


def test_a_call_that_sampled_nothing_ends_no_lineage() -> None:
    tree = new_tree()
    add(tree, "a", None, [1], [10])
    add(tree, "empty", "a", [2], [])
    assert [view.leaf for view in tree.lineages()] == ["a"]
    assert add(tree, "b", "empty", [3], [11]) is None
    assert list(tree.prompt_ids(CallId("b"))) == [1, 10, 2, 3]
    assert tree.check() == ()


def test_a_branch_counts_in_the_preferred_lineage_and_is_context_in_the_others() -> None:
    tree = new_tree()
    add(tree, "a", None, [1], [10, 11])
    add(tree, "sub", "a", [2], [20, 21, 22], role=SUB)
    add(tree, "b", "a", [3], [12])
    assert paths(tree) == [
        (MAIN, [1, 10, 11, 3, 12], [0, 1, 1, 0, 1]),
        (SUB, [1, 10, 11, 2, 20, 21, 22], [0, 0, 0, 0, 1, 1, 1]),
    ]
    assert [sum(lineage.counted) for lineage in tree.select(1)] == [3]


# ------------------------------------------------------------------------------------------------ forks


@pytest.mark.parametrize(
    ("base", "prompt", "cause", "shared", "beside"),
    [
        (None, [9, 9], ForkCause.NEW_PREFIX, 0, "a"),
        (None, [1, 9, 3], ForkCause.REWRITTEN_PROMPT, 1, "a"),
        (None, [1, 2, 3, 10, 99], ForkCause.REWRITTEN_OUTPUT, 4, "a"),
        (None, [1, 2, 3, 99], ForkCause.REWRITTEN_OUTPUT, 3, "a"),
        (None, [1, 2], ForkCause.SHORTENED, 2, "a"),
        (None, [1, 2, 3], ForkCause.RESAMPLED, 3, "a"),
        ("a", [5], ForkCause.SECOND_CONTINUATION, 5, "b"),
        ("a", [4], ForkCause.SHORTENED, 6, "b"),
        ("a", [], ForkCause.SHORTENED, 5, "b"),
        ("a", [4, 7], ForkCause.REWRITTEN_PROMPT, 6, "b"),
    ],
)
def test_a_fork_says_why_where_and_beside_what(
    base: str | None, prompt: list[int], cause: ForkCause, shared: int, beside: str
) -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2, 3], [10, 11])
    add(tree, "b", "a", [4, 4], [12])
    assert add(tree, "c", base, prompt, [13]) == Fork(CallId("c"), cause, shared, CallId(beside))
    assert tree.forks == {cause: 1}
    assert tree.check() == ()


def test_a_branch_inside_an_answer_leaves_the_answer_whole() -> None:
    tree = new_tree()
    add(tree, "a", None, [1], [10, 11, 12, 13])
    add(tree, "b", None, [1, 10, 11, 9], [20])
    add(tree, "c", None, [1, 10, 9], [30])
    assert list(tree.output_ids(CallId("a"))) == [10, 11, 12, 13]
    assert add(tree, "d", "a", [5], [14]) is None
    assert list(tree.prompt_ids(CallId("d"))) == [1, 10, 11, 12, 13, 5]
    assert sum(counted_tokens(tree)) == 4 + 1 + 1 + 1
    assert tree.check() == ()


# ------------------------------------------------------------------------------------------------ bad input, damage


@pytest.mark.parametrize(
    ("call", "base", "suffix", "output", "logprobs", "versions", "message"),
    [
        ("a", None, [1], [2], [-1.0], [0], "call: 'a' is not allowed; the call is in the tree already"),
        ("b", "nobody", [1], [2], [-1.0], [0], "base: 'nobody' is not allowed; it must be a call of this run's tree"),
        ("b", None, [-1], [2], [-1.0], [0], "suffix: -1 is not allowed; a token id is at least 0"),
        ("b", None, [2**31], [2], [-1.0], [0], "suffix: .* is not allowed; token ids are whole numbers below"),
        ("b", None, [1], [2, 3], [-1.0], [0], "output: '2 tokens, 1 log-probs, 1 versions'"),
        ("b", None, [1], [2], [-1.0], [-1], "versions: -1 is not allowed"),
        ("b", None, [1], [2], [float("nan")], [0], "logprobs: nan is not allowed; log-probs are finite"),
        ("b", None, [1], [2], [-1e300], [0], "logprobs: -inf is not allowed"),
    ],
)
def test_a_call_that_cannot_be_is_refused_and_leaves_the_tree_as_it_was(
    call: str,
    base: str | None,
    suffix: list[int],
    output: list[int],
    logprobs: list[float],
    versions: list[int],
    message: str,
) -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2], [10])
    with pytest.raises(BadInput, match=message):
        tree.add_call(
            CallId(call), None if base is None else CallId(base), suffix, output, logprobs, versions, MAIN, True
        )
    assert tree.calls == ("a",)
    assert tree.tokens == 3
    assert tree.check() == ()


def test_asking_for_a_call_that_is_not_there_names_it() -> None:
    with pytest.raises(BadInput, match="call: 'x' is not allowed; it must be a call of this run's tree"):
        new_tree().prompt_ids(CallId("x"))


def test_an_empty_tree_is_sound_and_selects_nothing() -> None:
    tree = new_tree()
    assert tree.check() == ()
    assert tree.select(5) == ()
    assert CallId("a") not in tree


@pytest.mark.parametrize(
    ("place", "faults"),
    [
        (1, {"a: the path to its answer", "a: its path does not end", "b: the path to its answer"}),
        (2, {"a: its path does not end", "b: the path to its answer", "b: its path does not end"}),
        (4, {"b: its path does not end"}),
    ],
)
def test_a_changed_token_is_found(place: int, faults: set[str]) -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2], [10])
    add(tree, "b", "a", [3], [11])
    tree._radix.ids[place] += 1
    found = tree.check()
    assert all(any(line.startswith(f"call {fault}") for line in found) for fault in faults)


def test_a_node_that_lost_its_place_is_found() -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2], [10])
    add(tree, "b", "a", [3], [11])
    tree._radix.depth[2] += 1
    tree._radix.length[4] = 0
    found = tree.check()
    assert any("its depth is not its parent's and its own length" in line for line in found)
    assert any("the nodes hold" in line for line in found)


def test_a_sample_that_lost_its_maker_is_found() -> None:
    tree = new_tree()
    add(tree, "a", None, [1, 2], [10])
    tree._radix.sampled[2] = 0
    assert tree.check() == (
        "tree: 1 log-probs, of which the nodes hold 0",
        "call a: its answer is not in nodes of its own",
    )
