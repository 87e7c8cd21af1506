"""The simulator finds what it is for: with a fence, a compare or an acknowledgement taken out of the product, some seed
fails, and says so by the invariant that was broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gyre.actors import campaign as campaign_module
from gyre.actors import journal_copies as journal_copies_module
from gyre.actors import publication as publication_module
from gyre.actors import scheduler as scheduler_module
from gyre.actors import term as term_module
from gyre.actors.cell import CellActor
from gyre.actors.core import CoreActor
from gyre.actors.membership import MembershipActor
from gyre.actors.messages import ClusterChanged, DrainEngine, DrainReport, RunEnded
from gyre.actors.messages_core import Lead
from gyre.actors.messages_journals import Held
from gyre.actors.node import NodeActor
from gyre.actors.places import Places
from gyre.actors.scheduler import SchedulerActor
from gyre.actors.supervision import Died
from gyre.errors import Refused, StorageFull
from gyre.ids import NodeId, RunId
from gyre.proxy.held_copies import HeldCopies
from gyre.proxy.leftovers import Leftovers
from gyre.proxy.replication import ReplicaLink
from gyre.sched import cell as role
from gyre.store import election
from gyre.store.protocol import Lease, Put, Txn
from gyre.store.records import CellRoleRecord, Keys, RunRecord
from gyre.store.typed import put_record

from . import net as net_module
from . import store as store_module
from .faults import Fault, Kind
from .world import simulate

ROOM = 40
"""Seeds that a test plays, so that it is no matter when one of them fails no more."""


def found(says: str, start: int) -> bool:
    """Whether one of the seeds from `start` on, with the faults that it draws itself, fails and says this. From 0 on it
    takes up to a few hundred; each test begins at a seed near one that fails."""
    return any(says in simulate(seed).violation for seed in range(start, start + ROOM))


def without_compares(txn: Txn, keys: Sequence[str]) -> Txn:
    return replace(txn, compares=tuple(compare for compare in txn.compares if compare.key not in keys))


def test_a_leaders_writes_without_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfenced(keys: Keys, *args: Any, **rest: Any) -> Txn:
        return without_compares(election.fenced_txn(keys, *args, **rest), [keys.leader])

    monkeypatch.setattr(term_module, "fenced_txn", unfenced)
    assert found("leads", 221)


def test_a_campaign_that_does_not_look_whether_somebody_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_all(keys: Keys, *args: Any) -> Txn:
        return without_compares(election.campaign_txn(keys, *args), [keys.leader])

    monkeypatch.setattr(campaign_module, "campaign_txn", over_all)
    assert found("leads", 0)


def test_a_leader_that_leads_until_it_is_told_that_its_lease_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told when the handler in hand has ended, which waits for the store as everything does."""
    true, *_ = SchedulerActor._handlers[scheduler_module._Tick]

    async def tick(self: SchedulerActor, message: Any) -> None:
        if not self._campaign.token:
            self.term.begin(0)
        await true(self, message)

    monkeypatch.setattr(term_module.Term, "token", property(lambda self: self._begun))
    _replace_handler(monkeypatch, SchedulerActor, scheduler_module._Tick, tick)
    assert found("goes by token", 20)


def test_a_publication_that_does_not_compare_what_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(keys: Keys, token: int, old: Any, new: Any, puts: Any = (), compares: Any = ()) -> Txn:
        groups = [put.key for put in puts if "/groups/" in put.key]
        return without_compares(
            election.publish_snapshot_txn(keys, token, old, new, puts, compares), [keys.snapshot, keys.job, *groups]
        )

    monkeypatch.setattr(publication_module, "publish_snapshot_txn", blind)
    assert found("was published after", 1196)


def test_a_gyred_that_does_not_look_whose_its_nodes_record_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def over_all(self: MembershipActor, lease: Lease, *others: Put) -> None:
        site = self._site
        me = put_record(site.keys.node(site.node), self._me(), lease.id)
        await site.store.commit(Txn(puts=(me, *others)))

    monkeypatch.setattr(MembershipActor, "_write_me", over_all)
    assert found("two gyreds", 8)


def test_a_core_that_follows_the_token_that_it_heard_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lead(self: CoreActor, message: Lead) -> None:
        self._token = self._newest_token = message.token
        await self._step_if_due()

    _replace_handler(monkeypatch, CoreActor, Lead, lead)
    assert found("has not ended", 148)


def test_a_cell_that_does_not_wait_for_its_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stage(self: CellActor, action: role.Action) -> role.Event:
        if isinstance(action, role.Drain):
            order = self._site.gateway.ask(DrainEngine(self._cell, action.move), 60.0, DrainReport)
            self.task(order, on_error=lambda _: None)
            return role.Drained()
        return await true(self, action)

    true = CellActor._stage
    monkeypatch.setattr(CellActor, "_stage", stage)
    assert found("released its memory under", 0)


def test_a_call_that_goes_on_elsewhere_though_its_engine_has_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leftovers, "has", lambda *_: False)
    assert found("is live on", 2)


def test_an_engine_that_samples_on_for_a_gateway_of_which_it_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net_module, "UNHEARD_S", 60.0)
    assert found("is live on", 463)


def test_a_cell_that_does_not_tell_of_its_engine_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tells_nobody(self: CellActor, message: ClusterChanged) -> None: ...

    _replace_handler(monkeypatch, CellActor, ClusterChanged, tells_nobody)
    assert found("the gateway has not known it", 414)


def test_a_runs_end_that_the_node_does_not_take_note_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(self: NodeActor, message: Died) -> None: ...

    _replace_handler(monkeypatch, NodeActor, Died, gone)
    assert found("nobody has seen to it", 0)


def test_an_order_that_a_cell_could_not_follow_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CellRoleRecord, "came_back", property(lambda _: False))
    assert found("has not ended", 138)


def test_actors_that_do_not_wait_for_a_store_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "StoreRefuses", Refused)
    assert found("by itself", 37)


def test_actors_that_do_not_wait_for_a_store_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "StoreFull", StorageFull)
    assert found("by itself", 38)


def test_a_handler_that_raises_and_whose_actor_is_there_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def raises(self: NodeActor, message: RunEnded) -> None:
        await run_ended(self, message)
        if message.run.endswith("1"):
            raise KeyError(message.run)

    run_ended = NodeActor.on_run_ended
    _replace_handler(monkeypatch, NodeActor, RunEnded, raises)
    assert found("failed in RunEnded by itself", 0)


# ------------------------------------------------------------------------------------------ copies of journals


def test_a_closed_run_whose_copy_counts_as_whole_before_the_peer_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unasked(self: ReplicaLink) -> None:
        self._whole = True

    monkeypatch.setattr(ReplicaLink, "_put_away", unasked)
    assert found("is said to have a whole copy", 2)


def test_a_peer_that_answers_before_the_copy_is_put_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldCopies, "put_away", lambda *_: Held(0, 0))
    assert found("has a copy of what", 58)


def test_a_leader_that_takes_runs_for_kept_before_a_node_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kept(self: Places, runs: Sequence[RunRecord], now_s: float) -> dict[RunId, NodeId]:
        return {run.run: node for run in runs for node in self._site.directory.nodes}

    monkeypatch.setattr(Places, "_kept", kept)
    assert found("which has not taken it over", 58)


def test_a_leader_that_does_not_ask_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(self: Places, runs: Sequence[RunRecord], now_s: float) -> dict[RunId, NodeId]:
        return {}

    monkeypatch.setattr(Places, "_kept", none)
    assert found("has a copy of what", 58)


def test_runs_that_are_run_again_though_they_were_trained_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """With faults of our own: the step has to end within the moment that the leader looks at what a node had that it has
    just given up, which no seed of hundreds meets."""

    def blind(keys: Keys, token: int, compares: Any, puts: Any, deletes: Any) -> Txn:
        """Groups and runs that are written together, and were there before, are those of a node that is gone."""
        written = [put.key for put in puts]
        both = all(any(kind in key for key in written) for kind in ("/groups/", "/runs/"))
        txn = election.fenced_txn(keys, token, compares, puts, deletes)
        return without_compares(txn, written) if both and {each.key for each in compares} == set(written) else txn

    monkeypatch.setattr(term_module, "fenced_txn", blind)
    tries = (
        simulate(
            seed,
            [
                Fault(0.0, Kind.SLOW, "step c0", 0.0, step_s),
                Fault(step_s + 4.0, Kind.SLOW_NET, "n0 n2", 17.0, 0.8),
                Fault(dies_s, Kind.DIE, "n1"),
            ],
        ).violation
        for step_s in (13.0, 14.0, 15.0, 16.0)
        for dies_s in (9.0, 8.0, 10.0)
        for seed in range(ROOM)
    )
    assert any("went back" in each for each in tries)


def test_a_core_that_looks_for_tokens_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stays(self: CoreActor, batch: Any, group: Any) -> None: ...

    monkeypatch.setattr(CoreActor, "_settled_again", stays)
    assert found("has not ended", 219)


def test_a_copy_that_is_kept_when_its_run_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_copies_module, "is_of_use", lambda *_: True)
    assert found("has a copy of", 112)


def _replace_handler(monkeypatch: pytest.MonkeyPatch, actor: type, message: type, method: Any) -> None:
    handlers = dict(actor._handlers)  # type: ignore[attr-defined]
    _, *rest = handlers[message]
    monkeypatch.setattr(actor, "_handlers", {**handlers, message: (method, *rest)})
