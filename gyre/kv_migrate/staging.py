"""Staging memory: where blocks lie between their arrival and the moment their owner takes them over.

It is quarantine: nothing reads it but the check of what arrived. It can be mapped by another process too, for a carrier
whose engine is one. Fresh memory costs as much to touch as a copy, so what is done with is kept for the next transfer.
"""

from __future__ import annotations

import mmap
import os
import weakref

_PAGE_BYTES = 1 << 20


class Staging:
    """`size` bytes, in whole MiB. They go back to the system when nobody refers to them, or to a view of them, any more."""

    def __init__(self, size: int) -> None:
        self.size = max(1, -(-size // _PAGE_BYTES)) * _PAGE_BYTES
        self.fd = os.memfd_create("gyre-staging", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.size)
        self.view = memoryview(mmap.mmap(self.fd, self.size))


class StagingPool:
    """Staging memory that is used again. At most `keep_bytes` lie idle."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._idle: list[Staging] = []

    def take(self, size: int) -> Staging:
        """The smallest idle one with room for `size`, or a new one."""
        fitting = [staging for staging in self._idle if staging.size >= size]
        if not fitting:
            return Staging(size)
        found = min(fitting, key=lambda staging: staging.size)
        self._idle.remove(found)
        return found

    def give_back(self, staging: Staging) -> None:
        """Only what nobody reads or writes any more. What is never given back is freed with its last reference."""
        self._idle.append(staging)
        while sum(idle.size for idle in self._idle) > self._keep_bytes:
            self._idle.pop(0)
