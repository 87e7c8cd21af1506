"""A job on several nodes: whichever of them is killed, restarted or cut off, every run settles and every step is taken once."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gyre.actors.snapshot_folders import held_by
from gyre.children import Children
from gyre.cli import client
from gyre.ids import CellId, NodeId, RunId
from gyre.proxy.held_copies import HeldCopies
from gyre.store.open import open_store
from gyre.store.protocol import Delete
from gyre.store.records import CellRoleRecord, CoreRecord, LeaderRecord, NodeRecord, Role, RunState, SnapshotRecord
from gyre.train.snapshot import list_snapshots, snapshot_path
from gyre.trajectory.records import Outcome

from .etcd_server import PlainEtcd, ports
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


@pytest.fixture
def fill() -> Iterator[Callable[[Path], None]]:
    """Makes a folder one on a disk of its own, which is full when one file or folder is there."""
    full: list[Path] = []

    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=2", "full", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
        full.append(folder)

    yield make
    for folder in full:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


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
    others = [node for node in fleet.nodes.values() if node is not dead]
    await fleet.until(lambda: all(1 in held_by(node.dir) for node in others), "snapshot 1 to be with every node")
    for node in others:
        assert held_by(node.dir)[1].is_relative_to("/dev/shm")
        assert not [version for version, _ in list_snapshots(node.dir.snapshots) if version], "no disk is needed for it"
    fleet.kill(dead)
    held = held_by(others[0].dir)[1]
    begun = held.stat().st_ino
    others[0].signal(signal.SIGKILL)
    others[0].start()
    await fleet.until(lambda: "adopted the gateway" in others[0].log, "adoption")
    assert held.stat().st_ino == begun, "a killed gyred finds in memory what it had"
    after = await fleet.until_record("another core", fleet.keys.core, CoreRecord, lambda now: now.node != core.node)
    assert isinstance(after, CoreRecord)
    begins_from = await fleet.until_record("a snapshot", fleet.keys.snapshot, SnapshotRecord, lambda _: True)
    assert isinstance(begins_from, SnapshotRecord)
    kept = snapshot_path(fleet.nodes[after.node].dir.snapshots, begins_from.version)
    await fleet.until(kept.is_dir, "what the new core begins from to be on its disk")
    await fleet.finished()
    assert not any(node.dir.snapshots_in_memory.exists() for node in fleet.nodes.values())
    moved = [run.run for run in await fleet.runs() if run.attempt > 1]
    await fleet.check_books(3, hurt=moved)
    fleet.stop()


async def test_a_second_gyred_of_a_nodes_name_is_refused_and_the_first_goes_on(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet("ab")
    fleet.begin()
    await at_the_gate(fleet)
    real = fleet.nodes["a"]
    file = real.file.read_text().replace(f'"{fleet.root / "a"}"', f'"{fleet.root / "twin"}"')
    address = next(line for line in file.splitlines() if line.startswith("address"))
    (port,) = ports(1)
    (fleet.root / "twin.toml").write_text(file.replace(address, f'address = "tls:127.0.0.1:{port}"'))
    twin = Node("twin", fleet.root)
    twin.start()
    assert twin.gyred is not None
    assert await asyncio.to_thread(twin.gyred.wait, 60.0) == 3, twin.log
    refused = twin.log.splitlines()[-1]
    assert f"another gyred, at {json.loads(address.partition('=')[2])}, is in the cluster as a;" in refused
    found = await fleet.until_record("node a", fleet.keys.node(NodeId("a")), NodeRecord, lambda _: True)
    assert isinstance(found, NodeRecord)
    assert found.address == json.loads(address.partition("=")[2])
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2)
    assert "has to join" not in real.log
    fleet.stop()


async def test_a_node_whose_record_is_gone_is_there_again(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet("ab")
    fleet.begin()
    await at_the_gate(fleet)
    key = fleet.keys.node(NodeId("b"))
    store = open_store(fleet.store_url)
    await store.txn(deletes=(Delete(key),))
    await store.close()
    await fleet.until_record("node b", key, NodeRecord, lambda _: True)
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.attempt > 1])
    fleet.stop()


async def test_a_snapshot_that_is_damaged_while_gyred_is_away_is_served_by_no_engine(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet("ab")
    fleet.begin()
    await at_the_gate(fleet)
    fleet.open_gate("t*")
    await fleet.until_record_of_steps(1)
    core = await fleet.core()
    node = next(node for node in fleet.nodes.values() if node.name != core.node)
    cell = CellId(f"{node.name}-c0")
    engine_log = node.dir.logs / f"engine-{cell}.log"

    async def serves() -> None:
        def enough(now: CellRoleRecord) -> bool:
            return (now.observed, now.version) == (Role.ROLLOUT, 1)

        await fleet.until_record("version 1 to be served", fleet.keys.cell_role(cell), CellRoleRecord, enough)

    await serves()
    node.signal(signal.SIGKILL)
    os.kill(Children(node.dir.state).adopt()[f"engine-{cell}"].pid, signal.SIGKILL)
    weights = held_by(node.dir)[1] / "model.safetensors"
    right = weights.read_bytes()
    wrong = bytearray(right)
    wrong[-4000:] = bytes(byte ^ 1 for byte in wrong[-4000:])
    weights.write_bytes(wrong)
    begun = engine_log.read_text().count("serving version")
    node.start()
    await fleet.until(lambda: engine_log.read_text().count("serving version") > begun, "the engine to serve again")
    await serves()
    assert "snapshot 1 is damaged here, and no engine gets it" in node.log
    assert (held_by(node.dir)[1] / "model.safetensors").read_bytes() == right
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.attempt > 1])
    fleet.stop()


async def test_what_fails_on_a_node_whose_disk_is_full_is_done_by_another(
    make_fleet: Callable[..., Fleet], fill: Callable[[Path], None]
) -> None:
    fleet = make_fleet("ab", harness={"max_live": 2, "attempts": 2})
    folder = fleet.nodes["b"].dir.runs
    fill(folder)
    fleet.begin()
    full = await fleet.until_record("b full", fleet.keys.node(NodeId("b")), NodeRecord, lambda now: now.trouble)
    assert isinstance(full, NodeRecord)
    assert full.trouble == f"{folder} cannot be written: No space left on device"
    await fleet.until_runs("b to be left", lambda runs: bool(runs) and not any(run.node == "b" for run in runs))
    (row,) = [row for row in json.loads(fleet.gyrectl("node", "list", "--json")) if row["node"] == "b"]
    assert (row["trouble"], row["draining"]) == (full.trouble, False)
    fleet.open_gate()
    await fleet.finished()
    runs = await fleet.runs()
    books = await fleet.check_books(2, hurt=[run.run for run in runs])
    assert {(run.node, run.outcome) for run in books.runs} == {("a", Outcome.FINISHED)}
    assert {"b"} == {node for run in books.runs for node in run.failed_on}
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


async def test_what_a_drained_node_has_live_when_its_time_is_over_is_trained_from_another(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet()
    fleet.begin()
    await at_the_gate(fleet)
    live = {run.run: run for run in await fleet.runs() if run.state is RunState.LIVE}
    leader = await fleet.leader()  # not the leader's, so that orders and what they order are of two nodes
    drained = next(run.node for run in live.values() if run.node != leader)
    moved = sorted(run.run for run in live.values() if run.node == drained)
    told = fleet.gyrectl("node", "drain", drained, "--within", "1s", "--wait", "--json")
    assert json.loads(told) == {"node": drained, "draining": True, "within_s": 1.0, "live": 0}
    await fleet.until(lambda: not fleet.harnesses_on(fleet.nodes[drained], "t*"), "the old attempts to end")
    fleet.open_gate()
    await fleet.finished()
    books = await fleet.check_books(2, hurt=moved)
    again = {run.run: run for run in books.runs if run.run in moved}
    assert all((run.attempt, run.outcome) == (2, Outcome.FINISHED) for run in again.values())
    assert all(run.node != drained for run in again.values())
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
    status = await client.status(fleet.dir)
    assert (status.store_answers, status.rollout_to_train, status.live > 0) == (False, None, True)
    assert "not the leader any more" in fleet.log  # said while etcd is away, though the leader waits for it
    plain_etcd.member.signal(signal.SIGCONT)
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.attempt > 1])
    fleet.stop()
