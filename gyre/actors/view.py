"""What a leader decides by, beside the directory: mirrors of the job's groups, runs, roles, switches and pins."""

from __future__ import annotations

from typing import Any

from gyre.actors.mirror import Mirror
from gyre.ids import CellId, RunId
from gyre.store.records import (
    CellRoleRecord,
    GroupRecord,
    Keys,
    PinRecord,
    Role,
    RunRecord,
    SwitchRecord,
)
from gyre.store.typed import TypedStore, Versioned


class View:
    """Nothing is known before `listed`."""

    def __init__(self, store: TypedStore, keys: Keys) -> None:
        self._keys = keys
        self.groups = Mirror(store, f"{keys.root}groups/", GroupRecord)
        self.runs = Mirror(store, f"{keys.root}runs/", RunRecord)
        self.roles = Mirror(store, keys.roles, CellRoleRecord)
        self.switches = Mirror(store, f"{keys.root}switches/", SwitchRecord)
        self.pins = Mirror(store, f"{keys.root}pins/", PinRecord)

    @property
    def mirrors(self) -> tuple[Mirror[Any], ...]:
        return (self.groups, self.runs, self.roles, self.switches, self.pins)

    @property
    def listed(self) -> bool:
        return all(mirror.listed for mirror in self.mirrors)

    def run(self, run: RunId) -> RunRecord | None:
        found = self.runs.items.get(self._keys.run(run))
        return None if found is None else found.record

    @property
    def seen_roles(self) -> dict[CellId, Versioned[CellRoleRecord]]:
        return {self._keys.cell_of(key): seen for key, seen in self.roles.items.items()}

    @property
    def pinned(self) -> dict[CellId, Role]:
        return {pin.cell: pin.role for pin in self.pins.records}
