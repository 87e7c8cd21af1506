"""How quickly an engine fetches what no request waits for: a token bucket that is told the time, and the wait for it.

    budget.take(256 << 10, bytes_s, now_s)     # 0: they may be fetched; else how long to wait before the next try
    budget.overtake(now_s)                     # bytes that a request waits for are fetched: the others stand aside

An engine that serves has one budget for all its pulls. Each pull brings its rate along; one without a rate waits for
nothing, and overtakes those that have one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf

Turn = Callable[[int], Awaitable[None]]
"""What a pull awaits before it fetches so many bytes."""

BURST_S = 0.05
"""What a rate gives in so long may be fetched at once after a pause: a short prefix does not wait at all."""
ASIDE_S = 0.1
"""How long the others stand still after bytes that a request waits for. They need no word that these have all come, which
from a source that hangs would never be said."""


class Budget:
    """In any stretch of time no more is given than what it and `BURST_S` are worth, and one take."""

    def __init__(self) -> None:
        self._spent_s = -inf
        """Until when all has been given away."""

    def take(self, count: int, bytes_s: float, now_s: float) -> float:
        """0: `count` bytes may be fetched. Else nothing was given, and it is no use to ask before so many seconds are over."""
        if self._spent_s > now_s:
            return self._spent_s - now_s
        self._spent_s = max(self._spent_s, now_s - BURST_S) + count / bytes_s
        return 0.0

    def overtake(self, now_s: float) -> None:
        """Nothing more is given for a moment."""
        self._spent_s = max(self._spent_s, now_s + ASIDE_S)


class Pacer:
    """The pulls of one engine."""

    def __init__(self) -> None:
        self._budget = Budget()
        self._line = asyncio.Lock()
        """Only the first in the line looks at the budget."""

    def turn(self, bytes_s: float) -> Turn:
        """For one pull at that rate; 0: a request waits for it, or nothing bounds it."""
        now_s = asyncio.get_running_loop().time

        async def wait(count: int) -> None:
            if not bytes_s:
                self._budget.overtake(now_s())
                return
            async with self._line:
                while wait_s := self._budget.take(count, bytes_s, now_s()):  # noqa: ASYNC110 - it is time that is waited for
                    await asyncio.sleep(wait_s)

        return wait


async def at_once(_: int) -> None:
    """The turn of a pull that nothing else has to do with."""
