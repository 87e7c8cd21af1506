"""The engines as the gateway uses them: who may be asked, who sits where, and who waits.

A call takes a `Seat` before it asks an engine and gives it back after. While no engine is open the calls wait here,
and the run that has waited longest is seated first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from gyre.actors.messages import EngineRoute, SetRoutes
from gyre.engine.client import EngineClient
from gyre.ids import CellId, RunId
from gyre.proxy.faults import Fault, FaultKind
from gyre.proxy.routing import choose, open_engines

SUSPICION_S = 1.0
"""How long an engine that failed a call is left alone, unless new routes say otherwise."""


class Sitter(Protocol):
    """What sits: a generation."""

    run: RunId


@dataclass(eq=False)
class Seat:
    cell: CellId
    version: int
    client: EngineClient
    sitter: Sitter


@dataclass(eq=False)
class _Waiting:
    sitter: Sitter
    since: float
    called: asyncio.Event
    seat: Seat | None = None


class Engines:
    """`wait_s` bounds a call's wait for an engine; `key` is what engines want of their clients."""

    def __init__(self, wait_s: float, key: str = "") -> None:
        self._wait_s = wait_s
        self._key = key
        self._version = -1
        self._routes: dict[CellId, EngineRoute] = {}
        self._clients: dict[str, EngineClient] = {}
        self._draining: set[CellId] = set()
        self._suspects: dict[CellId, asyncio.TimerHandle] = {}
        self._seats: set[Seat] = set()
        self._waiting: list[_Waiting] = []
        self._homes: dict[RunId, CellId] = {}

    # ------------------------------------------------------------------------------------------ routes

    async def set_routes(self, order: SetRoutes) -> None:
        self._version = order.version
        self._routes = {route.cell: route for route in order.engines}
        for route in order.engines:
            if route.accepting:
                self._draining.discard(route.cell)
            self._trust(route.cell)
            if route.url not in self._clients:
                self._clients[route.url] = EngineClient(route.url, key=self._key)
        self._draining &= set(self._routes)
        self._seat_waiting()
        held = {id(seat.client) for seat in self._seats}
        urls = {route.url for route in order.engines}
        for url in [url for url, client in self._clients.items() if url not in urls and id(client) not in held]:
            await self._clients.pop(url).close()

    def close_cell(self, cell: CellId) -> None:
        """No new request to `cell` until routes say that it accepts."""
        self._draining.add(cell)

    def suspect(self, cell: CellId) -> None:
        """`cell` failed a call: leave it alone for a moment."""
        self._trust(cell)
        self._suspects[cell] = asyncio.get_running_loop().call_later(SUSPICION_S, self._forgive, cell)

    async def close(self) -> None:
        for cell in list(self._suspects):
            self._trust(cell)
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    # ------------------------------------------------------------------------------------------ seats

    def try_seat(self, sitter: Sitter) -> Seat | None:
        """A seat at once, or None while no engine is open."""
        engines = open_engines(self._routes.values(), self._version, self._draining | self._suspects.keys())
        cell = choose(engines, self._in_flight(), self._homes.get(sitter.run))
        if cell is None:
            return None
        seat = Seat(cell, engines[cell].version, self._clients[engines[cell].url], sitter)
        self._seats.add(seat)
        self._homes[sitter.run] = cell
        return seat

    async def seat(self, sitter: Sitter) -> Seat:
        """A seat as soon as there is one. Raises Fault(UNAVAILABLE) after the wait that is allowed."""
        seat = self.try_seat(sitter)
        if seat is not None:
            return seat
        waiting = _Waiting(sitter, asyncio.get_running_loop().time(), asyncio.Event())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._wait_s):
                await waiting.called.wait()
        except TimeoutError as error:
            if waiting.seat is None:
                raise Fault(FaultKind.UNAVAILABLE, f"no engine was open for {self._wait_s:.0f} s") from error
        except asyncio.CancelledError:
            if waiting.seat is not None:
                self.release(waiting.seat)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        assert waiting.seat is not None
        return waiting.seat

    def release(self, seat: Seat) -> None:
        self._seats.discard(seat)

    def sitters(self, cell: CellId) -> list[Sitter]:
        return [seat.sitter for seat in self._seats if seat.cell == cell]

    # ------------------------------------------------------------------------------------------ runs

    def home(self, run: RunId) -> CellId | None:
        return self._homes.get(run)

    def runs_at(self, cell: CellId) -> list[RunId]:
        return [run for run, home in self._homes.items() if home == cell]

    def next_home(self, run: RunId) -> CellId | None:
        """Where the run's next request would go."""
        engines = open_engines(self._routes.values(), self._version, self._draining | self._suspects.keys())
        return choose(engines, self._in_flight(), self._homes.get(run))

    def rehome(self, run: RunId, cell: CellId) -> None:
        self._homes[run] = cell

    def forget(self, run: RunId) -> None:
        self._homes.pop(run, None)

    # ------------------------------------------------------------------------------------------ reading

    @property
    def version(self) -> int:
        """The authoritative version."""
        return self._version

    def client(self, cell: CellId) -> EngineClient | None:
        route = self._routes.get(cell)
        return None if route is None else self._clients.get(route.url)

    def cell_version(self, cell: CellId) -> int:
        route = self._routes.get(cell)
        return -1 if route is None else route.version

    def clients(self) -> list[EngineClient]:
        return list(self._clients.values())

    def in_flight(self) -> dict[str, int]:
        """Requests in flight by cell, every known cell named."""
        counts = self._in_flight()
        return {cell: counts[cell] for cell in {*self._routes, *counts}}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # ------------------------------------------------------------------------------------------ private

    def _in_flight(self) -> Counter[CellId]:
        return Counter(seat.cell for seat in self._seats)

    def _seat_waiting(self) -> None:
        for waiting in sorted(self._waiting, key=lambda entry: entry.since):
            seat = self.try_seat(waiting.sitter)
            if seat is None:
                return
            self._waiting.remove(waiting)
            waiting.seat = seat
            waiting.called.set()

    def _trust(self, cell: CellId) -> None:
        handle = self._suspects.pop(cell, None)
        if handle is not None:
            handle.cancel()

    def _forgive(self, cell: CellId) -> None:
        self._suspects.pop(cell, None)
        self._seat_waiting()
