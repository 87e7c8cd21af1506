"""Whether what a person orders of a cell can be done: pure, asked by the leader before it writes anything.

Each function returns why not, in one line for people; an empty line: it can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gyre.ids import CellId, NodeId
from gyre.store.records import CellRoleRecord, Role

ORDERED = (Role.ROLLOUT, Role.TRAIN)
"""The roles that can be ordered; the others are the stages of a switch."""


def refuse_switch(
    cell: CellId, role: Role, roles: Mapping[CellId, CellRoleRecord], pins: Mapping[CellId, Role], water_level: int
) -> str:
    """Why `cell` cannot be ordered to `role` now. `water_level` counts the runs that wait or live."""
    if fault := _fault(cell, role, roles):
        return fault
    seen = roles[cell]
    if cell in pins and pins[cell] is not role:
        return f"{cell} is pinned to {pins[cell].value}; unpin it first"
    if seen.desired is role and not seen.came_back:
        where = "is there already" if seen.observed is role else f"is on its way there ({seen.observed.value})"
        return f"{cell} {where}"
    others = [other for name, other in roles.items() if name != cell and other.observed is not Role.FAILED]
    if role is Role.TRAIN and water_level and not any(other.desired is Role.ROLLOUT for other in others):
        return f"{cell} is the last one that serves, and {water_level} runs are queued or live"
    return ""


def refuse_pin(cell: CellId, role: Role, roles: Mapping[CellId, CellRoleRecord], pins: Mapping[CellId, Role]) -> str:
    """Why `cell` cannot be pinned to `role`."""
    if fault := _fault(cell, role, roles):
        return fault
    if role is Role.TRAIN and all(pins.get(other) is Role.TRAIN for other in roles if other != cell):
        return f"{cell} is the last one that is not pinned to train, so no run would be served any more"
    return ""


def standing_orders(
    pins: Mapping[CellId, Role], homes: Mapping[CellId, NodeId], draining: Collection[NodeId]
) -> dict[CellId, Role]:
    """The role that a cell must have, by a person's word: pins, and training for those of nodes that drain.

    So a draining node's engines hand their requests on, with their KV, and nothing is lost when it ends. While no other
    cell could serve, they stay as they are. `homes` has the node of each cell that works.
    """
    leaving = {cell for cell, node in homes.items() if node in draining}
    if all(cell in leaving or pins.get(cell) is Role.TRAIN for cell in homes):
        return dict(pins)
    return {**pins, **dict.fromkeys(leaving, Role.TRAIN)}


def _fault(cell: CellId, role: Role, roles: Mapping[CellId, CellRoleRecord]) -> str:
    if cell not in roles:
        return f"there is no cell {cell}; there are {', '.join(sorted(roles)) or 'none yet'}"
    if role not in ORDERED:
        return f"{role.value} cannot be ordered; rollout and train can"
    return ""
