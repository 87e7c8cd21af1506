"""A cell leaves: its requests stop at a token boundary and go on elsewhere, and every prefix that a run will want again goes along.

When this is done nothing of any run is on the cell and nothing is being read from it: its engine may let go of its memory.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gyre.actors.messages import DrainEngine, DrainReport
from gyre.ids import CallId, CellId, RunId
from gyre.kv_migrate.prefix import MoveReport
from gyre.proxy.engines import MOVE_S, Engines
from gyre.proxy.generation import Generation
from gyre.proxy.sampling import Cached

_MOVES_AT_ONCE = 8


@dataclass(frozen=True)
class Resting:
    """A prefix on a cell that no request holds, and that the run's next request will want."""

    run: RunId
    call: CallId
    answered_s: float
    """When its answer was whole; inf where it is not, and somebody waits for it."""
    token_ids: Callable[[], array[int]]
    moved: Callable[[Cached], None]
    """Told where it is from now on."""


def most_recent_first(prefixes: Iterable[Resting]) -> list[Resting]:
    """In the order in which they will be wanted, as far as it can be told: what waits for an engine is wanted next, and of
    the rest the run whose answer was given last comes back soonest."""
    return sorted(prefixes, key=lambda prefix: prefix.answered_s, reverse=True)


class Departure:
    """One cell's leaving. `resting` gives the prefixes that are on the cell now, under a version."""

    def __init__(self, engines: Engines, resting: Callable[[CellId, int], Iterable[Resting]]) -> None:
        self._engines = engines
        self._resting = resting
        self._reports: list[MoveReport] = []
        self._tried: set[CallId] = set()

    async def carry_out(self, order: DrainEngine) -> DrainReport:
        started_s = time.monotonic()
        self._engines.close_cell(order.cell)
        generations = [sitter for sitter in self._engines.sitters(order.cell) if isinstance(sitter, Generation)]
        departures = await asyncio.gather(*(generation.stop() for generation in generations))
        stop_s = time.monotonic() - started_s
        try:
            async with asyncio.timeout(MOVE_S):
                if order.move:
                    await self._empty(order.cell)
                if departures:
                    await asyncio.wait(departures)
                # A call may have begun to take its prefix along while all this went on.
                while moves := self._engines.moves_from(order.cell):
                    await asyncio.wait(moves)
        except TimeoutError:
            pass  # what has not moved by now is computed again
        await self._engines.emptied(order.cell)
        reports = [*self._reports, *(future.result() for future in departures if future.done())]
        moved = [report for report in reports if report is not None]
        return DrainReport(
            requests=len(generations),
            moved_blocks=sum(report.blocks for report in moved),
            moved_bytes=sum(report.bytes for report in moved),
            stop_s=stop_s,
            move_s=time.monotonic() - started_s,
        )

    async def _empty(self, cell: CellId) -> None:
        """Until no prefix rests there: a call that finds no seat elsewhere comes to rest while others move."""
        slots = asyncio.Semaphore(_MOVES_AT_ONCE)
        while found := self._untried(cell):
            self._tried.update(prefix.call for prefix in found)
            await asyncio.gather(*(self._take_along(prefix, cell, slots) for prefix in found))

    def _untried(self, cell: CellId) -> Sequence[Resting]:
        resting = most_recent_first(self._resting(cell, self._engines.version))
        return [prefix for prefix in resting if prefix.call not in self._tried]

    async def _take_along(self, prefix: Resting, cell: CellId, slots: asyncio.Semaphore) -> None:
        async with slots:
            version = self._engines.version
            # Again where the engine that it went to leaves as well before it is there.
            while (target := self._engines.rest(prefix.run, cell)) is not None:
                token_ids = prefix.token_ids()
                report = await self._engines.move(cell, target, token_ids, version, resting=True)
                if report is not None:
                    self._reports.append(report)
                if self._engines.version != version or report is None or report.reason:
                    return
                if self._engines.open(target):
                    prefix.moved(Cached(target, version, len(token_ids)))
                    return
