"""When a cell that failed is tried again, and when a job has no cell left to hope for: pure.

A failed cell is out of routing and keeps its last order; only a new order brings it back. The scheduler asks `due` with
the cells that are failed now and orders those again; the pause doubles each time. A cell that works for a while begins
anew.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gyre.ids import CellId

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
TRIES = 2
"""Tries of every cell before a job with no working cell is given up."""
WELL_S = 120.0


@dataclass
class _Case:
    tries: int
    failed_at_s: float
    due_s: float


class Revival:
    def __init__(self) -> None:
        self._cases: dict[CellId, _Case] = {}

    def due(self, failed: Collection[CellId], now_s: float) -> list[CellId]:
        """The failed cells to order again now. Each call counts as a try of those it names."""
        for cell in [
            cell for cell, case in self._cases.items() if cell not in failed and now_s - case.failed_at_s > WELL_S
        ]:
            del self._cases[cell]
        named: list[CellId] = []
        for cell in sorted(failed):
            case = self._cases.setdefault(cell, _Case(0, now_s, now_s + FIRST_PAUSE_S))
            case.failed_at_s = now_s
            if now_s >= case.due_s:
                case.tries += 1
                case.due_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**case.tries)
                named.append(cell)
        return named

    def hopeless(self, failed: Collection[CellId], cells: int) -> bool:
        """Every cell is failed, and each was tried again in vain."""
        return len(failed) == cells > 0 and all(self._tries(cell) >= TRIES for cell in failed)

    def _tries(self, cell: CellId) -> int:
        case = self._cases.get(cell)
        return 0 if case is None else case.tries
