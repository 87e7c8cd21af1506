"""JSON is read and written as the standard library does it, odd values too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gyre.proxy.json_text import clean, exact, load

texts = st.text(alphabet=st.characters(exclude_categories=()), max_size=6)  # halves of surrogate pairs too
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(values)
@example({"a": "\ud83d", "b": 2**64})
@example([2**63, -(2**63) - 1, 2.0**63, 1e300])
def test_what_is_written_is_read_as_the_same_value_of_the_same_types(value: Any) -> None:
    assert repr(load(exact(value))) == repr(value)
    assert repr(load(json.dumps(value).encode())) == repr(value)


@given(values, st.randoms())
def test_equal_values_are_written_equally_with_their_keys_in_order(value: Any, chance: Any) -> None:
    assert exact(shuffled(value, chance), sort_keys=True) == exact(value, sort_keys=True)


@given(values)
def test_for_a_harness_it_is_utf8_whatever_is_in_it(value: Any) -> None:
    json.loads(clean(value).decode("utf-8"))


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", '{"a": -Infinity}', "1e999", "[-1e999]", "", "{", "[1,]", "\x0c1"]
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        load(text.encode())


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_other_encodings_are_read(encoding: str) -> None:
    assert load('{"é": [1]}'.encode(encoding)) == {"é": [1]}


def shuffled(value: Any, chance: Any) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffled(inner, chance)) for key, inner in value.items()]
        chance.shuffle(items)
        return dict(items)
    return [shuffled(inner, chance) for inner in value] if isinstance(value, list) else value
