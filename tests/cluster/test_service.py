"""gyred under a manager that listens on $NOTIFY_SOCKET, as systemd does: what it says, and what its signals do."""

from __future__ import annotations

import asyncio
import configparser
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.actors.membership import LEASE_S
from gyre.ids import CellId
from gyre.jobdir import JobDir
from gyre.service import Service
from gyre.store.records import CellRoleRecord, JobRecord, JobState, Role, RunRecord, RunState

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
    assert "address, cells, certificates, snapshot_memory_mib or drain_s changed, which needs a restart" in node.log

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


def test_a_node_without_a_job_keeps_no_snapshots_in_memory(make_fleet: Callable[..., Fleet], manager: Manager) -> None:
    fleet = make_fleet("a")
    node = fleet.nodes["a"]
    left = JobDir(node.dir.root.with_name("of-a-gyred-that-was-killed"))
    left.root.mkdir(parents=True)
    left.snapshots_in_memory.mkdir(mode=0o700)
    try:
        node.start()
        manager.hear("STATUS=waits for a job")
        assert not left.snapshots_in_memory.exists()
    finally:
        left.clear_snapshots_in_memory()
    fleet.stop()


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


async def test_a_run_that_lives_on_a_node_that_is_told_to_end_has_time_to_come_to_its_own(
    make_fleet: Callable[..., Fleet], manager: Manager
) -> None:
    fleet = make_fleet("ab", harness={"max_live": 1})
    leaving, run = await told_to_end(fleet, manager)
    fleet.open_gate(run.run)
    assert leaving.gyred is not None
    assert await asyncio.to_thread(leaving.gyred.wait, HEAR_S) == 0, "long before its time is over"
    assert "begins again elsewhere" not in leaving.log
    settled = {each.run: each for each in await fleet.runs()}[run.run]
    assert (settled.state, settled.node, settled.attempt) == (RunState.SETTLED, leaving.name, 1)
    fleet.open_gate()
    await fleet.finished()
    hurt = [each.run for each in await fleet.runs() if each.attempt > 1]
    assert run.run not in hurt, "what it has left for training was with the other node when this one ended"
    await fleet.check_books(2, hurt=hurt)
    fleet.stop()


async def test_what_an_engine_of_a_node_that_is_told_to_end_has_of_another_nodes_run_goes_on_there_with_its_kv(
    make_fleet: Callable[..., Fleet], manager: Manager
) -> None:
    fleet = make_fleet("ab", harness={"max_live": 1})
    stays, leaves = fleet.nodes["a"], fleet.nodes["b"]
    leaves.file.write_text(leaves.file.read_text().replace("drain_s = 0\n", "drain_s = 3600\n"))
    stays.start()
    fleet.submit()
    await fleet.until_record("b's place", fleet.keys.job, JobRecord, lambda _: True)
    assert (await fleet.core()).node == "a"
    leaves.start()
    await live_on_both(fleet)
    key = {name: fleet.keys.cell_role(CellId(f"{name}-c0")) for name in fleet.nodes}

    async def serves(name: str, role: Role) -> None:
        await fleet.until_record(f"{name} in {role}", key[name], CellRoleRecord, lambda now: now.observed is role)

    # What a's run has said so far comes to rest with b's engine, when a's own leaves.
    fleet.gyrectl("cell", "pin", "b-c0", "rollout")
    await serves("b", Role.ROLLOUT)
    fleet.gyrectl("cell", "pin", "a-c0", "train")
    await serves("a", Role.TRAIN)
    fleet.gyrectl("cell", "pin", "a-c0", "rollout", "--yes")
    await serves("a", Role.ROLLOUT)

    leaves.signal(signal.SIGTERM)
    (run,) = [run for run in await fleet.runs() if run.node == "b" and run.state is RunState.LIVE]
    fleet.open_gate(run.run)
    assert leaves.gyred is not None
    assert await asyncio.to_thread(leaves.gyred.wait, HEAR_S) == 0
    found = re.search(r"b-c0: (\d+) requests go on elsewhere, (\d+) blocks of KV moved there", leaves.log)
    assert found is not None, leaves.log
    assert int(found[2]) > 0
    fleet.gyrectl("cell", "unpin", "a-c0")
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[each.run for each in await fleet.runs() if each.attempt > 1])
    fleet.stop()


async def test_a_second_sigterm_waits_for_no_run(make_fleet: Callable[..., Fleet], manager: Manager) -> None:
    fleet = make_fleet("ab", harness={"max_live": 1})
    leaving, run = await told_to_end(fleet, manager)
    leaving.signal(signal.SIGTERM)
    assert leaving.gyred is not None
    assert await asyncio.to_thread(leaving.gyred.wait, HEAR_S) == 0
    assert not fleet.harnesses_on(leaving)
    again = f"{run.run} to begin again elsewhere"
    await fleet.until_record(again, fleet.keys.run(run.run), RunRecord, lambda now: now.node not in ("", leaving.name))
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[each.run for each in await fleet.runs() if each.attempt > 1])
    fleet.stop()


async def told_to_end(fleet: Fleet, manager: Manager) -> tuple[Node, RunRecord]:
    """The node without the core was sent a SIGTERM, and waits for its run, which waits at the gate."""
    for node in fleet.nodes.values():
        node.file.write_text(node.file.read_text().replace("drain_s = 0\n", "drain_s = 3600\n"))
    fleet.begin()
    await live_on_both(fleet)
    core = await fleet.core()
    leaving = next(node for name, node in fleet.nodes.items() if name != core.node)
    leaving.signal(signal.SIGTERM)
    usec = manager.hear("STOPPING=1")[1].removeprefix("EXTEND_TIMEOUT_USEC=")
    assert int(usec) > 3600e6
    await fleet.until(lambda: "have 3600 s to come to their end" in leaving.log, "the node to wait")
    (run,) = [run for run in await fleet.runs() if run.node == leaving.name and run.state is not RunState.SETTLED]
    assert f"{run.run}/1" in fleet.harnesses_on(leaving)
    return leaving, run


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


def test_systemd_starts_a_node_again_within_its_lease_and_never_gives_it_up() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert unit["Service"]["Restart"] == "on-failure"
    assert 1 < float(unit["Service"]["RestartSec"]) < LEASE_S / 2


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/gyre/.venv/bin/gyred", "/bin/true")
    unit = tmp_path / "gyred@node-a.service"
    unit.write_text(text)
    try:
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no systemd-analyze")
    assert str(unit.name) not in done.stderr, done.stderr
