"""SIGKILL of gyred and of gateways, at points of a job that a seed chooses: every run finishes, and no token is lost or trained twice.

`GYRE_FAULTS=long` kills twenty of each.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from job.undisturbed import check_training

from gyre.children import Children
from gyre.cli.client import read_spec
from gyre.proxy.journal_writer import look_at_journal
from gyre.proxy.journals import journals
from gyre.store.records import RunRecord, RunState
from gyre.trajectory.journal import CallDelivered, CallStarted, RunClosed, RunOpened

from .etcd_server import PlainEtcd
from .fleet import Fleet, Node

KILLS, STEPS = (20, 10) if os.environ.get("GYRE_FAULTS") == "long" else (4, 3)
SEED = 4


@pytest.fixture
def fleet(tmp_path: Path, plain_etcd: PlainEtcd) -> Iterator[Fleet]:
    made = Fleet.make(tmp_path / "fleet", plain_etcd.url, "ab", job={"steps": STEPS}, batch={"staleness": 1})
    yield made
    left = made.processes()
    made.kill_all()
    assert not left, left


def settled_of(runs: list[RunRecord]) -> int:
    return sum(run.state is RunState.SETTLED for run in runs)


async def kill_gateway(fleet: Fleet, node: Node) -> None:
    def killed() -> bool:
        child = Children(node.dir.state).adopt().get("gateway")
        return child is not None and child.signal(signal.SIGKILL)

    await fleet.until(killed, f"the gateway of {node.name}")


async def test_gyreds_and_gateways_are_killed_at_random_points_of_a_job(fleet: Fleet, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    runs = 2 + STEPS * 6  # held-out before, and those that are trained
    points = sorted((chance.randrange(runs), chance.random(), name) for name in ["gyred", "gateway"] * KILLS)
    fleet.begin()
    fleet.open_gate()
    killed: dict[str, int] = {"gyred": 0, "gateway": 0}
    for settled, wait_s, what in points:
        await fleet.until_runs(f"{settled} runs", lambda runs, count=settled: settled_of(runs) >= count)
        await asyncio.sleep(wait_s)
        node = fleet.nodes[chance.choice("ab")]
        if what == "gyred":
            node.signal(signal.SIGKILL)
            await asyncio.sleep(chance.random())
            node.start()
        else:
            await kill_gateway(fleet, node)
        killed[what] += 1
    assert killed == {"gyred": KILLS, "gateway": KILLS}
    await fleet.finished()
    again = [run.run for run in await fleet.runs() if run.attempt > 1]
    interrupted = [run.run for run in await fleet.runs() if run.trace is not None and run.trace.interrupted_calls]
    books = await fleet.check_books(STEPS, hurt=again + interrupted)
    assert all(run.trace is not None and run.trace.calls >= 3 for run in books.runs), "every run finished"
    check_journals(fleet)
    fleet.stop()
    core = fleet.nodes[(await fleet.core()).node].dir
    check_training(books, read_spec(fleet.dir), fleet.root, tuple(fleet.dirs), core, tmp_path / "undisturbed")


def check_journals(fleet: Fleet) -> None:
    """Each is whole to its last byte, begins with its run's opening, ends with its closing, and has every call once."""
    for node in fleet.nodes.values():
        found = journals(node.dir.journal)
        assert found
        for place in found:
            records, torn, _ = look_at_journal(place.folder)
            assert torn is None, place
            assert not place.open, place
            assert isinstance(records[0], RunOpened)
            assert isinstance(records[-1], RunClosed)
            assert (records[0].run, records[0].attempt) == (place.run, place.attempt)
            started = [record.call for record in records if isinstance(record, CallStarted)]
            delivered = [record.call for record in records if isinstance(record, CallDelivered)]
            assert len(set(started)) == len(started)
            assert len(set(delivered)) == len(delivered)
            assert set(delivered) <= set(started)
