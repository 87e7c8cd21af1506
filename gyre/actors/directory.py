"""Who is where in the cluster, as the state store tells: its nodes, its cells, its core and its leader.

A node's membership actor keeps it true by watches. Whoever acts by it subscribes, and is called after each change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gyre.actors.mirror import Mirror
from gyre.ids import CellId, NodeId
from gyre.sched.placement import Room
from gyre.store.records import (
    CellSpecRecord,
    ChildRecord,
    CoreRecord,
    DrainRecord,
    Keys,
    LeaderRecord,
    NodeRecord,
    SnapshotRecord,
)
from gyre.store.typed import TypedStore, Versioned


class Directory:
    """Plain questions about the mirrored records. Nothing is known before `listed`."""

    def __init__(self, store: TypedStore, keys: Keys) -> None:
        self._keys = keys
        self._nodes = Mirror(store, keys.nodes, NodeRecord)
        self._specs = Mirror(store, keys.cells, CellSpecRecord)
        self._children = Mirror(store, keys.children, ChildRecord)
        self._drains = Mirror(store, keys.drains, DrainRecord)
        self._core = Mirror(store, keys.core, CoreRecord)
        self._leader = Mirror(store, keys.leader, LeaderRecord)
        self._snapshot = Mirror(store, keys.snapshot, SnapshotRecord)
        self._called: list[Callable[[], None]] = []

    @property
    def mirrors(self) -> tuple[Mirror[Any], ...]:
        return (self._nodes, self._specs, self._children, self._drains, self._core, self._leader, self._snapshot)

    @property
    def listed(self) -> bool:
        return all(mirror.listed for mirror in self.mirrors)

    def subscribe(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have `call` called after each change. Returns what takes it back."""
        self._called.append(call)
        return lambda: self._called.remove(call)

    def changed(self) -> None:
        for call in tuple(self._called):
            call()

    # ------------------------------------------------------------------------------------------ nodes and cells

    @property
    def nodes(self) -> dict[NodeId, Versioned[NodeRecord]]:
        """The nodes that are there."""
        return {item.record.node: item for item in self._nodes.items.values()}

    def node(self, node: NodeId) -> NodeRecord | None:
        found = self._nodes.items.get(self._keys.node(node))
        return None if found is None else found.record

    @property
    def drains(self) -> dict[NodeId, Versioned[DrainRecord]]:
        """What a person has said of nodes that are to have no work any more."""
        return {item.record.node: item for item in self._drains.items.values()}

    @property
    def draining(self) -> set[NodeId]:
        return set(self.drains)

    @property
    def rooms(self) -> list[Room]:
        """The nodes that are there, as runs are given to them."""
        drains = self.drains
        return [Room(node, item.record.max_live, node in drains) for node, item in self.nodes.items()]

    @property
    def specs(self) -> list[CellSpecRecord]:
        """Every cell that has ever joined, by name."""
        return sorted(self._specs.records, key=lambda spec: spec.cell)

    @property
    def cells(self) -> list[CellSpecRecord]:
        """The cells of the nodes that are there, by name."""
        there = self.nodes
        return [spec for spec in self.specs if spec.node in there]

    def node_of(self, cell: CellId) -> NodeId | None:
        found = self._specs.items.get(self._keys.cell_spec(cell))
        return None if found is None else found.record.node

    def child(self, node: NodeId, name: str) -> ChildRecord | None:
        """Where another node reaches a child process of `node`."""
        found = self._children.items.get(self._keys.child(node, name))
        return None if found is None else found.record

    # ------------------------------------------------------------------------------------------ offices

    @property
    def core(self) -> Versioned[CoreRecord] | None:
        return self._core.items.get(self._keys.core)

    @property
    def leader(self) -> NodeId | None:
        found = self._leader.items.get(self._keys.leader)
        return None if found is None else found.record.node

    @property
    def snapshot(self) -> Versioned[SnapshotRecord] | None:
        return self._snapshot.items.get(self._keys.snapshot)
