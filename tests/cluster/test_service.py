"""gyred under a manager that listens on $NOTIFY_SOCKET, as systemd does: what it says, and what its signals do."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.service import Service
from gyre.store.records import JobRecord, JobState, RunRecord, RunState

from .etcd_server import PlainEtcd
from .fleet import Fleet, Node
from .test_nodes import at_the_gate

HEAR_S = 60.0
UNIT = Path(__file__).parents[2] / "deploy" / "gyred@.service"


class Manager:
    """What a service has said, line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(HEAR_S)

    def hear(self, line: str) -> list[str]:
        """The lines that came with the one that begins so."""
        while True:
            lines = self._socket.recv(4096).decode().splitlines()
            self.said += lines
            if any(each.startswith(line) for each in lines):
                return lines

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(made.path))
    yield made
    made.close()


@pytest.fixture
def make_fleet(tmp_path: Path, plain_etcd: PlainEtcd) -> Iterator[Callable[..., Fleet]]:
    """As in test_nodes: no process may be left."""
    fleets: list[Fleet] = []

    def make(names: str, **settings: dict[str, Any]) -> Fleet:
        fleets.append(Fleet.make(tmp_path / "fleet", plain_etcd.url, names, **settings))
        return fleets[-1]

    yield make
    left = [fleet.processes() for fleet in fleets]
    for fleet in fleets:
        fleet.kill_all()
    assert not any(left), left


def test_the_variables_are_not_left_for_the_children_and_nobody_is_waited_for(tmp_path: Path) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "9", "WATCHDOG_PID": "1", "HOME": "/"}
    Service.of(environment).ready("there")
    assert environment == {"HOME": "/"}


async def test_a_watchdog_is_shown_life_and_a_name_of_the_kernels_own_is_reached() -> None:
    name = f"gyre-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.setblocking(False)
        service = Service.of({"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())})
        life = asyncio.ensure_future(service.show_life())
        try:
            for _ in range(2):
                assert await asyncio.get_running_loop().sock_recv(listener, 100) == b"WATCHDOG=1"
        finally:
            life.cancel()


def test_a_node_is_ready_when_it_waits_for_a_job_reloads_at_sighup_and_ends_at_sigterm(
    make_fleet: Callable[..., Fleet], manager: Manager
) -> None:
    fleet = make_fleet("a")
    node = fleet.nodes["a"]
    node.start()
    assert manager.hear("READY=1") == ["READY=1", "STATUS=waits for a job"]

    reload(node, manager, 'log_level = "loud"\n')
    assert "not reloaded, all stays as it was" in node.log
    reload(node, manager, 'log_level = "error"\ncells = 2\n')
    assert "the log's level is error; " in node.log
    assert "address, cells or certificates changed, which needs a restart" in node.log

    fleet.stop()
    assert node.gyred is not None
    assert node.gyred.returncode == 0


def reload(node: Node, manager: Manager, more: str) -> None:
    """With `more` in place of what the file had."""
    names = {line.partition(" = ")[0] for line in more.splitlines()}
    kept = [line for line in node.file.read_text().splitlines() if line.partition(" = ")[0] not in names]
    node.file.write_text("\n".join(kept) + "\n" + more)
    node.signal(signal.SIGHUP)
    reloading, clock = manager.hear("RELOADING=1")
    assert reloading == "RELOADING=1"
    assert int(clock.removeprefix("MONOTONIC_USEC=")) > 0
    manager.hear("READY=1")


async def test_a_node_that_is_told_to_end_gives_its_queued_runs_away_and_the_job_goes_on(
    make_fleet: Callable[..., Fleet], manager: Manager
) -> None:
    # Each node has one run live at a time of three that wait at the gate: once a node is there for each, more wait.
    fleet = make_fleet("ab", harness={"max_live": 1})
    fleet.begin()
    manager.hear("STATUS=works on small")
    manager.hear("STATUS=works on small")
    await live_on_both(fleet)
    core = await fleet.core()
    leaving = next(node for name, node in fleet.nodes.items() if name != core.node)
    leaving.signal(signal.SIGTERM)
    manager.hear("STOPPING=1")
    assert leaving.gyred is not None
    assert await asyncio.to_thread(leaving.gyred.wait, HEAR_S) == 0
    assert "nobody has taken the runs" not in leaving.log
    assert not fleet.harnesses_on(leaving)
    runs = [run for run in await fleet.runs() if run.node == leaving.name and run.state is not RunState.SETTLED]
    assert not any(run.state is RunState.QUEUED for run in runs)
    for run in runs:
        again = f"{run.run} to begin again elsewhere"
        await fleet.until_record(again, fleet.keys.run(run.run), RunRecord, lambda now: now.node == core.node)
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.attempt > 1])
    fleet.stop()


async def live_on_both(fleet: Fleet) -> None:
    for _ in range(1200):
        runs = [run for run in await fleet.runs() if run.run.startswith("t") and run.state is RunState.LIVE]
        if {run.node for run in runs} == set(fleet.nodes) and all(
            f"{run.run}/{run.attempt}" in fleet.harnesses() for run in runs
        ):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(fleet.tail())


async def test_gyrectl_ends_a_clusters_job_on_every_node_and_the_nodes_wait_for_the_next(
    make_fleet: Callable[..., Fleet], manager: Manager
) -> None:
    fleet = make_fleet("ab")
    fleet.begin()
    await at_the_gate(fleet)
    fleet.gyrectl("job", "stop", "--yes")
    await fleet.finished()
    ended = await fleet.until_record("the end", fleet.keys.job, JobRecord, bool)  # type: ignore[arg-type]
    assert isinstance(ended, JobRecord)
    assert (ended.state, ended.reason) == (JobState.FAILED, "stopped by gyrectl")
    assert not fleet.harnesses()
    assert all(node.running for node in fleet.nodes.values())
    manager.hear("STATUS=waits for a job")
    fleet.stop()


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/gyre/.venv/bin/gyred", "/bin/true")
    unit = tmp_path / "gyred@node-a.service"
    unit.write_text(text)
    try:
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no systemd-analyze")
    assert str(unit.name) not in done.stderr, done.stderr
