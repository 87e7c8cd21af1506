"""How long a source may say nothing before a pull from it is given up.

async with asyncio.timeout(deadline_s), silence:
    offer = await open_transfer(…)
    silence.heard()
    with silence.ours():
        await turn(offer.total)     # it is we who let the source wait
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType

from gyre.kv_migrate.transport import SourceLost


class Silence:
    """Of one pull. Without `allowed_s` only the deadline bounds it. Raises SourceLost where it was too long."""

    def __init__(self, address: str, allowed_s: float | None) -> None:
        self._address = address
        self._allowed_s = allowed_s
        self._timeout = asyncio.timeout(None)
        self._waits = 0

    async def __aenter__(self) -> Silence:
        await self._timeout.__aenter__()
        self.heard()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise SourceLost(f"nothing came from {self._address} for {self._allowed_s:g} s") from late

    @property
    def over(self) -> bool:
        """Whether it was too long; true from then on."""
        return self._timeout.expired()

    def heard(self) -> None:
        """Something of the source has come."""
        if self._allowed_s is not None and not self.over:
            until_s = asyncio.get_running_loop().time() + self._allowed_s
            self._timeout.reschedule(None if self._waits else until_s)

    @contextmanager
    def ours(self) -> Generator[None]:
        """What is waited for in here is not the source's."""
        self._waits += 1
        self.heard()
        try:
            yield
        finally:
            self._waits -= 1
            self.heard()
