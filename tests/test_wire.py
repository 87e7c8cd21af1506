"""Records on the wire: what comes back is what went in, and nothing else is taken."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.errors import BadInput
from gyre.wire import pack, pack_any, record, to_plain, unpack, unpack_any


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@record("test_wire.inner")
@dataclass(frozen=True)
class Inner:
    name: str
    weight: float


@record("test_wire.outer")
@dataclass(frozen=True)
class Outer:
    count: int
    flag: bool
    data: bytes
    colour: Colour
    maybe: float | None
    inner: Inner
    many: tuple[Inner, ...]
    by_name: dict[str, int]


inners = st.builds(Inner, st.text(max_size=8), st.floats(allow_nan=False))
outers = st.builds(
    Outer,
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.binary(max_size=32),
    st.sampled_from(Colour),
    st.none() | st.floats(allow_nan=False),
    inners,
    st.lists(inners, max_size=3).map(tuple),
    st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3),
)

GOOD = Outer(1, True, b"x", Colour.BLUE, None, Inner("a", 1.0), (), {})


@given(outers)
def test_a_record_comes_back_as_it_was(value: Outer) -> None:
    assert unpack(pack(value), Outer) == value
    assert unpack_any(pack_any(value)) == value


def test_an_enum_comes_back_as_the_enum_and_not_as_its_text() -> None:
    assert unpack(pack(GOOD), Outer).colour is Colour.BLUE


def test_nothing_is_a_message_too() -> None:
    assert unpack_any(pack_any(None)) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", "1"),
        ("count", 1.0),
        ("count", True),
        ("flag", 1),
        ("data", "x"),
        ("colour", "green"),
        ("inner", {"name": "a"}),
        ("inner", {"name": "a", "weight": 1.0, "extra": 1}),
        ("many", 3),
        ("more", 1),
    ],
)
def test_a_field_of_a_wrong_type_a_missing_key_and_an_unknown_key_are_refused(key: str, value: object) -> None:
    plain = {**to_plain(GOOD), key: value}
    with pytest.raises(BadInput, match="Outer"):
        unpack(msgpack.packb(plain), Outer)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01", pack({"name": "a"})])
def test_what_is_not_a_record_is_refused(data: bytes) -> None:
    with pytest.raises(BadInput):
        unpack(data, Inner)
    with pytest.raises(BadInput):
        unpack_any(data)


def test_an_undeclared_name_is_refused() -> None:
    with pytest.raises(BadInput, match="declared"):
        unpack_any(msgpack.packb(["os.system", {"command": "true"}]))


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="taken"):
        record("test_wire.inner")(Outer)
