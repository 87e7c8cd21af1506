# pyright: basic
"""The memory of a flat buffer that is given back when a cell leaves training, and had again when it comes back.

Every view of the buffer stays what it is. On a CPU the pages go back to the kernel, and come again as zeros when they
are first written to, in large ones where the kernel has them: what nobody writes to costs nothing.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FlatMemory:
    """That of `flat`, which is contiguous and has a storage of its own. It is there at first."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._size_bytes = flat.numel() * flat.element_size()
        if not flat.is_cuda:
            self._advise(mmap.MADV_HUGEPAGE)  # refused where the kernel has none: small pages will do

    def give_back(self) -> None:
        if self._flat.is_cuda:
            self._flat.untyped_storage().resize_(0)
        else:
            self._forget()

    def take(self) -> None:
        """Have it; what is in it is whatever is there."""
        storage = self._flat.untyped_storage()
        if storage.nbytes() != self._size_bytes:
            storage.resize_(self._size_bytes)

    def zeros(self) -> None:
        """Have it, with zeros in it."""
        if self._flat.is_cuda:
            self.take()
            self._flat.zero_()
        else:
            self._forget()

    def _forget(self) -> None:
        if not self._advise(mmap.MADV_DONTNEED):
            self._flat.zero_()
            return
        bytes_, (begin, end) = self._flat.view(torch.uint8), self._pages()
        bytes_[:begin].zero_()
        bytes_[end:].zero_()

    def _advise(self, advice: int) -> bool:
        """Whether the kernel took the advice for the whole pages of it."""
        begin, end = self._pages()
        return end == begin or _libc.madvise(self._flat.data_ptr() + begin, end - begin, advice) == 0

    def _pages(self) -> tuple[int, int]:
        """Where the whole pages in it begin and end, in bytes from its front."""
        front = self._flat.data_ptr()
        begin = min(-front % mmap.PAGESIZE, self._size_bytes)
        end = self._size_bytes - (front + self._size_bytes) % mmap.PAGESIZE
        return begin, max(begin, end)
