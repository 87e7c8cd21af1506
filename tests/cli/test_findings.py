"""What `gyrectl doctor` makes of what it measures: ok, a warning or a fault, and the mend."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre import pki
from gyre.actors.messages_journals import Copies
from gyre.cli import findings
from gyre.cli.findings import State
from gyre.cli.gyrectl import app
from gyre.ids import NodeId
from gyre.store.records import JobState

GIB = 1 << 30
HERE = Path("/data/job")


@pytest.mark.parametrize(
    ("free", "total", "snapshot", "state", "mend"),
    [
        (100 * GIB, 200 * GIB, 10 * GIB, State.OK, ""),
        (29 * GIB, 200 * GIB, 10 * GIB, State.WARNING, "3 snapshots need 30 GiB"),
        (10 * GIB, 200 * GIB, 10 * GIB, State.FAULT, "one snapshot needs 10 GiB"),
        (1 * GIB, 200 * GIB, 0, State.WARNING, "a journal that cannot be written stops the job"),
        (1 * GIB, 10 * GIB, 0, State.OK, ""),
        (0, 10 * GIB, 0, State.FAULT, "free some space"),
    ],
)
def test_a_disk_has_room_for_the_next_snapshots(free: int, total: int, snapshot: int, state: State, mend: str) -> None:
    found = findings.disk(HERE, free, total, snapshot)
    assert found.state is state
    assert mend in found.mend
    assert bool(found.mend) == (state is not State.OK)


def test_a_clock_that_is_off_is_a_warning_for_nothing_is_decided_by_it() -> None:
    assert findings.clock(1.0, "gyred").state is State.OK
    off = findings.clock(-3600.0, "gyred")
    assert (off.state, off.found) == (State.WARNING, "gyred is 3600 s behind this clock")


def test_a_certificate_warns_a_month_before_and_says_which_command_renews_it() -> None:
    path = Path("pki/n1.pem")
    assert findings.certificate(path, "n1", timedelta(days=31), ca=False).state is State.OK
    soon = findings.certificate(path, "n1", timedelta(days=29), ca=False)
    assert (soon.state, soon.mend) == (State.WARNING, "gyrectl pki issue n1 --renew")
    over = findings.certificate(path, "n1", timedelta(seconds=-1), ca=True)
    assert (over.state, "gyrectl pki init" in over.mend) == (State.FAULT, True)


def test_a_gyred_of_another_version_is_a_fault_that_names_both() -> None:
    ours, same = (("gyre", "0.2.0"), ("Python", "3.11.9")), (("gyre", "0.2.0"), ("Python", "3.11.9"))
    assert findings.versions(ours, same).state is State.OK
    found = findings.versions(ours, (("gyre", "0.1.0"), ("Python", "3.11.9")))
    assert (found.state, found.found) == (State.FAULT, "gyred has gyre 0.1.0, here 0.2.0")


HERE_LOGS = HERE / "logs"


def test_what_mends_a_gyred_of_a_cluster_is_not_what_mends_one_alone() -> None:
    node, other = NodeId("a"), (("gyre", "0.1.0"),)
    alone = (findings.gyred_silent("why", None, HERE_LOGS), findings.versions((("gyre", "0.2.0"),), other))
    member = (findings.gyred_silent("why", node, HERE_LOGS), findings.versions((("gyre", "0.2.0"),), other, node))
    assert all("gyrectl up JOB --resume" in found.mend for found in alone)
    assert "/data/job/logs/gyred.log" in alone[0].mend
    for found in member:
        assert "gyred@a" in found.mend
        assert "gyrectl up" not in found.mend
        assert "gyred.log" not in found.mend


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PAUSED])
def test_a_gyred_that_is_down_while_its_job_has_not_ended_is_a_fault(state: JobState) -> None:
    for node, fell, fault in (("a", False, True), ("a", True, True), (None, True, True), (None, False, False)):
        found = findings.gyred_gone(state, NodeId(node) if node else None, fell=fell)
        assert (found is not None) is fault
        assert found is None or found.state is State.FAULT


def test_a_gyred_of_a_job_that_has_ended_or_never_began_there_lacks_nobody() -> None:
    for over in (JobState.FINISHED, JobState.FAILED):
        assert findings.gyred_gone(over, NodeId("a"), fell=True) is None
    assert findings.gyred_gone(None, NodeId("a"), fell=False) is None
    assert findings.gyred_gone(None, NodeId("a"), fell=True) is not None


def test_journals_that_another_node_lacks_are_a_warning_with_the_reason() -> None:
    has_all = findings.copies(Copies(NodeId("b"), 0, 0, ""), 2)
    assert has_all is not None
    assert (has_all.state, has_all.found) == (State.OK, "b has this node's journals")
    busy = findings.copies(Copies(NodeId("b"), 1, 2 << 10, ""), 2)
    assert busy is not None
    assert (busy.state, busy.found) == (State.OK, "b has this node's journals, but for 2 KiB on the way")
    lacks = findings.copies(Copies(NodeId("b"), 2, 3 << 20, "it cannot be reached"), 2)
    assert lacks is not None
    assert lacks.state is State.WARNING
    assert lacks.found == "b lacks 3 MiB of this node's journals: it cannot be reached"
    nobody = findings.copies(Copies(NodeId(""), 1, 10, "no other node can have it"), 3)
    assert nobody is not None
    assert (nobody.state, "no other node can have it" in nobody.found) == (State.WARNING, True)
    assert findings.copies(Copies(NodeId(""), 1, 10, "no other node can have it"), 1) is None, "it is alone"


def test_a_peer_that_does_not_answer_or_has_another_version_is_a_fault() -> None:
    ours = (("gyre", "0.2.0"), ("Python", "3.11.9"))
    told = {"b": ours, "c": "tls:10.0.0.3:7400 does not answer", "a": (("gyre", "0.1.0"), ("Python", "3.11.9"))}
    a, b, c = findings.peers(ours, told)
    assert (a.state, a.found) == (State.FAULT, "a has gyre 0.1.0, here 0.2.0")
    assert (b.state, b.mend) == (State.OK, "")
    assert (c.state, c.found) == (State.FAULT, "c: tls:10.0.0.3:7400 does not answer")


def test_an_alarm_of_etcd_is_a_fault() -> None:
    assert findings.quota("10.0.0.1:2379", []) is None
    full = findings.quota("10.0.0.1:2379", ["NOSPACE"])
    assert full is not None
    assert (full.state, "NOSPACE" in full.found, "defragment" in full.mend) == (State.FAULT, True, True)


def test_checkpoints_of_a_cluster_are_where_the_next_core_finds_them() -> None:
    assert findings.checkpoints(None, 1, there=False) is None
    own = findings.checkpoints(None, 2, there=False)
    assert own is not None
    assert own.state is State.WARNING
    states = [findings.checkpoints(HERE, 2, there=there) for there in (False, True)]
    assert [each.state for each in states if each] == [State.FAULT, State.OK]


def test_without_a_job_the_machine_is_looked_at_and_an_expired_certificate_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    before = runner.invoke(app, ["doctor"])
    assert {line.split()[1] for line in before.output.splitlines()} == {
        "torch",
        "megatron",
        "transfer",
        "sandbox",
        "disk",
    }
    pki.init(tmp_path / "pki", "lab", 30, now=datetime.now(UTC) - timedelta(days=60))
    after = runner.invoke(app, ["doctor"])
    assert after.exit_code == 1
    assert "fault    certificate  pki/ca.pem has expired; make a new authority" in after.output


def test_a_node_that_gets_no_runs_says_why_and_one_that_runs_has_to_be_in_the_cluster() -> None:
    assert findings.nodes("a", {"a": "", "b": ""}, running=True) == []
    (full,) = findings.nodes("a", {"a": "", "b": "/work cannot be written: No space left on device"}, running=True)
    assert full.state is State.WARNING
    assert full.found == "b gets no runs: /work cannot be written: No space left on device"
    (absent,) = findings.nodes("a", {"b": ""}, running=True)
    assert (absent.state, absent.found) == (State.FAULT, "a runs and is not in the cluster")
    assert findings.nodes("a", {"b": ""}, running=False) == []


def test_shared_memory_has_the_room_that_the_file_gives_to_snapshots() -> None:
    assert findings.shared_memory(HERE, 17 * GIB, 16 * GIB).state is State.OK
    small = findings.shared_memory(HERE, 64 << 20, 16 * GIB)
    assert (small.state, small.found) == (
        State.WARNING,
        "64 MiB free at /data/job; node.snapshot_memory_mib gives snapshots 16 GiB",
    )


def test_a_node_that_had_joined_and_is_gone_is_a_warning_and_none_at_all_a_fault() -> None:
    assert findings.absent("job", ["a", "b", "b"], ["a", "b", "c"]) == []
    (gone,) = findings.absent("job", ["a", "b"], ["a"])
    assert (gone.what, gone.state, gone.found) == ("node", State.WARNING, "b had joined job and is not there")
    for joined in (["a", "b"], []):
        (nobody,) = findings.absent("job", joined, [])
        assert (nobody.state, nobody.found) == (State.FAULT, "no node works on job")
