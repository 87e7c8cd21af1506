"""The text of a prompt's ids is that of its ids, whatever it was put together from."""

from __future__ import annotations

import json
from array import array

from hypothesis import given
from hypothesis import strategies as st

from gyre.ids import CallId, RunId
from gyre.proxy.id_texts import IdTexts
from gyre.trajectory.records import LineageRole
from gyre.trajectory.tree import Tree

ids = st.lists(st.integers(0, 200_000), max_size=6).map(lambda values: array("i", values))
calls = st.lists(st.tuples(st.integers(-1, 20), ids, ids), min_size=1, max_size=20)


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
        text = texts.prompt(call, before, suffix)
        tree.add_call(
            call, before, suffix, output, [-0.5] * len(output), [0] * len(output), LineageRole.MAIN, delivered=True
        )
        texts.ended(call, output)
        assert json.loads(b"[%b]" % text) == list(tree.prompt_ids(call))
