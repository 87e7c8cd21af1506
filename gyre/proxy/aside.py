"""Threads for what would hold the event loop, and with it every other run, up for long: large bodies, long prompts.

A few threads for all runs: so a crowd of large requests waits for itself, and its memory is bounded.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE_BYTES = 256 * 1024
"""A request from this size on is worked on aside; a smaller one takes less than going aside is worth."""
_THREADS = 2


_TURN_S = 0.0005
"""How long a thread keeps the interpreter while another wants it. The event loop wants it anew after each of its system
calls, dozens of times for one request."""


class Aside:
    def __init__(self) -> None:
        sys.setswitchinterval(_TURN_S)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="large request")

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work` on something of this size. A cancelled caller does not stop work that has begun."""
        if size_bytes < LARGE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
