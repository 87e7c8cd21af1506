"""The text of a prompt's ids is that of its ids, whatever it was put together from."""

from __future__ import annotations

import json
from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gyre.engine.records import GenerateRequest, IdText
from gyre.ids import CallId, RunId
from gyre.proxy.id_texts import IdTexts
from gyre.trajectory.records import LineageRole
from gyre.trajectory.tree import Tree

ids = st.lists(st.integers(0, 200_000), max_size=6).map(lambda values: array("i", values))
calls = st.lists(st.tuples(st.integers(-1, 20), ids, ids), min_size=1, max_size=20)


def ids_of(text: IdText) -> list[int]:
    return json.loads(b"".join(GenerateRequest("r", text, 1).body(stream=True)))["input_ids"]


@given(calls, st.integers(0, 20))
def test_the_text_of_a_prompt_is_its_bases_and_its_own(
    given_calls: list[tuple[int, array[int], array[int]]], death: int
) -> None:
    tree = Tree(RunId("r"), 1)
    texts = IdTexts(tree)
    for number, (base, suffix, output) in enumerate(given_calls):
        if number == death:
            texts = IdTexts(tree)  # the gateway's next life has the tree, and no texts
        before = CallId(str(base)) if 0 <= base < number else None
        suffix = suffix or array("i", [number])
        call = CallId(str(number))
        text = texts.prompt(before, suffix)
        tree.add_call(
            call, before, suffix, output, [-0.5] * len(output), [0] * len(output), LineageRole.MAIN, delivered=True
        )
        texts.ended(call, before, text, output)
        assert ids_of(text) == list(tree.prompt_ids(call))


@given(st.lists(st.lists(st.integers(0, 200_000), max_size=40), max_size=60))
def test_a_text_has_few_pieces_each_at_most_half_of_the_one_before(added: list[list[int]]) -> None:
    text = IdText()
    for some in added:
        text = text.grown(some)
    assert ids_of(text) == [token for some in added for token in some]
    lengths = [len(piece) for piece in text.pieces]
    assert all(before >= 2 * behind for before, behind in pairwise(lengths))
