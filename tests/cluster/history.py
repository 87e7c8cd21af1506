"""All that was ever written to a cluster's etcd, in order, and by whom: what the leader alone may write was written by it.

Each transaction of a gyred writes a receipt of that process (gyre.store.etcd.receipts) at the same revision. So the
history tells of every write which life of which gyred made it.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from gyre.store import typed
from gyre.store.open import open_store
from gyre.store.protocol import Event, Put, Store
from gyre.store.records import (
    CellRoleRecord,
    GroupRecord,
    GroupState,
    Keys,
    LeaderRecord,
    RunRecord,
    SnapshotRecord,
)

from .etcd_server import CLUSTER

_BEGIN = f"/gyre/{CLUSTER}/the beginning of the history"


@dataclass(frozen=True)
class Term:
    """One leader's time."""

    token: int
    node: str
    life: str


@dataclass(frozen=True)
class Write:
    event: Event
    life: str
    """Which life of which gyred; empty for what nobody wrote: the end of a lease."""

    @property
    def key(self) -> str:
        return self.event.kv.key

    def now(self, cls: type[Any]) -> Any:
        return typed.unpack(self.event.kv.value, cls)

    def before(self, cls: type[Any]) -> Any:
        return None if self.event.previous is None else typed.unpack(self.event.previous.value, cls)


async def begin_history(url: str) -> None:
    """What was written until now is of no interest: an etcd that several tests use, one after the other."""
    store = open_store(url)
    try:
        await store.txn(puts=(Put(_BEGIN, b""),))
    finally:
        await store.close()


async def history(url: str) -> list[Write]:
    """Since its beginning."""
    store = open_store(url)
    try:
        begun = await store.get(_BEGIN)
        first = 1 if begun is None else begun.mod_revision
        last = (await store.txn(puts=(Put(f"/gyre/{CLUSTER}/the end of the history", b""),))).revision
        lives = {
            event.kv.mod_revision: event.kv.key.split("/")[2]
            for event in await _until(store, "gyre.receipts/", first, last)
        }
        return [
            Write(event, lives.get(event.kv.mod_revision, "") if event.kind == "put" else "")
            for event in await _until(store, "/gyre/", first, last)
        ]
    finally:
        await store.close()


async def _until(store: Store, prefix: str, first: int, last: int) -> list[Event]:
    found: list[Event] = []
    async with aclosing(store.watch(prefix, first)) as events:
        async for event in events:
            found.append(event)
            if event.kv.mod_revision == last:
                break
    return found


def check_leaders(writes: list[Write], keys: Keys) -> list[Term]:
    """Every write of a leader is by the one that led then, and the version was published once each. Who led."""
    terms: list[Term] = []
    now: Term | None = None
    versions: list[int] = []
    seen: defaultdict[str, int] = defaultdict(int)
    for write in writes:
        if write.key == keys.leader:
            if write.event.kind == "delete":
                now = None
            else:
                now = Term(write.event.kv.create_revision, write.now(LeaderRecord).node, write.life)
                terms.append(now)
            continue
        if write.event.kind != "put" or (what := _of_a_leader(write, keys)) is None:
            continue
        seen[what] += 1
        at = f"{write.key} at revision {write.event.kv.mod_revision}"
        assert now is not None, f"{at} was written while nobody led"
        if what == "publication":  # by the core, wherever it is, under the token of the leader
            if write.key == keys.snapshot:
                versions.append(write.now(SnapshotRecord).version)
        else:
            assert write.life == now.life, f"{at}, {what}, was written by life {write.life}, while {now} led"
        if what == "order":
            assert write.now(CellRoleRecord).token == now.token, (
                f"{at} has {write.now(CellRoleRecord)}, while {now} led"
            )
    assert versions == list(range(len(versions))), versions
    assert {"launch", "order", "publication", "placement"} <= seen.keys(), dict(seen)
    tokens = [term.token for term in terms]
    assert tokens == sorted(set(tokens))
    return terms


def _of_a_leader(write: Write, keys: Keys) -> str | None:
    """What only a leader writes; None for what others may."""
    if write.key == keys.core:
        return "office"
    if write.key == keys.snapshot or write.key.startswith(f"{keys.root}steps/"):
        return "publication"
    if write.key.startswith(f"{keys.root}groups/"):
        return "publication" if write.now(GroupRecord).state is GroupState.CONSUMED else "launch"
    if write.key.startswith(f"{keys.root}runs/"):
        run, before = write.now(RunRecord), write.before(RunRecord)
        return "placement" if before is None or before.node != run.node else None
    if write.key.startswith(keys.roles):
        before = write.before(CellRoleRecord)
        return "order" if before is not None and write.now(CellRoleRecord).epoch != before.epoch else None
    return None
