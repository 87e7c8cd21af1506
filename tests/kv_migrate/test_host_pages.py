"""The pages of a host pool by name, whatever SGLang does with the pool meanwhile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyre.errors import BadInput
from gyre.kv_migrate.host_pages import HostPages, Page
from kv_migrate.host_pool import LAYOUTS, PAGE_SLOTS, TorchPool, content, slots


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_views_of_a_page_are_its_bytes_where_they_lie(layout: str) -> None:
    pool = TorchPool(layout, pages=5)
    pages = HostPages(pool)
    assert pages.page_bytes == pool.page_bytes
    assert pages.pieces == (2 if layout == "page_first_direct" else 6)
    for number in range(5):
        pool.write(number, seed=number)
    pages.written([name(7), name(8)], slots([4, 1]))
    found = pages.find([name(8), name(7), name(9)])
    assert found[2] is None
    for page, number in ((found[0], 1), (found[1], 4)):
        assert page is not None
        assert b"".join(pages.views(page)) == content(number, pool.page_bytes)
    page = found[0]
    assert page is not None
    pool.write(1, seed=50)
    assert b"".join(pages.views(page)) == content(50, pool.page_bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_filled_where_the_pool_says(layout: str) -> None:
    pool = TorchPool(layout, pages=4)
    pages = HostPages(pool)
    pool.write(1, seed=1)
    source = pages.views(Page(1))
    pages.fill(3 * PAGE_SLOTS, source)
    assert pool.read(3) == pool.read(1) == content(1, pool.page_bytes)
    assert not any(pool.read(0) + pool.read(2))


def test_pools_of_another_form_are_refused() -> None:
    class Uneven(TorchPool):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            places, sizes = super().get_page_buffer_meta(indices)
            return places, [sizes[0] // 2, *sizes[1:]]

    with pytest.raises(BadInput, match="of one length"):
        HostPages(Uneven("page_first_direct", 4))
    pool = TorchPool("layer_first", 4)
    pool.kv_buffer = pool.kv_buffer.transpose(0, 1)
    with pytest.raises(BadInput, match="one piece"):
        HostPages(pool)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 7)),
        st.tuples(st.just("free"), st.integers(0, 7)),
        st.tuples(st.just("clear"), st.just(0)),
        st.tuples(st.just("look"), st.integers(0, 7)),
    ),
    max_size=60,
)


@given(STEPS)
def test_whoever_read_an_intact_page_has_read_what_its_name_says(steps: list[tuple[str, int]]) -> None:
    pool = TorchPool("page_first_direct", pages=4, layers=1, heads=1, width=4)
    pages = HostPages(pool)
    where: dict[int, int] = {}
    looked: list[tuple[int, Page]] = []
    for what, number in steps:
        if what == "write" and pool.free_pages and number not in where:
            taken = pool.alloc(1)
            page = int(taken[0]) // PAGE_SLOTS
            pool.write(page, seed=number)
            pages.written([name(number)], taken)
            where[number] = page
        elif what == "free" and number in where:
            pool.free(slots([where.pop(number)]))
        elif what == "clear":
            pool.clear()
            where.clear()
        elif what == "look":
            (found,) = pages.find([name(number)])
            assert (found is not None) == (number in where)
            if found is not None:
                looked.append((number, found))
        for looked_for, page in looked:
            if pages.intact(name(looked_for), page):
                assert b"".join(pages.views(page)) == content(looked_for, pool.page_bytes)
                assert looked_for in where


def test_a_pool_that_is_let_go_is_as_it_was() -> None:
    pool = TorchPool("page_first_direct", pages=4)
    free = pool.free
    pages = HostPages(pool)
    assert pool.free != free
    pages.written([name(1)], pool.alloc(1))
    pages.let_go()
    assert (pool.free, pages.find([name(1)])) == (free, [None])


def test_a_name_that_is_here_twice_lives_as_long_as_where_it_was_first() -> None:
    pool = TorchPool("page_first_direct", pages=4)
    pages = HostPages(pool)
    pages.written([name(1)], pool.alloc(1))
    pages.written([name(1)], pool.alloc(1))
    pool.free(slots([1]))
    assert pages.find([name(1)]) != [None]
    pool.free(slots([0]))
    assert pages.find([name(1)]) == [None]
