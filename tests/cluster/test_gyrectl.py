"""gyrectl from a machine that has no job folder: a person's certificate, etcd, and the nodes' ports."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from job.a_job import DEADLINE_S
from typer.testing import CliRunner, Result

from gyre import pki
from gyre.cli.gyrectl import app
from gyre.store.records import JobRecord, JobState, RunState

from .etcd_server import PlainEtcd
from .fleet import Fleet
from .test_nodes import at_the_gate


@pytest.fixture
def fleet(tmp_path: Path, plain_etcd: PlainEtcd) -> Iterator[Fleet]:
    """Two nodes; the person `ada` has a certificate, and a file beside it, in a folder of her own."""
    made = Fleet.make(tmp_path / "fleet", plain_etcd.url, "ab", scheduler={"min_work_switches": 1e-6})
    pki.issue(made.root / "pki", "ada", pki.Kind.CLIENT, 2)
    yield made
    left = made.processes()
    made.kill_all()
    assert not left, left


class Person:
    """One with a certificate of their own, and what gyrectl tells them."""

    def __init__(self, fleet: Fleet, name: str, folder: Path | None = None, **more: str) -> None:
        folder = folder or fleet.root / "pki"
        keys = {
            "store": fleet.store_url,
            "ca": str(folder / "ca.pem"),
            "certificate": str(folder / f"{name}.pem"),
            "key": str(folder / f"{name}.key"),
            **more,
        }
        self.file = fleet.root / f"{name}-{len(more)}.toml"
        self.file.write_text("[cluster]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))

    def gyrectl(self, *words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--cluster", str(self.file)])

    def read(self, *words: str) -> Any:
        result = self.gyrectl(*words, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def refused(self, *words: str, code: int = 1) -> str:
        """The one line."""
        result = self.gyrectl(*words)
        assert result.exit_code == code, result.output
        assert len(result.stderr.splitlines()) == 1, result.stderr
        return result.stderr.strip()


def test_a_person_reads_and_orders_from_anywhere_under_their_own_name(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ada = Person(fleet, "ada")
    monkeypatch.chdir(tmp_path)
    assert ada.gyrectl("config", "check", str(ada.file)).exit_code == 2, "it has no such option"
    assert "the cluster test has no job yet" in ada.refused("status")
    for node in fleet.nodes.values():
        node.start()
    between_jobs(fleet, ada)
    assert ada.read("job", "submit", str(fleet.write())) == {"job": "small"}
    asyncio.run(at_the_gate(fleet))

    status = ada.read("status")
    assert (status["job"], status["store_answers"], {cell["cell"] for cell in status["cells"]}) == (
        "small",
        True,
        {"a-c0", "b-c0"},
    )
    assert {row["node"]: row["waits"] for row in ada.read("node", "list")} == {"a": False, "b": False}
    assert {row["cell"] for row in ada.read("cell", "list")} == {"a-c0", "b-c0"}
    assert ada.read("job", "show")["running"] is True
    assert ada.read("step", "list") == []
    assert ada.read("snapshot", "history")[0]["path"] is None
    leader = ada.read("leader", "show")["node"]
    runs = {row["run"]: row for row in ada.read("run", "list")}
    live = [run for run, row in runs.items() if row["run_state"] == "live"]
    assert ada.read("run", "show", live[0])["node"] == runs[live[0]]["node"]
    assert {row["group"] for row in ada.read("group", "list")} >= {runs[live[0]]["group"]}
    assert 0 < ada.read("report")["runs_total"] < len(runs), "those that have settled"
    actors = ada.read("actor", "list")
    assert {"a", "b", "a/gateway", "b/gateway"} <= actors.keys()
    assert {actor["name"].split("/")[0] for listed in actors.values() for actor in listed["actors"]} == {"a", "b"}
    shown = ada.read("node", "show", "b")
    assert shown["kv_transport"].keys() == {"b-c0"}
    found = ada.read("doctor")
    assert {each["what"] for each in found} >= {"store", "certificate", "peer", "clock"}
    assert not [each for each in found if each["state"] == "fault"]

    other = next(node for node in fleet.nodes if node != leader)
    Person(fleet, "ada", node=other).read("cell", "pin", f"{other}-c0", "rollout")  # over the node that does not lead
    assert f"{other}-c0: pinned to rollout, by ada" in fleet.nodes[leader].log
    ada.read("cell", "unpin", f"{other}-c0")
    ada.read("job", "pause")
    assert "the job is paused, by ada" in fleet.nodes[leader].log
    ada.read("job", "resume")
    assert ada.read("run", "cancel", live[0], "--yes")["reason"] == "cancelled"
    assert f"{live[0]}: cancelled by ada" in fleet.log
    ada.read("node", "drain", other)
    assert f"{other}: draining, by ada" in fleet.nodes[leader].log
    ada.read("node", "undrain", other)
    ada.read("leader", "resign")
    assert "the leader resigns, as it was told by ada" in fleet.nodes[leader].log
    assert "one of a, b" in ada.refused("node", "drain", "nobody", code=2)
    assert "name the job's folder there (--dir)" in ada.refused("run", "tree", live[0])
    assert "it is a cluster's job" in ada.refused("stop")

    ada.read("job", "stop", "--yes")
    ended = asyncio.run(fleet.until_record("the end", fleet.keys.job, JobRecord, lambda job: job.reason))
    assert isinstance(ended, JobRecord)
    assert (ended.state, ended.reason) == (JobState.FAILED, "stopped by ada")
    asyncio.run(fleet.finished())
    assert ada.read("job", "show")["state"] == "failed"
    assert {row["run_state"] for row in ada.read("run", "list")} >= {RunState.SETTLED.value}
    fleet.stop()


def between_jobs(fleet: Fleet, ada: Person) -> None:
    """Both gyreds wait for a job: they are seen, from afar and from a node, and looked at."""

    def here(*words: str) -> Any:
        result = CliRunner().invoke(app, [*words, "--node", str(fleet.nodes["a"].file), "--json"])
        return json.loads(result.stdout)

    until_s = time.monotonic() + DEADLINE_S
    while len(rows := ada.read("node", "list")) < 2:
        assert time.monotonic() < until_s, fleet.tail()
    assert [(row["node"], row["there"], row["waits"], row["cells"]) for row in rows] == [
        ("a", True, True, []),
        ("b", True, True, []),
    ]
    assert here("node", "list") == rows
    for found in (here("doctor"), ada.read("doctor")):
        told = {(each["what"], each["state"], each["found"]) for each in found}
        assert {("peer", "ok", f"{name} is reached, and has this version") for name in "ab"} <= told
        assert {("clock", "ok", f"agrees with that of {name}") for name in "ab"} <= told
        assert ("job", "ok", "the cluster test has no job yet; gyrectl job submit gives it one") in told
        assert ("store", "ok") in {each[:2] for each in told}
    assert {"port", "disk", "shm", "sandbox", "certificate", "transfer"} <= {each["what"] for each in here("doctor")}

    away = fleet.nodes["b"]
    away.signal(signal.SIGKILL)
    result = CliRunner().invoke(app, ["doctor", "--node", str(away.file)])
    assert result.exit_code == 1, "its peer line: it is believed to be there"
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert [line[0] for line in lines if line[1] == "gyred"] == ["warning"]
    assert [line[0] for line in lines if line[1] == "peer"] == ["ok", "fault"]
    away.start()


def test_who_is_not_trusted_and_who_is_away_are_one_line_each(fleet: Fleet) -> None:
    fleet.begin()
    asyncio.run(at_the_gate(fleet))
    ada = Person(fleet, "ada")
    assert ada.read("status")["job"] == "small"

    late = pki.issue(fleet.root / "pki", "late", pki.Kind.CLIENT, 1, now=datetime.now(UTC) - timedelta(days=9))
    assert late.left(datetime.now(UTC)) < timedelta(0)
    line = Person(fleet, "late").refused("job", "pause")
    assert "does not accept our certificate" in line
    assert "expired" in line

    foreign = fleet.root / "foreign"
    pki.init(foreign, "foreign", 10)
    pki.issue(foreign, "eve", pki.Kind.CLIENT, 2)
    assert "is not trusted: " in Person(fleet, "eve", foreign).refused("job", "pause")
    known = Person(fleet, "eve", foreign, ca=str(fleet.root / "pki" / "ca.pem"))
    assert "it must be a person's, and signed by" in known.refused("job", "pause", code=2)
    own = Person(fleet, "a").refused("job", "pause", code=2)
    assert "it names the node 'a'; `gyrectl pki issue NAME --client` makes a person's" in own
    assert "one of a, b" in Person(fleet, "ada", node="c").refused("job", "pause", code=2)
    assert "paused" not in fleet.log

    fleet.kill(fleet.nodes["b"])  # within its lease: it is believed to be there
    line = Person(fleet, "ada", node="b").refused("job", "pause")
    assert line.startswith("b does not answer: ")
    assert "cannot be reached" in line
    assert ada.read("status")["job"] == "small", "the other node answers"
    fleet.kill(fleet.nodes["a"])
    assert "cannot be reached" in ada.refused("status")
