"""The bookkeeping of blocks: nobody's block is given to another, and nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gyre.engine.local.prefix_cache import PrefixCache

BLOCKS = 6
names = st.lists(st.sampled_from([bytes([letter]) for letter in b"abcdefgh"]), min_size=1, max_size=5, unique=True)


class BlocksInUse(RuleBasedStateMachine):
    """Holders take, publish and give back; `content` is what an observer knows of each named block."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(BLOCKS)
        self.holders: list[tuple[int, ...]] = []
        self.content: dict[int, bytes] = {}

    @rule(target=held, count=st.integers(0, 4))
    def allocate(self, count: int) -> object:
        in_use = {block for blocks in self.holders for block in blocks}
        before = self.cache.available
        taken = self.cache.allocate(count)
        if taken is None:
            assert count > before
            assert self.cache.available == before
            return multiple()
        assert not in_use & set(taken)
        assert len(set(taken)) == count
        for block in taken:
            self.content.pop(block, None)
        self.holders.append(tuple(taken))
        return tuple(taken)

    @rule(blocks=held, wanted=names)
    def publish(self, blocks: tuple[int, ...], wanted: list[bytes]) -> None:
        if blocks not in self.holders:
            return
        for block, name in zip(blocks, wanted, strict=False):
            taken = name in self.cache or block in self.content
            self.cache.publish(block, name)
            if not taken:
                self.content[block] = name
            assert name in self.cache or block in self.content

    @rule(target=held, wanted=names)
    def match(self, wanted: list[bytes]) -> object:
        found = self.cache.match(wanted)
        assert [self.content[block] for block in found] == wanted[: len(found)]
        if len(found) < len(wanted):
            assert wanted[len(found)] not in self.cache
        self.holders.append(tuple(found))
        return tuple(found)

    @rule(blocks=consumes(held))
    def release(self, blocks: tuple[int, ...]) -> None:
        if blocks in self.holders:
            self.holders.remove(blocks)
            self.cache.release(blocks)

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        self.content.clear()
        assert self.cache.published == 0

    @invariant()
    def every_block_is_somewhere(self) -> None:
        in_use = {block for blocks in self.holders for block in blocks}
        assert self.cache.available == BLOCKS - len(in_use)
        assert self.cache.unused == (not in_use)


TestBlocksInUse = BlocksInUse.TestCase
TestBlocksInUse.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def published(cache: PrefixCache, *chain: bytes) -> None:
    blocks = cache.allocate(len(chain))
    assert blocks is not None
    for block, name in zip(blocks, chain, strict=True):
        cache.publish(block, name)
    cache.release(blocks)


def test_the_longest_unused_prefix_is_evicted_first_and_its_end_before_its_start() -> None:
    cache = PrefixCache(4)
    published(cache, b"old-1", b"old-2")
    published(cache, b"new-1", b"new-2")
    cache.allocate(1)
    assert [name in cache for name in (b"old-1", b"old-2", b"new-1", b"new-2")] == [True, False, True, True]
    cache.allocate(1)
    assert [name in cache for name in (b"old-1", b"new-1", b"new-2")] == [False, True, True]


def test_a_prefix_that_is_used_again_is_kept_longer() -> None:
    cache = PrefixCache(2)
    published(cache, b"first")
    published(cache, b"second")
    cache.release(cache.match([b"first"]))
    cache.allocate(1)
    assert b"first" in cache
    assert b"second" not in cache


@pytest.mark.parametrize("count", [3, 4])
def test_an_allocation_that_cannot_be_met_evicts_nothing(count: int) -> None:
    cache = PrefixCache(3)
    cache.allocate(1)
    published(cache, b"a", b"b")
    assert cache.allocate(count) is None
    assert b"a" in cache
    assert b"b" in cache
