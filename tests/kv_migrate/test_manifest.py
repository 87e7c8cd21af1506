"""The manifest on its way through the control plane."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.errors import BadInput
from gyre.kv_migrate.manifest import Manifest
from gyre.wire import pack, unpack

MANIFESTS = st.builds(
    Manifest,
    transfer=st.text(max_size=20),
    epoch=st.integers(0, 2**60),
    model=st.text(max_size=20),
    version=st.integers(0, 2**40),
    layout=st.text(max_size=20),
    blocks=st.lists(st.binary(max_size=16), max_size=10).map(tuple),
)


@given(MANIFESTS)
def test_it_comes_through_json_and_through_msgpack_as_it_was(manifest: Manifest) -> None:
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert unpack(pack(manifest), Manifest) == manifest


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1"},
        {"epoch": 1.5},
        {"blocks": "ab"},
        {"blocks": ["xyz"]},
        {"blocks": [7]},
        {"blocks": None},
        {"model": None},
        {"more": 1},
        {"version": 2**70},
    ],
)
def test_one_of_another_shape_is_refused(change: dict[str, object]) -> None:
    body = Manifest("t", 1, "m", 2, "l", (b"ab",)).to_json()
    with pytest.raises(BadInput):
        Manifest.from_json({**body, **change})
    for key in body:
        with pytest.raises(BadInput):
            Manifest.from_json({name: value for name, value in body.items() if name != key})
