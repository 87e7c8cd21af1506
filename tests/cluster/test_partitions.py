"""A node in a network namespace of its own is cut off from all others and from etcd, for longer than anything is held for it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gyre import pki
from gyre.cli.report import Books, read_books
from gyre.store.open import open_store
from gyre.store.records import CoreRecord, LeaderRecord, NodeRecord, RunState

from .etcd_binary import EtcdBinary
from .etcd_server import CLUSTER, FLAGS, Member, answering, client
from .fleet import Fleet, Node
from .history import check_leaders, history
from .netns import Cut, Network, why_not

LONG = os.environ.get("GYRE_FAULTS") == "long"
CUT_S = 60.0
"""A node's lease is 10 s, and what it had is given to others 5 s after that."""
NODES = "abc"

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@dataclass
class Apart(Fleet):
    """A fleet whose nodes have a host each, and etcd one too. `store_url` is the test's own way to it."""

    network: Network | None = None

    async def books(self) -> Books:
        store = open_store(self.store_url, read_only=True)
        try:
            return await read_books(store, self.keys)
        finally:
            await store.close()

    def cut(self, node: Node, how: Cut) -> None:
        assert self.network is not None
        self.network.cut(self.network.hosts[node.name], how)

    def heal(self, node: Node) -> None:
        assert self.network is not None
        self.network.heal(self.network.hosts[node.name])


@pytest.fixture
def apart(tmp_path: Path, etcd: EtcdBinary) -> Iterator[Apart]:
    with Network.made(["etcd", *NODES]) as network:
        host = network.hosts["etcd"]
        at, peer = f"http://{host.address}:2379", f"http://{host.address}:2380"
        command: list[str | Path] = [
            *(*host.before, etcd.path, "--name", "m0", "--data-dir", tmp_path / "etcd", *FLAGS),
            *("--listen-client-urls", at, "--advertise-client-urls", at),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"m0={peer}"),
        ]
        member = Member(command, f"{host.address}:2379", tmp_path / "etcd.log")
        member.start()
        with socket.create_server(("127.0.0.1", 0)) as way:
            fd, port = way.fileno(), way.getsockname()[1]
            here = Path(__file__).with_name("relay.py")
            argv = [*host.before, sys.executable, "-I", str(here), str(fd), host.address, "2379"]
            relay = subprocess.Popen(argv, pass_fds=[fd])
        root = tmp_path / "fleet"
        root.mkdir()
        fleet = Apart(root, {"harness": {"max_live": 3}, "job": {"steps": 2}}, network=network)
        fleet.add_task("train/one", {"gate": "closed"})
        fleet.add_task("train/two", {"gate": "closed"})
        fleet.write()
        pki.init(root / "pki", "tests", 10)
        fleet.store_url = f"etcd://{member.endpoint}/{CLUSTER}"
        for name in NODES:
            fleet.add(name, network.hosts[name].address, 7400, before=network.hosts[name].before)
        fleet.store_url = f"etcd://127.0.0.1:{port}/{CLUSTER}"
        try:
            yield fleet
            left = fleet.processes()
        finally:
            fleet.kill_all()
            for process in (relay, member.process):
                if process is not None:
                    process.kill()
                    process.wait()
        assert not left, left


async def start(fleet: Apart) -> Node:
    """The job's runs are at their gate, none on a third node where two had room for all. The node that leads and has the core."""
    first, *others = fleet.nodes.values()
    async with client(fleet.store_url) as asked:
        await answering(asked)
    first.start()
    fleet.submit()
    core = await fleet.core()
    assert (await fleet.leader(), core.node) == (first.name, first.name)
    for node in others:
        node.start()
        await fleet.until_record(node.name, fleet.keys.node(node.name), NodeRecord, lambda _: True)
    await fleet.until(lambda: len(fleet.harnesses("t*")) == 6, "the runs at their gate")
    return first


async def test_a_satellites_node_is_cut_off_with_live_runs(apart: Apart) -> None:
    fleet = apart
    first = await start(fleet)
    lone = max(
        (node for node in fleet.nodes.values() if node is not first),
        key=lambda node: len(fleet.harnesses_on(node, "t*")),
    )
    rest = {name for name in fleet.nodes if name != lone.name}
    had = fleet.harnesses_on(lone, "t*")
    assert had
    finishing, *_ = sorted(had)
    moved = {name.split("/")[0] for name in had}
    fleet.cut(lone, Cut.BOTH)
    until_s = time.monotonic() + CUT_S
    fleet.open_gate(finishing.split("/")[0])  # it comes to its end there, and cannot tell anybody
    await fleet.until_runs(
        "the runs to begin again",
        lambda runs: all(run.attempt == 2 and run.node in rest for run in runs if run.run in moved),
    )
    await fleet.until(lambda: all(f"{run}/2" in fleet.harnesses() for run in moved), "the new attempts at their gate")
    await asyncio.sleep(max(0.0, until_s - time.monotonic()))
    assert fleet.harnesses_on(lone, "t*").keys() <= had.keys(), "no new work"
    fleet.heal(lone)
    await fleet.until(lambda: not fleet.harnesses_on(lone, "t*").keys() & had.keys(), "the old attempts to be ended")
    fleet.open_gate()
    await fleet.finished()
    hurt = [run.run for run in await fleet.runs() if run.attempt > 1]
    assert moved <= set(hurt)
    await fleet.check_books(2, hurt=hurt)
    assert f"{finishing.split('/')[0]}: its record was changed by another" in lone.log, "a late result does not count"
    check_leaders(await history(fleet.store_url), fleet.keys)
    fleet.stop()


@pytest.mark.parametrize("how", list(Cut) if LONG else [Cut.DEAF])
async def test_the_node_that_leads_and_has_the_core_is_cut_off_at_a_step(apart: Apart, how: Cut) -> None:
    fleet = apart
    old = await start(fleet)
    fleet.open_gate("t*")
    await fleet.until_runs("the first batch", lambda runs: all(run.state is RunState.SETTLED for run in runs))
    fleet.cut(old, how)
    until_s = time.monotonic() + CUT_S
    await fleet.until_record("another leader", fleet.keys.leader, LeaderRecord, lambda now: now.node != old.name)
    await fleet.until_record("another core", fleet.keys.core, CoreRecord, lambda now: now.node != old.name)
    step = asyncio.ensure_future(fleet.until_record_of_steps(1))
    while not step.done():  # what was run on the node that is gone is run again
        fleet.open_gate("t*")
        await asyncio.sleep(0.1)
    await step
    await asyncio.sleep(max(0.0, until_s - time.monotonic()))
    fleet.heal(old)
    await fleet.until_record(old.name, fleet.keys.node(old.name), NodeRecord, lambda _: True)
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.attempt > 1])
    terms = check_leaders(await history(fleet.store_url), fleet.keys)
    assert len({term.node for term in terms}) >= 2
    fleet.stop()
