"""Which engine a call goes to: a pure function of the routes and of what is in flight."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gyre.actors.messages import EngineRoute
from gyre.ids import CellId

CROWDING = 4
"""Requests by which a run's own engine may be fuller than the emptiest one before the run moves: a moved run leaves
its cached prefix behind, a crowded engine is slower for all."""


def open_engines(routes: Iterable[EngineRoute], version: int, closed: Collection[CellId]) -> dict[CellId, EngineRoute]:
    """The engines that may get a request: accepting, at the authoritative version, and not closed by the gateway."""
    return {
        route.cell: route
        for route in routes
        if route.accepting and route.version == version and route.cell not in closed
    }


def choose(
    engines: Mapping[CellId, EngineRoute], in_flight: Mapping[CellId, int], home: CellId | None
) -> CellId | None:
    """The cell for a run's next request: the one it was on, unless that is crowded; else the emptiest; None if none."""
    if not engines:
        return None
    emptiest = min(engines, key=lambda cell: (in_flight.get(cell, 0), cell))
    if home is not None and home in engines and in_flight.get(home, 0) <= in_flight.get(emptiest, 0) + CROWDING:
        return home
    return emptiest
