"""The pages of SGLang's host pool, by name: which are here, where their bytes lie, and whether they still are what they were.

SGLang writes a page to the pool once and never changes it until it frees the page, by itself and at any moment. Nothing
here ever keeps it from that: a `free` or a `clear` of the pool forgets the pages first and then goes on. Who has read a page asks
`intact` afterwards: a page that is still the same entry then was not touched since it was looked up, and one that is
not may have been torn, whatever its bytes are now.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from gyre.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor


class HostPool(Protocol):
    """What is used of SGLang's host pool. `free` and `clear` are replaced by ours, which call them."""

    kv_buffer: Tensor
    page_size: int
    layout: str
    free: Callable[[Tensor], int]
    clear: Callable[[], None]

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        """Where the pieces of the pages lie whose slots these are, and how long each is."""
        ...


class Page:
    """One page that is here, from when it was written until it was freed: no other is the same object."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class HostPages:
    """Takes over the pool's `free` and `clear`. Every method may be called on any thread.

    A page is `pieces` pieces of `piece_bytes` bytes. Raises BadInput for a pool whose pages are not of that form.
    """

    def __init__(self, pool: HostPool) -> None:
        import torch

        if not pool.kv_buffer.is_contiguous():
            raise BadInput("host pool", type(pool).__name__, "its memory must be one piece")
        self._page_slots = pool.page_size
        self._bytes = pool.kv_buffer.view(torch.uint8).reshape(-1).numpy()
        self._view = memoryview(cast(bytearray, self._bytes))
        self._places, self.piece_bytes = _places(pool)
        self.pieces = len(self._places)
        self.page_bytes = self.pieces * self.piece_bytes
        self.shape = f"{pool.layout}/{pool.page_size}/{self.pieces}x{self.piece_bytes}/{pool.kv_buffer.dtype}"
        """What a page's bytes mean, as far as the pool tells."""
        self._lock = threading.Lock()
        self._names: dict[bytes, Page] = {}
        self._numbers: dict[int, bytes] = {}
        self._pool = pool
        self._free, self._clear = pool.free, pool.clear
        pool.free, pool.clear = self._forget_and_free, self._forget_and_clear

    def let_go(self) -> None:
        """The pool is as it was, and no page is here any more."""
        self._pool.free, self._pool.clear = self._free, self._clear
        with self._lock:
            self._names.clear()
            self._numbers.clear()

    def find(self, names: Iterable[bytes]) -> list[Page | None]:
        with self._lock:
            return [self._names.get(name) for name in names]

    def intact(self, name: bytes, page: Page) -> bool:
        """Whether all that was read of `page` since `find` gave it were the bytes of `name`."""
        with self._lock:
            return self._names.get(name) is page

    def views(self, page: Page) -> list[memoryview]:
        """The page's memory, not copied."""
        return [self._view[place : place + self.piece_bytes] for place in self._of(page.number)]

    def written(self, names: Sequence[bytes], slots: Tensor) -> None:
        """These pages are in those slots now. A name that is here already stays where it was."""
        firsts: list[int] = slots[:: self._page_slots].tolist()
        with self._lock:
            for name, first in zip(names, firsts, strict=True):
                number, rest = divmod(first, self._page_slots)
                if rest == 0 and name not in self._names:
                    self._names[name] = Page(number)
                    self._numbers[number] = name

    def fill(self, first_slot: int, pieces: Sequence[memoryview]) -> None:
        """Write a page into slots that SGLang has set aside for it."""
        import numpy

        number = first_slot // self._page_slots
        for place, piece in zip(self._of(number), pieces, strict=True):
            # numpy, and not the views: it lets the process' other threads run meanwhile.
            self._bytes[place : place + self.piece_bytes] = numpy.frombuffer(piece, numpy.uint8)

    def _of(self, number: int) -> list[int]:
        return [first + number * step for first, step in self._places]

    def _forget_and_free(self, indices: Tensor) -> int:
        numbers: set[int] = set((indices // self._page_slots).tolist())
        with self._lock:
            for number in numbers:
                name = self._numbers.pop(number, None)
                if name is not None:
                    del self._names[name]
        return self._free(indices)

    def _forget_and_clear(self) -> None:
        with self._lock:
            self._names.clear()
            self._numbers.clear()
        self._clear()


def _places(pool: Any) -> tuple[list[tuple[int, int]], int]:
    """Where each piece of page 0 begins, by how much later it does in each next page; and a piece's length."""
    import torch

    base = int(pool.kv_buffer.data_ptr())
    whole = int(pool.kv_buffer.nbytes)
    page = torch.arange(pool.page_size)
    first, sizes = pool.get_page_buffer_meta(page)
    second, _ = pool.get_page_buffer_meta(page + pool.page_size)
    third, _ = pool.get_page_buffer_meta(page + 2 * pool.page_size)
    steps = [after - before for before, after in zip(first, second, strict=True)]
    even = all(after - before == step for before, after, step in zip(second, third, steps, strict=True))
    inside = all(base <= place <= base + whole - size for place, size in zip(first, sizes, strict=True))
    if len(set(sizes)) != 1 or not even or not inside:
        raise BadInput("host pool", type(pool).__name__, "its pages must lie in even steps, in pieces of one length")
    return [(place - base, step) for place, step in zip(first, steps, strict=True)], int(sizes[0])
