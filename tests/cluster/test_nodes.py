"""A job on several nodes: whichever of them is killed, restarted or cut off, every run settles and every step is taken once."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gyre.children import Children
from gyre.ids import CellId, NodeId, RunId
from gyre.proxy.held_copies import HeldCopies
from gyre.store.records import CellRoleRecord, CoreRecord, LeaderRecord, NodeRecord, Role, RunState

from .etcd_server import PlainEtcd
from .fleet import Fleet, Node
from .history import begin_history, check_leaders, history


@pytest.fixture
def make_fleet(tmp_path: Path, plain_etcd: PlainEtcd) -> Iterator[Callable[..., Fleet]]:
    """Makes the test's cluster. After the test no process of it may be left."""
    fleets: list[Fleet] = []

    def make(names: str = "abc", **settings: dict[str, Any]) -> Fleet:
        fleets.append(Fleet.make(tmp_path / "fleet", plain_etcd.url, names, **settings))
        return fleets[-1]

    yield make
    left = [fleet.processes() for fleet in fleets]
    for fleet in fleets:
        fleet.kill_all()
    assert not any(left), left


async def at_the_gate(fleet: Fleet) -> None:
    """The gated task's runs are live, and nothing else is to be done."""

    async def there() -> bool:
        runs = [run for run in await fleet.runs() if run.run.startswith("t")]
        gated = [run for run in runs if run.state is not RunState.SETTLED]
        return len(runs) == 6 and len(gated) == 3 and all(f"{r.run}/{r.attempt}" in fleet.harnesses() for r in gated)

    for _ in range(1200):
        if await there():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the runs did not come to their gate; {fleet.tail()}")


async def test_a_job_on_three_nodes_and_one_that_joins_late(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(job={"steps": 3}, batch={"micro_step_tokens": 64}, scheduler={"min_work_switches": 1e-6})
    late = fleet.nodes.pop("c")
    fleet.begin()
    await at_the_gate(fleet)
    fleet.nodes["c"] = late
    late.start()
    await fleet.until_record("node c", fleet.keys.node("c"), NodeRecord, bool)  # type: ignore[arg-type]
    fleet.open_gate()
    await fleet.finished()
    books = await fleet.check_books(3)
    assert len({run.node for run in books.runs}) == 3, "every node had runs"
    fleet.stop()


async def test_gyred_of_every_node_is_killed_and_no_run_notices(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet("ab")
    fleet.begin()
    await at_the_gate(fleet)
    before = fleet.harnesses("t*")
    for node in fleet.nodes.values():
        node.signal(signal.SIGKILL)
    for node in fleet.nodes.values():
        node.start()
    await fleet.until(lambda: all("adopted the gateway" in node.log for node in fleet.nodes.values()), "adoption")
    assert fleet.harnesses("t*") == before
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2)
    fleet.stop()


async def test_the_node_that_leads_and_has_the_core_dies_and_another_takes_over(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet(job={"steps": 3})
    fleet.begin()
    fleet.open_gate()
    await fleet.until_record_of_steps(1)
    core = await fleet.core()
    dead = fleet.nodes[core.node]
    fleet.kill(dead)
    after = await fleet.until_record("another core", fleet.keys.core, CoreRecord, lambda now: now.node != core.node)
    assert isinstance(after, CoreRecord)
    await fleet.finished()
    moved = [run.run for run in await fleet.runs() if run.attempt > 1]
    await fleet.check_books(3, hurt=moved)
    fleet.stop()


async def test_a_leader_that_sleeps_through_its_lease_has_lost_it(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    await begin_history(fleet.store_url)
    fleet.begin()
    await at_the_gate(fleet)
    old = await fleet.leader()
    fleet.nodes[old].signal(signal.SIGSTOP)
    new = await fleet.until_record("another leader", fleet.keys.leader, LeaderRecord, lambda now: now.node != old)
    assert isinstance(new, LeaderRecord)
    fleet.nodes[old].signal(signal.SIGCONT)
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.attempt > 1])
    terms = check_leaders(await history(fleet.store_url), fleet.keys)
    assert (old, new.node) in itertools.pairwise(term.node for term in terms)
    fleet.stop()


async def test_a_node_that_drains_gets_no_run_any_more_and_serves_none(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(job={"steps": 3})
    fleet.begin()
    await at_the_gate(fleet)
    core = await fleet.core()
    drained = next(name for name in fleet.nodes if name != core.node)
    fleet.gyrectl("node", "drain", drained)
    had = {run.run for run in await fleet.runs() if run.node == drained}
    cell = fleet.keys.cell_role(CellId(f"{drained}-c0"))
    await fleet.until_record("its cell serves no more", cell, CellRoleRecord, lambda now: now.observed is Role.TRAIN)
    fleet.open_gate()
    await fleet.finished()
    books = await fleet.check_books(3)
    assert {run.run for run in books.runs if run.node == drained} <= had
    fleet.stop()


async def test_a_peer_freezes_and_dies_and_another_has_the_copies_of_all_that_is_not_trained(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet(scheduler={"min_work_switches": 1e-6})
    for node in fleet.nodes.values():  # the first one leads, and has the core
        node.start()
        if node.name == "a":
            fleet.submit()
            assert (await fleet.core()).node == "a"
        await fleet.until_record(node.name, fleet.keys.node(NodeId(node.name)), NodeRecord, lambda _: True)
    fleet.gyrectl("cell", "pin", "a-c0", "rollout", "--yes")  # nothing is trained yet
    await at_the_gate(fleet)
    before = {run.run: run for run in await fleet.runs()}
    mine = {run.run: run.state for run in before.values() if run.node == "a" and run.run.startswith("t")}
    assert RunState.LIVE in mine.values()
    first, second = fleet.nodes["b"], fleet.nodes["c"]
    await fleet.until(lambda: copied(first, "a", mine), "the copies at the first peer")

    for child in Children(first.dir.state).adopt().values():
        child.signal(signal.SIGSTOP)
    first.signal(signal.SIGSTOP)
    await fleet.until(lambda: copied(second, "a", mine), "the copies at the next")
    assert json.loads(fleet.gyrectl("node", "show", "a", "--json"))["copies_on"] == "c"
    fleet.kill(first)
    fleet.gyrectl("cell", "unpin", "a-c0")
    fleet.open_gate()
    await fleet.finished()
    again = {run.run for run in await fleet.runs() if run.attempt > 1}
    assert again <= {run.run for run in before.values() if run.node == "b" and run.state is RunState.LIVE}
    await fleet.check_books(2, hurt=sorted(again))
    assert [each for each in HeldCopies(second.dir.copies).places() if each.copy_of == "a" and each.run in mine] == []
    fleet.stop()


def copied(peer: Node, writer: str, runs: Mapping[RunId, RunState]) -> bool:
    """Whether the peer has whole copies of the runs that have settled, and some of those that live."""
    places = {(each.run, each.open) for each in HeldCopies(peer.dir.copies).places() if each.copy_of == writer}
    return places >= {(run, state is RunState.LIVE) for run, state in runs.items()}


async def test_etcd_is_away_for_a_minute_and_what_was_going_on_goes_on(
    make_fleet: Callable[..., Fleet], plain_etcd: PlainEtcd
) -> None:
    fleet = make_fleet()
    fleet.begin()
    await at_the_gate(fleet)
    before = fleet.harnesses("t*")
    plain_etcd.member.signal(signal.SIGSTOP)
    await asyncio.sleep(60.0)
    assert fleet.harnesses("t*") == before
    plain_etcd.member.signal(signal.SIGCONT)
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.attempt > 1])
    fleet.stop()
