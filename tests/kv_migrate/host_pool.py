"""A host pool as SGLang's is, in plain torch: two layouts, slots that are handed out and freed, pages with bytes of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE_SLOTS = 4
LAYOUTS = ("page_first_direct", "layer_first")


class TorchPool:
    """`pages` pages of PAGE_SLOTS slots; keys and values of `layers` layers with `heads` heads of `width`."""

    def __init__(self, layout: str, pages: int, layers: int = 3, heads: int = 2, width: int = 8) -> None:
        self.layout = layout
        self.page_size = PAGE_SLOTS
        self.pages = pages
        rest = (heads, width)
        shape = (2, layers, pages * PAGE_SLOTS, *rest)
        if layout == "page_first_direct":
            shape = (2, pages, layers, PAGE_SLOTS, *rest)
        self.kv_buffer: Tensor = torch.zeros(shape, dtype=torch.bfloat16)
        self.free_pages = list(range(pages))
        self.used: set[int] = set()

    def alloc(self, pages: int) -> Tensor:
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        assert len(taken) == pages
        self.used.update(taken)
        return slots(taken)

    def free(self, indices: Tensor) -> int:
        for page in sorted(set((indices // PAGE_SLOTS).tolist())):
            self.used.remove(page)
            self.free_pages.append(page)
        return len(indices)

    def clear(self) -> None:
        self.used.clear()
        self.free_pages = list(range(self.pages))

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        places: list[int] = []
        sizes: list[int] = []
        for page in (indices[::PAGE_SLOTS] // PAGE_SLOTS).tolist():
            for piece in self._pieces(page):
                places.append(piece.data_ptr())
                sizes.append(piece.nbytes)
        return places, sizes

    def write(self, page: int, seed: int) -> None:
        """Fill it with the content that `seed` stands for."""
        whole = torch.frombuffer(bytearray(content(seed, self.page_bytes)), dtype=torch.bfloat16)
        pieces = self._pieces(page)
        for piece, part in zip(pieces, whole.chunk(len(pieces)), strict=True):
            piece.copy_(part.view(piece.shape))

    def read(self, page: int) -> bytes:
        return b"".join(piece.contiguous().view(torch.uint8).numpy().tobytes() for piece in self._pieces(page))

    @property
    def page_bytes(self) -> int:
        return self.kv_buffer.nbytes // self.pages

    def _pieces(self, page: int) -> list[Tensor]:
        """Each one piece of memory."""
        if self.layout == "page_first_direct":
            return [kind[page] for kind in self.kv_buffer]
        first = page * PAGE_SLOTS
        return [layer[first : first + PAGE_SLOTS] for kind in self.kv_buffer for layer in kind]


def slots(pages: Sequence[int]) -> Tensor:
    return torch.tensor([page * PAGE_SLOTS + slot for page in pages for slot in range(PAGE_SLOTS)], dtype=torch.int64)


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)
