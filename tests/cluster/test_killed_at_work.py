"""SIGKILL of who leads, and of replicas on two nodes, at a certain point of what they are at."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from job.a_job import DEADLINE_S

from gyre.actors.address import TcpAddress, parse
from gyre.actors.far import read_address
from gyre.actors.messages_gyrectl import PinCell
from gyre.children import Child, Children
from gyre.cli import client
from gyre.errors import GyreError
from gyre.ids import CellId, NodeId
from gyre.store.open import open_store
from gyre.store.records import CellRoleRecord, LeaderRecord, NodeRecord, Role, RunRecord, RunState, StepRecord
from gyre.store.typed import TypedStore
from gyre.train.snapshot import snapshot_path

from .etcd_server import PlainEtcd
from .fleet import Fleet, Node

T = TypeVar("T")

MOVING = (Role.DRAINING, Role.RELEASING, Role.LOADING, Role.UNLOADING, Role.RESUMING)


@pytest.fixture
def fleet(tmp_path: Path, plain_etcd: PlainEtcd, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Two nodes; their journals have copies unless a test says otherwise."""
    made = Fleet.make(
        tmp_path / "fleet",
        plain_etcd.url,
        "ab",
        job={"steps": 2},
        scheduler={"min_work_switches": 1e-6},  # any work is worth a switch
        batch={"micro_step_tokens": 64, "claim_s": 600.0},
        journal={"copies": getattr(request, "param", 1)},
    )
    yield made
    left = made.processes()
    made.kill_all()
    assert not left, left


async def start(fleet: Fleet) -> tuple[Node, Node]:
    """The node that leads and has the core, and the other."""
    core, other = fleet.nodes["a"], fleet.nodes["b"]
    core.start()
    fleet.submit()
    assert (await fleet.leader(), (await fleet.core()).node) == (core.name, core.name)
    other.start()
    await fleet.until_record(other.name, fleet.keys.node(other.name), NodeRecord, lambda _: True)
    return core, other


async def record_that_is(fleet: Fleet, key: str, cls: type[T], enough: Callable[[T], bool]) -> T:
    """The first record of the key, from now on, that is enough; at once when it is written."""
    store = TypedStore(open_store(fleet.store_url))
    try:
        async with asyncio.timeout(DEADLINE_S), aclosing(store.watch(key, cls)) as changes:
            async for change in changes:
                if change.now is not None and enough(change.now.record):
                    return change.now.record
    finally:
        await store.store.close()
    raise AssertionError("a watch has no end")


async def pin(fleet: Fleet, cell: str, role: Role | None) -> None:
    for node in fleet.nodes.values():
        with suppress(GyreError):
            await client.order(node.dir, PinCell(CellId(cell), role))
            return
    raise AssertionError(f"nobody takes the order; {fleet.tail()}")


def replica(node: Node) -> Child:
    child = Children(node.dir.state).adopt()[f"replica-{node.name}-c0"]
    assert child.alive
    return child


async def taken_and_not_published(fleet: Fleet, core: Node, other: Node, step: int) -> None:
    """The runs of the step's batch are let go, and the step is taken; nobody answers who would hold its snapshot too.

    The other's cell must be pinned to rollout: else it has micro-steps that it does not ship.
    """
    await pin(fleet, f"{core.name}-c0", Role.TRAIN)
    cell = fleet.keys.cell_role(CellId(f"{core.name}-c0"))
    await fleet.until_record("the core in train", cell, CellRoleRecord, lambda now: now.observed is Role.TRAIN)
    replica(core).signal(signal.SIGSTOP)
    fleet.open_gate("t*")
    await fleet.until_runs(
        f"the runs of step {step}",
        lambda runs: sum(run.state is RunState.SETTLED for run in runs) == 2 + 6 * step,
    )
    other.signal(signal.SIGSTOP)
    replica(core).signal(signal.SIGCONT)
    await fleet.until(snapshot_path(core.dir.snapshots, step).is_dir, f"the snapshot of step {step}")
    assert not await is_published(fleet, step)


async def is_published(fleet: Fleet, step: int) -> bool:
    store = TypedStore(open_store(fleet.store_url))
    try:
        return await store.get(fleet.keys.step(step), StepRecord) is not None
    finally:
        await store.store.close()


async def test_gyred_of_the_leader_is_killed_in_a_switch_in_a_step_and_at_a_publication(fleet: Fleet) -> None:
    core, other = await start(fleet)
    await pin(fleet, "b-c0", Role.ROLLOUT)
    cell = fleet.keys.cell_role(CellId("a-c0"))
    moving = await record_that_is(
        fleet, cell, CellRoleRecord, lambda now: now.desired is Role.TRAIN and now.observed in MOVING
    )
    core.signal(signal.SIGKILL)
    await fleet.until_record("another leader", fleet.keys.leader, LeaderRecord, lambda now: now.node == "b")
    core.start()
    await fleet.until_record(
        "the cell at rest", cell, CellRoleRecord, lambda now: now.rested == now.epoch >= moving.epoch
    )

    fleet.gyrectl("leader", "resign")
    await fleet.until_record("the first leader", fleet.keys.leader, LeaderRecord, lambda now: now.node == "a")
    await fleet.until_status("merged sums", lambda now: now.micro_steps_done > 0)
    core.signal(signal.SIGKILL)
    await fleet.until_record("another leader", fleet.keys.leader, LeaderRecord, lambda now: now.node == "b")
    core.start()

    fleet.gyrectl("leader", "resign")
    await fleet.until_record("the first leader", fleet.keys.leader, LeaderRecord, lambda now: now.node == "a")
    await taken_and_not_published(fleet, core, other, 1)
    core.signal(signal.SIGKILL)
    other.signal(signal.SIGCONT)
    await fleet.until_record("another leader", fleet.keys.leader, LeaderRecord, lambda now: now.node == "b")
    core.start()
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.attempt > 1])
    fleet.stop()


def connected(pid: int, port: int) -> bool:
    """Whether a process has a connection to the port."""
    inodes: set[str] = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(row[9] in inodes and int(row[2].partition(":")[2], 16) == port for row in rows)


async def test_a_satellites_replica_is_killed_while_it_ships_and_the_cores_before_a_publication(fleet: Fleet) -> None:
    core, other = await start(fleet)
    await fleet.until_status("merged sums", lambda now: now.micro_steps_done > 0)
    theirs = fleet.keys.cell_role(CellId("b-c0"))
    stopped, ships = replica(core), replica(other)
    place = parse(read_address(core.dir.state / f"{stopped.name}.far.json"))
    assert isinstance(place, TcpAddress)
    assert not connected(ships.pid, place.port)

    stopped.signal(signal.SIGSTOP)  # what is to be trained waits for the satellite, whose sums nobody takes
    fleet.open_gate("t*")
    await fleet.until_record("a satellite in train", theirs, CellRoleRecord, lambda now: now.observed is Role.TRAIN)
    await fleet.until(lambda: connected(ships.pid, place.port), "sums on their way")
    ships.signal(signal.SIGKILL)
    await fleet.until(lambda: "b-c0 gave back" in core.log, "the micro-steps to be given back")
    stopped.signal(signal.SIGCONT)
    await fleet.until_record_of_steps(1)

    await pin(fleet, "b-c0", Role.ROLLOUT)
    await fleet.until_record("the satellite to serve", theirs, CellRoleRecord, lambda now: now.observed is Role.ROLLOUT)
    await taken_and_not_published(fleet, core, other, 2)
    replica(core).signal(signal.SIGKILL)
    other.signal(signal.SIGCONT)
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.attempt > 1])
    fleet.stop()


async def settled_and_untrained(fleet: Fleet) -> tuple[Node, Child, list[RunRecord]]:
    """The runs of the first batch have settled on two nodes; the core's replica is stopped. The node that is not the
    core's, that replica, and the training runs that settled on that node."""
    core, other = await start(fleet)
    await pin(fleet, "a-c0", Role.TRAIN)
    await pin(fleet, "b-c0", Role.ROLLOUT)
    cell = fleet.keys.cell_role(CellId("a-c0"))
    await fleet.until_record("the core in train", cell, CellRoleRecord, lambda now: now.observed is Role.TRAIN)
    trains = replica(core)
    trains.signal(signal.SIGSTOP)
    fleet.open_gate()
    await fleet.until_runs("the first batch", lambda runs: [run.state for run in runs] == [RunState.SETTLED] * 8)
    theirs = [run for run in await fleet.runs() if run.node == other.name and run.run.startswith("t")]
    assert theirs
    return other, trains, theirs


async def test_a_node_dies_and_its_runs_are_trained_from_their_copies(fleet: Fleet) -> None:
    dead, trains, lost = await settled_and_untrained(fleet)
    fleet.kill(dead)
    shutil.rmtree(dead.root / dead.name)
    trains.signal(signal.SIGCONT)  # it asks for what only the dead node could tell it
    await pin(fleet, "a-c0", None)
    await fleet.finished()
    runs = {run.run: run for run in await fleet.runs()}
    assert [runs[run.run] for run in lost] == [replace(run, node=NodeId("a")) for run in lost]
    await fleet.check_books(2)
    for run in lost:
        tree = json.loads(fleet.gyrectl("run", "tree", run.run, "--json"))
        assert run.trace is not None
        assert (tree["attempt"], tree["state"], tree["faults"]) == (1, "closed", [])
        assert tree["counted_tokens"] == run.trace.counted_tokens
    fleet.stop()


@pytest.mark.parametrize("fleet", [0], indirect=True, ids=["without copies"])
async def test_a_node_dies_whose_runs_wait_to_be_trained(fleet: Fleet) -> None:
    dead, trains, lost = await settled_and_untrained(fleet)
    fleet.kill(dead)
    trains.signal(signal.SIGCONT)
    await pin(fleet, "a-c0", None)
    await fleet.finished()
    again = {run.run for run in await fleet.runs() if run.attempt == 2}
    assert again >= {run.run for run in lost}
    await fleet.check_books(2, hurt=[run.run for run in lost])
    fleet.stop()
