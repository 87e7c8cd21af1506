"""Block names: equal for equal version and tokens up to the block's end, and for nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre.kv_migrate.blocks import block_hashes, next_hash, root_hash

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)
widths = st.integers(1, 9)


@given(tokens, tokens, widths)
def test_sequences_share_exactly_the_names_of_their_common_whole_blocks(
    one: list[int], two: list[int], width: int
) -> None:
    names_one, names_two = block_hashes(one, 3, width), block_hashes(two, 3, width)
    assert len(names_one) == len(one) // width
    common = 0
    while common < min(len(one), len(two)) and one[common] == two[common]:
        common += 1
    shared = common // width
    assert names_one[:shared] == names_two[:shared]
    assert not set(names_one[shared:]) & set(names_two[shared:])


@given(tokens, widths, st.integers(0, 5), st.integers(0, 5))
def test_two_versions_share_no_name(ids: list[int], width: int, one: int, two: int) -> None:
    shared = set(block_hashes(ids, one, width)) & set(block_hashes(ids, two, width))
    assert bool(shared) == (one == two and len(ids) >= width)


@given(tokens, widths)
def test_the_chain_grows_block_by_block(ids: list[int], width: int) -> None:
    name, names = root_hash(7), []
    for start in range(0, len(ids) - width + 1, width):
        name = next_hash(name, ids[start : start + width])
        names.append(name)
    assert names == block_hashes(ids, 7, width)


def test_a_salt_has_names_of_its_own() -> None:
    assert not set(block_hashes(range(8), 1, 4)) & set(block_hashes(range(8), 1, 4, salt="x"))


def test_names_are_the_same_in_every_process() -> None:
    assert block_hashes([1, 2, 3, 4], 1, 2)[1].hex() == "b45ac989fbd2d52aab9e3d5574a8b958"
