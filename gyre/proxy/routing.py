"""Which engine a call goes to: pure functions of the routes, of what is in flight, and of what the engines hold.

A run stays with the engine that holds its prefix for as long as that serves it without slowing. So an engine that joins
gets new runs, and those that their own has no slot for; and when one leaves, its runs move and no others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gyre.actors.messages import EngineRoute
from gyre.ids import CellId

OVERBOOKING = 2
"""Requests that an engine is given for each of its slots; the others wait in the gateway's queue, where they are still
free to go elsewhere."""
UNEVEN = 4
"""Engines differ noticeably when one has more in flight than another by its slots over this: for less than that no run
leaves its prefix behind, and for more no shared prefix is worth going to a full engine."""


def open_engines(routes: Iterable[EngineRoute], version: int, closed: Collection[CellId]) -> dict[CellId, EngineRoute]:
    """The engines that may get a request: accepting, at the authoritative version, and not closed by the gateway."""
    return {
        route.cell: route
        for route in routes
        if route.accepting and route.version == version and route.cell not in closed
    }


def has_room(route: EngineRoute, in_flight: int) -> bool:
    """Whether the engine can take one more request now."""
    return in_flight < route.slots * OVERBOOKING


def choose(
    engines: Mapping[CellId, EngineRoute],
    in_flight: Mapping[CellId, int],
    home: CellId | None,
    held: Mapping[CellId, int],
) -> CellId | None:
    """The cell for a request now, among open engines; None while no engine has room.

    `home` is where the request's own prefix was computed, or its run's last request; `held` the tokens of it that
    others have computed on a cell (a group's runs begin with one prompt).
    """
    load = {cell: in_flight.get(cell, 0) for cell, route in engines.items() if has_room(route, in_flight.get(cell, 0))}
    if not load:
        return None
    lowest = min(load.values())
    near = [cell for cell, count in load.items() if count <= lowest + max(1, engines[cell].slots // UNEVEN)]
    if home is not None and home in load and (home in near or load[home] < engines[home].slots):
        return home
    return min(near, key=lambda cell: (-held.get(cell, 0), load[cell], cell))
