"""The simulator finds what it is for: with a fence, a compare or an acknowledgement taken out of the product, some seed
fails, and says so by the invariant that was broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gyre.actors import campaign as campaign_module
from gyre.actors import publication as publication_module
from gyre.actors import scheduler as scheduler_module
from gyre.actors import term as term_module
from gyre.actors.cell import CellActor
from gyre.actors.core import CoreActor
from gyre.actors.messages import ClusterChanged, DrainEngine, Lead
from gyre.actors.node import NodeActor
from gyre.actors.scheduler import SchedulerActor
from gyre.actors.supervision import Died
from gyre.proxy.leftovers import Leftovers
from gyre.sched import cell as role
from gyre.store import election
from gyre.store.protocol import Txn
from gyre.store.records import CellRoleRecord, Keys

from . import net as net_module
from .faults import Fault, Kind
from .world import simulate

SEEDS = range(40)


def first_violation(*events: Fault) -> str:
    """What the first failing seed says, with these faults in place of its own; empty where every seed settles."""
    return next((found for seed in SEEDS if (found := simulate(seed, events).violation)), "")


def without_compares(txn: Txn, keys: Sequence[str]) -> Txn:
    return replace(txn, compares=tuple(compare for compare in txn.compares if compare.key not in keys))


def test_a_leaders_writes_without_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfenced(keys: Keys, *args: Any, **rest: Any) -> Txn:
        return without_compares(election.fenced_txn(keys, *args, **rest), [keys.leader])

    monkeypatch.setattr(term_module, "fenced_txn", unfenced)
    late = [Fault(2.0, Kind.CUT_AT_WRITE, "n0 groups", 5.7)]  # a write that was sent in time comes when another leads
    assert "leads" in first_violation(*late)


def test_a_campaign_that_does_not_look_whether_somebody_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_all(keys: Keys, *args: Any) -> Txn:
        return without_compares(election.campaign_txn(keys, *args), [keys.leader])

    monkeypatch.setattr(campaign_module, "campaign_txn", over_all)
    assert "leads" in first_violation()


def test_a_leader_that_leads_until_it_is_told_that_its_lease_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told when the handler in hand has ended, which waits for the store as everything does."""

    async def deposed(self: SchedulerActor, message: Any) -> None:
        self.term.begin(0)

    monkeypatch.setattr(term_module.Term, "token", property(lambda self: self._begun))
    _replace_handler(monkeypatch, SchedulerActor, scheduler_module._Deposed, deposed)
    assert "goes by token" in first_violation(*(Fault(2.0, Kind.CUT, f"{node} store", 9.0) for node in ("n0", "n1")))


def test_a_publication_that_does_not_compare_what_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(keys: Keys, token: int, old: Any, new: Any, puts: Any = (), compares: Any = ()) -> Txn:
        groups = [put.key for put in puts if "/groups/" in put.key]
        return without_compares(
            election.publish_snapshot_txn(keys, token, old, new, puts, compares), [keys.snapshot, keys.job, *groups]
        )

    monkeypatch.setattr(publication_module, "publish_snapshot_txn", blind)
    cut = [Fault(1.0, Kind.CUT_AT_WRITE, "n0 snapshot", 8.0, 1.0)]
    assert "was published after" in first_violation(*cut)


def test_a_core_that_follows_the_token_that_it_heard_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lead(self: CoreActor, message: Lead) -> None:
        self._token = self._newest_token = message.token
        await self._step_if_due()

    _replace_handler(monkeypatch, CoreActor, Lead, lead)
    assert "has not ended" in first_violation(Fault(1.0, Kind.CUT_AT_WRITE, "n0 snapshot", 8.0))


def test_a_cell_that_does_not_wait_for_its_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stage(self: CellActor, action: role.Action) -> role.Event:
        if isinstance(action, role.Drain):
            self._site.gateway.tell(DrainEngine(self._cell, action.move))
            return role.Drained()
        return await true(self, action)

    true = CellActor._stage
    monkeypatch.setattr(CellActor, "_stage", stage)
    slow = [Fault(0.0, Kind.SLOW, f"drain c{cell}", 0.0, 3.0) for cell in range(3)]
    assert "released its memory under" in first_violation(*slow)


CUT_OFF = [Fault(4.0, Kind.CUT, "n0 n1", 16.5), Fault(4.2, Kind.BREAK, "n0 n1")]
"""The gateway loses its connections to the engines of a node, which are not told."""


def test_a_call_that_goes_on_elsewhere_though_its_engine_has_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leftovers, "has", lambda *_: False)
    assert "is live on" in first_violation(*CUT_OFF)


def test_an_engine_that_samples_on_for_a_gateway_of_which_it_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net_module, "UNHEARD_S", 60.0)
    assert "is live on" in first_violation(*CUT_OFF)


def test_a_cell_that_does_not_tell_of_its_engine_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tells_nobody(self: CellActor, message: ClusterChanged) -> None: ...

    _replace_handler(monkeypatch, CellActor, ClusterChanged, tells_nobody)
    assert "the gateway has not known it" in first_violation(Fault(1.9, Kind.CRASH, "n0", 1.0))


def test_a_runs_end_that_the_node_does_not_take_note_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(self: NodeActor, message: Died) -> None: ...

    _replace_handler(monkeypatch, NodeActor, Died, gone)
    assert "nobody has seen to it" in first_violation()


def test_an_order_that_a_cell_could_not_follow_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CellRoleRecord, "came_back", property(lambda _: False))
    drains = [Fault(1.0, Kind.FAIL, "drain c0")]
    assert "has not ended" in first_violation(*drains)


def _replace_handler(monkeypatch: pytest.MonkeyPatch, actor: type, message: type, method: Any) -> None:
    handlers = dict(actor._handlers)  # type: ignore[attr-defined]
    _, *rest = handlers[message]
    monkeypatch.setattr(actor, "_handlers", {**handlers, message: (method, *rest)})
