"""Who sits at which engine, and who waits: the gateway's books, without a clock, a socket or a task.

A call asks, and sits when its turn comes and an engine has room; it leaves when its stretch has ended. What each
decision is by stands in `routing` (where to) and `turns` (who first). A call sits at one engine at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol

from gyre.actors.messages import EngineRoute, SetRoutes
from gyre.ids import CellId, GroupId, RunId
from gyre.proxy.prefix_index import PrefixIndex
from gyre.proxy.routing import choose, open_engines
from gyre.proxy.sampling import Cached
from gyre.proxy.turns import next_up


class Sitter(Protocol):
    """A call that is sampled: a generation."""

    run: RunId
    group: GroupId
    asked: int
    """When its call first asked for an engine, as a number that grows from call to call."""
    cached: Cached | None
    """Where its prefix was computed last."""
    marks: tuple[bytes, ...]
    """Of its prompt's beginning, where others may have computed that (`prefix_index.marks_of`)."""


class Seating:
    def __init__(self) -> None:
        self.version = -1
        self.routes: Mapping[CellId, EngineRoute] = {}
        self._closed: set[CellId] = set()
        self._suspects: set[CellId] = set()
        self.uncertain: Collection[CellId] = ()
        """Cells whose engines may still sample what was left there: nobody sits down at them."""
        self._sitting: dict[Sitter, CellId] = {}
        self._in_flight: Counter[CellId] = Counter()
        self._waiting: list[Sitter] = []
        self._served: dict[GroupId, int] = {}
        self._turn = 0
        self._homes: dict[RunId, CellId] = {}
        self._index = PrefixIndex()

    # ------------------------------------------------------------------------------------------ engines

    def set_routes(self, order: SetRoutes) -> None:
        """The engines as they are now. One that accepts is open again, whatever was thought of it."""
        before, self.routes = self.routes, {route.cell: route for route in order.engines}
        self.version = order.version
        for cell in {*before, *self.routes}:
            old, new = before.get(cell), self.routes.get(cell)
            if old is None or new is None or not new.accepting or (old.url, old.version) != (new.url, new.version):
                self._index.forget(cell)
            if new is None or new.accepting:
                self._closed.discard(cell)
            self._suspects.discard(cell)

    def close(self, cell: CellId) -> None:
        """Nobody sits down at `cell` until routes say that it accepts."""
        self._closed.add(cell)

    def suspect(self, cell: CellId) -> None:
        """It failed a call: nobody sits down there until it is forgiven, or routes name it again."""
        self._suspects.add(cell)

    def forgive(self, cell: CellId) -> None:
        self._suspects.discard(cell)

    def open(self) -> dict[CellId, EngineRoute]:
        return open_engines(self.routes.values(), self.version, self._closed.union(self._suspects, self.uncertain))

    # ------------------------------------------------------------------------------------------ sitting

    def ask(self, sitter: Sitter) -> None:
        assert sitter not in self._sitting, "a call sits at one engine at a time"
        self._waiting.append(sitter)

    def withdraw(self, sitter: Sitter) -> None:
        """It waits no more."""
        if sitter in self._waiting:
            self._waiting.remove(sitter)

    def seat_next(self) -> tuple[Sitter, CellId] | None:
        """Seat whose turn it is; None when nobody waits, or no engine has room."""
        sitter = next_up(self._waiting, self._served)
        if sitter is None:
            return None
        engines = self.open()
        cell = choose(engines, self._in_flight, self._home(sitter, engines), self._index.held(sitter.marks, engines))
        if cell is None:
            return None
        self._waiting.remove(sitter)
        self._turn += 1
        self._served[sitter.group] = self._turn
        self._sitting[sitter] = cell
        self._in_flight[cell] += 1
        self._homes[sitter.run] = cell
        return sitter, cell

    def leave(self, sitter: Sitter) -> None:
        """It gets up. Repeating it changes nothing."""
        cell = self._sitting.pop(sitter, None)
        if cell is not None:
            self._in_flight[cell] -= 1

    def sitters(self, cell: CellId) -> list[Sitter]:
        return [sitter for sitter, at in self._sitting.items() if at == cell]

    def computed(self, sitter: Sitter, cell: CellId, version: int) -> None:
        """The beginning of its prompt is in the memory of `cell`, under `version`."""
        route = self.routes.get(cell)
        if route is not None and route.version == version and cell not in self._closed:
            self._index.add(cell, sitter.marks)

    def _home(self, sitter: Sitter, engines: Mapping[CellId, EngineRoute]) -> CellId | None:
        cached = sitter.cached
        if cached is not None and cached.version == self.version and cached.cell in engines:
            return cached.cell
        return self._homes.get(sitter.run)

    # ------------------------------------------------------------------------------------------ runs

    def rest(self, run: RunId, leaving: CellId) -> CellId | None:
        """Where a prefix of the run is kept for its next request, now that `leaving` leaves; None when nowhere."""
        engines = self.open()
        engines.pop(leaving, None)
        home = self._homes.get(run)
        if home not in engines:
            living = Counter(self._homes.values())
            home = min(engines, key=lambda cell: (living[cell] + self._in_flight[cell], cell), default=None)
            if home is not None:
                self._homes[run] = home
        return home

    def forget(self, run: RunId) -> None:
        """The run is over."""
        self._homes.pop(run, None)

    def forget_group(self, group: GroupId) -> None:
        """So is the last run of the group."""
        self._served.pop(group, None)

    # ------------------------------------------------------------------------------------------ reading

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def in_flight(self) -> dict[CellId, int]:
        """Requests in flight by cell, every known cell named."""
        return {cell: self._in_flight[cell] for cell in {*self.routes, *(+self._in_flight)}}
