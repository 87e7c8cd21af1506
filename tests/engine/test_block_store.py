"""What peers may do with an engine's blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.engine.local.block_store import BlockStore
from gyre.engine.local.shape import read_shape
from gyre.errors import Refused
from gyre.kv_migrate.manifest import Manifest

from .tiny_models import make_model

BLOCKS = 4


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(read_shape(make_model(tmp_path / "m")), "these", 1, BLOCKS, 16, torch.float32)


def sent(store: BlockStore, *names: bytes) -> list[tuple[bytes, memoryview]]:
    return [(name, memoryview(bytes([name[-1]]) * store.block_bytes)) for name in names]


def asked(store: BlockStore, *names: bytes) -> Manifest:
    return Manifest("t", 1, store.model, 1, store.layout, names)


def test_a_committed_block_is_found_and_read_back(store: BlockStore) -> None:
    assert store.lack([b"a", b"b"], 1) == [b"a", b"b"]
    assert store.commit(sent(store, b"a"), asked(store)) == 1
    assert store.lack([b"a", b"b"], 1) == [b"b"]
    found, absent = store.lease(asked(store, b"a", b"b"))
    assert found is not None
    assert bytes(found[1]) == b"a" * store.block_bytes
    assert absent is None


def test_a_leased_block_is_neither_evicted_nor_released_until_the_lease_ends(store: BlockStore) -> None:
    store.commit(sent(store, b"a"), asked(store))
    (leased,) = store.lease(asked(store, b"a"))
    assert leased is not None
    store.commit(sent(store, *(bytes([65 + index]) for index in range(BLOCKS))), asked(store))
    assert bytes(leased[1]) == b"a" * store.block_bytes
    store.forget()
    assert bytes(leased[1]) == b"a" * store.block_bytes
    with pytest.raises(Refused, match="being read"):
        store.release()
    store.end_lease([leased[0]])
    store.release()


def test_without_room_the_start_of_a_prefix_is_kept(store: BlockStore) -> None:
    held = store.index.allocate(2)
    names = [b"a", b"b", b"c", b"d"]
    assert store.commit(sent(store, *names), asked(store)) == 2
    assert store.lack(names, 1) == [b"c", b"d"]
    assert held is not None
    store.index.release(held)


def test_no_room_at_all_commits_nothing(store: BlockStore) -> None:
    held = store.index.allocate(BLOCKS)
    assert held is not None
    assert store.commit(sent(store, b"a"), asked(store)) == 0


def test_a_block_that_came_twice_is_taken_once(store: BlockStore) -> None:
    assert store.commit(sent(store, b"a", b"b"), asked(store)) == 2
    assert store.commit(sent(store, b"a", b"b", b"c"), asked(store)) == 3
    assert store.index.published == 3


def test_asking_for_a_prefix_makes_what_is_here_the_last_to_go(store: BlockStore) -> None:
    store.commit(sent(store, b"a", b"b"), asked(store))
    store.commit(sent(store, b"x", b"y"), asked(store))
    assert store.lack([b"a", b"b", b"c", b"d"], 1) == [b"c", b"d"]
    store.commit(sent(store, b"c", b"d"), asked(store))
    assert store.lack([b"a", b"b", b"c", b"d"], 1) == []


@pytest.mark.parametrize("other", [{"version": 2}, {"layout": "another"}, {"model": "those"}], ids=str)
def test_another_version_layout_or_model_is_refused_everywhere_and_nothing_is_taken(
    store: BlockStore, other: dict[str, Any]
) -> None:
    """C14: version-1 KV does not come to a version-2 engine."""
    with pytest.raises(Refused):
        store.commit(sent(store, b"a"), replace(asked(store), **other))
    with pytest.raises(Refused):
        store.lease(replace(asked(store, b"a"), **other))
    if "version" in other:
        with pytest.raises(Refused):
            store.lack([b"a"], 2)
    assert store.index.published == 0


def test_a_block_of_the_wrong_size_is_refused_before_any_is_taken(store: BlockStore) -> None:
    with pytest.raises(Refused, match="bytes, not"):
        store.commit([*sent(store, b"a"), (b"b", memoryview(b"short"))], asked(store))
    assert store.index.published == 0


def test_a_released_engine_exchanges_nothing(store: BlockStore) -> None:
    store.release()
    with pytest.raises(Refused, match="released"):
        store.lack([b"a"], 1)
    store.resume()
    assert store.lack([b"a"], 1) == [b"a"]
