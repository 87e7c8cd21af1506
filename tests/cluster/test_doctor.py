"""`gyrectl doctor` on a node of a cluster: the other nodes, as this one reaches them, and etcd's alarms."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gyre.cli import doctor
from gyre.cli.findings import Finding, State
from gyre.errors import StorageFull
from gyre.store.open import open_store
from gyre.store.protocol import Put

from .etcd_binary import EtcdBinary
from .etcd_server import PlainEtcd, answering, client, give_space
from .fleet import Fleet

QUOTA_BYTES = 4 * 1024 * 1024


@pytest.fixture
def small_etcd(etcd: EtcdBinary, tmp_path: Path) -> Iterator[PlainEtcd]:
    server = PlainEtcd.make(etcd.path, tmp_path / "etcd", "--quota-backend-bytes", str(QUOTA_BYTES))
    server.member.start()
    yield server
    server.member.signal(signal.SIGKILL)


async def test_a_peer_that_is_gone_a_certificate_and_a_full_etcd_are_each_a_line_and_once_mended_the_job_ends(
    tmp_path: Path, small_etcd: PlainEtcd
) -> None:
    async with client(small_etcd.url) as asked:
        await answering(asked)
    fleet = Fleet.make(tmp_path / "fleet", small_etcd.url, "ab")
    fleet.begin()
    try:
        status = await fleet.until_status("both nodes", lambda status: len(status.cells) == 2)
        assert len(status.cells) == 2
        here = fleet.nodes["a"].dir
        found = await doctor.examine(here)
        there = of(await doctor.examine(fleet.nodes["b"].dir), "gyred")
        assert there == [(State.OK, "it runs and answers")]
        assert of(found, "peer") == [(State.OK, "b is reached, and has this version")]
        assert (State.OK, "agrees with that of b") in of(found, "clock")
        await fleet.until(lambda: "journals are copied to b" in fleet.nodes["a"].log, "a peer for the journals")
        shown = json.loads(fleet.gyrectl("node", "show", "a", "--json"))
        assert shown["copies_on"] == "b"
        assert [state for state, _ in of(found, "checkpoints")] == [State.WARNING]
        names = {text.split(" ")[0].split("/")[-1] for state, text in of(found, "certificate")}
        assert names >= {"ca.pem", "a.pem"}

        fleet.kill(fleet.nodes["b"])
        there = of(await doctor.examine(fleet.nodes["b"].dir), "gyred")
        assert there == [(State.FAULT, "b's does not run, and the job has not ended")]
        found = await doctor.examine(here)  # within its lease: it is believed to be there
        ((state, text),) = of(found, "peer")
        assert state is State.FAULT
        assert "b: tls:127.0.0.1:" in text

        revision = await fill(small_etcd.url)
        found = await doctor.examine(here)
        ((state, text),) = of(found, "store")
        assert (state, "NOSPACE" in text) == (State.FAULT, True)

        fleet.open_gate()
        async with client(small_etcd.url) as asked:
            await give_space(asked, revision)
        assert [state for state, _ in of(await doctor.examine(here), "store")] == [State.OK]
        await fleet.finished()
        await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.node == "b" or run.attempt > 1])
    finally:
        for node in fleet.nodes.values():
            fleet.kill(node)
        fleet.kill_all()


def of(found: list[Finding], what: str) -> list[tuple[State, str]]:
    return [(each.state, each.found) for each in found if each.what == what]


async def fill(url: str) -> int:
    """Until it takes no more. The last revision that it took."""
    store = open_store(url)
    try:
        revision = 0
        with suppress(StorageFull):
            for _ in range(30):
                revision = (await store.txn(puts=[Put("/gyre/test/big", os.urandom(500_000))])).revision
        return revision
    finally:
        await store.close()
