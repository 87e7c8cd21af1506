"""Jobs that a node, or no node, can work on; and what is left of one that ended while a node's gyred was away."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.store.open import keys_for
from gyre.store.records import JobRecord, JobState

from .etcd_server import PlainEtcd
from .fleet import Fleet
from .test_nodes import at_the_gate


@pytest.fixture
def fleet(tmp_path: Path, plain_etcd: PlainEtcd) -> Iterator[Fleet]:
    made = Fleet.make(tmp_path / "fleet", plain_etcd.url, "ab")
    yield made
    left = made.processes()
    made.kill_all()
    assert not left, left


def test_a_job_that_no_node_can_work_on_fails_and_the_nodes_take_the_next(fleet: Fleet) -> None:
    fleet.submit()
    (fleet.root / "tasks").rename(fleet.root / "elsewhere")
    for node in fleet.nodes.values():
        node.start()
    failed = asyncio.run(fleet.until_record("the end", fleet.keys.job, JobRecord, lambda _: True))
    assert isinstance(failed, JobRecord)
    assert failed.state is JobState.FAILED
    assert "tasks.source" in failed.reason
    assert all(node.running for node in fleet.nodes.values()), fleet.tail()

    (fleet.root / "elsewhere").rename(fleet.root / "tasks")
    (fleet.root / "job.toml").unlink()
    fleet.settings["job"] = {"name": "second"}
    fleet.submit()
    key = keys_for(fleet.store_url, "second").job
    asyncio.run(fleet.until_record("the next job", key, JobRecord, lambda job: job.state is JobState.RUNNING))
    fleet.stop()


def test_a_node_that_lacks_what_a_job_needs_leaves_it_to_the_others_until_it_has_it(fleet: Fleet) -> None:
    poor = fleet.nodes["b"]
    base = fleet.root / "poor"
    base.mkdir()
    lines = [f'base = "{base}"' if line.startswith("base =") else line for line in poor.file.read_text().splitlines()]
    lines = [line.replace('"pki/', f'"{fleet.root}/pki/') for line in lines]
    poor.file.write_text("\n".join(lines) + "\n")
    fleet.begin()
    asyncio.run(fleet.until(lambda: "b cannot work on small: tasks.source" in poor.log, "b to say what it lacks"))
    assert "".join(line for line in poor.log.splitlines() if "Traceback" in line) == ""
    asyncio.run(fleet.until(lambda: len(fleet.harnesses()) == 2, "the other node to be full"))
    assert not fleet.harnesses_on(poor)

    (base / "tasks").symlink_to(fleet.root / "tasks")
    asyncio.run(fleet.until(lambda: bool(fleet.harnesses_on(poor)), "b to work on it too"))
    fleet.open_gate()
    asyncio.run(fleet.finished())
    fleet.stop()


def test_what_a_killed_gyred_left_of_a_job_that_ended_meanwhile_is_ended(fleet: Fleet) -> None:
    fleet.begin()
    asyncio.run(at_the_gate(fleet))
    away = fleet.nodes["b"]
    away.signal(signal.SIGKILL)
    fleet.gyrectl("job", "stop", "--yes")
    asyncio.run(fleet.until(lambda: not fleet.nodes["a"].dir.gyred_file.exists(), "a to end the job"))
    mark = str(away.dir.sockets)
    assert any(mark in command for command in fleet.processes().values()), "its children live on"
    away.start()
    asyncio.run(
        fleet.until(
            lambda: not any(mark in command for command in fleet.processes().values()) and not fleet.harnesses_on(away),
            "the next gyred to end them",
        )
    )
    assert away.running
    fleet.stop()
