"""gyrectl in an operator's hands, on one real job: what is read, what is ordered, and what is refused.

The tests go through the life of the job in their order: it stands at its gates, is held, let go on, ends, and is looked
at again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from job.a_job import DEADLINE_S, Job
from typer.testing import CliRunner, Result

from gyre.actors.messages_gyrectl import Status
from gyre.cli.gyrectl import app
from gyre.kv_migrate.choice import Kind, choose, look
from gyre.store.records import Role

T = TypeVar("T")

MAX_LIVE = 2
"""Fewer than a group has runs: one of the gated group stays queued."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Runs until its gates are reached: two runs live, one or more queued."""
    made = Job(
        tmp_path_factory.mktemp("operator"), {"harness": {"max_live": MAX_LIVE}, "engine": {"kv_transport": Kind.TCP}}
    )
    made.start()
    asyncio.run(made.until_status("runs at the gate", lambda status: at_the_gate(made, status)))
    yield made
    made.kill_all()


def at_the_gate(job: Job, status: Status) -> bool:
    gates = list(job.dir.runs.glob("t*/*/workspace/gate"))
    return status.phase == "training" and status.live == len(gates) == MAX_LIVE and len(job.harnesses("t*")) == MAX_LIVE


def gyrectl(job: Job, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--dir", str(job.dir.root)])


def read(job: Job, *words: str) -> Any:
    """What a command that succeeds says in JSON."""
    result = gyrectl(job, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(job: Job, *words: str, code: int = 1) -> str:
    """The one line of a command that fails."""
    result = gyrectl(job, *words)
    assert result.exit_code == code, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr.strip()


def until(look: Callable[[], T], enough: Callable[[T], bool], job: Job) -> T:
    deadline_s = time.monotonic() + DEADLINE_S
    while not enough(found := look()):
        assert time.monotonic() < deadline_s, f"waited in vain, last: {found}; {job.tail()}"
        time.sleep(0.1)
    return found


def cell(job: Job, name: str) -> dict[str, Any]:
    return {row["cell"]: row for row in read(job, "cell", "list")}[name]


def at_rest(job: Job, name: str, role: Role) -> dict[str, Any]:
    return until(lambda: cell(job, name), lambda row: row["role"] == row["desired"] == role, job)


# ---------------------------------------------------------------------------------------------- while it runs


def test_what_the_job_is_at_is_read_for_people_and_programs(job: Job) -> None:
    assert [row["cell"] for row in read(job, "cell", "list")] == ["c0", "c1"]
    assert cell(job, "c0")["core"]
    assert not cell(job, "c1")["core"]
    (node,) = read(job, "node", "list")
    assert (node["node"], node["there"], node["leads"], node["cells"]) == ("n0", True, True, ["c0", "c1"])
    assert (node["live"], node["queued"] >= 1) == (MAX_LIVE, True)
    why = choose(Kind.TCP, look(Kind.TCP)).reason
    assert read(job, "node", "show", "n0")["kv_transport"] == {"c0": why, "c1": why}
    assert gyrectl(job, "node", "show", "n0").output.count(f"  {why}\n") == 2
    assert f"engine-c0: KV blocks move over {why}\n" in job.log
    assert read(job, "leader", "show")["node"] == "n0"
    assert read(job, "snapshot", "show")["version"] == 0
    assert [row["authoritative"] for row in read(job, "snapshot", "history")] == [True]
    groups = read(job, "group", "list")
    assert [row["purpose"] for row in groups] == ["heldout_before"] * 2 + ["train"] * 2
    (open_group,) = [row for row in read(job, "group", "list", "--state", "open") if "gated" in row["task"]]
    assert (open_group["runs"], open_group["settled"]) == (3, 0)
    assert read(job, "step", "list") == []
    shown = read(job, "job", "show")
    assert (shown["state"], shown["running"], shown["live"], shown["launched_groups"]) == ("running", True, MAX_LIVE, 2)
    for words in (("cell", "list"), ("node", "list"), ("group", "list"), ("job", "show"), ("leader", "show")):
        assert (
            "c0" in gyrectl(job, *words).output or "n0" in gyrectl(job, *words).output or words[0] in ("group", "job")
        )


def test_input_that_is_wrong_is_one_line_and_exit_code_2(job: Job) -> None:
    assert "role: 'loading' is not allowed; rollout or train" in refused(job, "cell", "switch", "c0", "loading", code=2)
    assert "one of open, settled, consumed" in refused(job, "group", "list", "--state", "shut", code=2)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("node", "drain", "nobody"), "node: 'nobody' is not allowed; one of n0"),
        (("node", "undrain", "nobody"), "node: 'nobody' is not allowed; one of n0"),
        (("cell", "switch", "c9", "train"), "cell: 'c9' is not allowed; one of c0, c1"),
        (("cell", "pin", "c9", "train"), "cell: 'c9' is not allowed; one of c0, c1"),
        (("cell", "unpin", "c9"), "cell: 'c9' is not allowed; one of c0, c1"),
        (("run", "show", "nobody"), "run: 'nobody' is not allowed; a run of the job"),
        (("run", "restart", "nobody"), "run: 'nobody' is not allowed; a run of the job"),
        (("run", "cancel", "nobody"), "run: 'nobody' is not allowed; a run of the job"),
    ],
)
def test_a_name_that_nothing_has_is_bad_input_whatever_it_names(job: Job, words: tuple[str, ...], line: str) -> None:
    assert refused(job, *words, code=2).startswith(line)


def test_the_doctor_finds_nothing_wrong_with_the_job_itself(job: Job) -> None:
    result = gyrectl(job, "doctor", "--json")
    found = {finding["what"]: finding for finding in json.loads(result.stdout)}
    for what in ("store", "gyred", "versions", "clock", "port", "harness", "torch", "megatron"):
        assert found[what]["state"] == "ok", found[what]
    assert result.exit_code == (1 if any(each["state"] == "fault" for each in found.values()) else 0)


def test_a_pin_holds_a_cell_until_it_is_taken_away(job: Job) -> None:
    asked = gyrectl(job, "cell", "pin", "c0", "rollout")
    assert asked.exit_code == 1
    assert "no step will be taken until it is unpinned" in asked.output
    assert cell(job, "c0")["pinned"] is None
    assert read(job, "cell", "pin", "c0", "rollout", "--yes") == {"cell": "c0", "pinned": "rollout"}
    at_rest(job, "c0", Role.ROLLOUT)
    assert refused(job, "cell", "switch", "c0", "train") == "c0 is pinned to rollout; unpin it first"
    assert read(job, "cell", "pin", "c1", "train")["pinned"] == "train"
    at_rest(job, "c1", Role.TRAIN)
    assert "no run would be served any more" in refused(job, "cell", "pin", "c0", "train", "--yes")
    for name in ("c0", "c1"):
        assert read(job, "cell", "unpin", name) == {"cell": name, "pinned": None}
    assert refused(job, "cell", "unpin", "c0") == "c0 is not pinned"


def test_a_switch_that_is_ordered_is_made_and_then_the_policy_decides_again(job: Job) -> None:
    read(job, "cell", "pin", "c0", "rollout", "--yes")
    at_rest(job, "c0", Role.ROLLOUT)
    at_rest(job, "c1", Role.ROLLOUT)
    read(job, "cell", "unpin", "c0")
    before = cell(job, "c1")["epoch"]
    assert refused(job, "cell", "switch", "c1", "rollout") == "c1 is there already"
    assert read(job, "cell", "switch", "c1", "train") == {"cell": "c1", "ordered": "train"}

    def made() -> list[Any]:
        switches = asyncio.run(job.books()).switches
        return [each for each in switches if each.cell == "c1" and each.epoch == before + 1]

    (switch,) = until(made, bool, job)
    assert (switch.start, switch.desired, switch.end, switch.reason) == (Role.ROLLOUT, Role.TRAIN, Role.TRAIN, "")
    at_rest(job, "c1", Role.ROLLOUT)


def test_a_leader_that_resigns_is_followed_at_once_and_no_run_notices(job: Job) -> None:
    harnesses = job.harnesses()
    before = read(job, "leader", "show")["token"]
    resigned = read(job, "leader", "resign")
    assert (resigned["token_before"], resigned["token"] > before) == (before, True)
    assert read(job, "leader", "show")["token"] == resigned["token"]
    assert job.harnesses() == harnesses


def test_a_lone_node_that_drains_keeps_its_live_runs_and_who_waits_for_it_hears_when_it_takes_runs_again(
    job: Job,
) -> None:
    assert refused(job, "node", "drain", "n0", "--within", "soon", code=2).startswith("--within: 'soon' is not allowed")
    assert refused(job, "node", "undrain", "n0") == "n0 is not draining"
    before = job.harnesses("t*")
    asked = gyrectl(job, "node", "drain", "n0", "--within", "0s")
    assert (asked.exit_code, "What the 2 live runs of n0 did is lost" in asked.output) == (1, True)
    assert not read(job, "node", "show", "n0")["draining"]  # and nobody says yes
    with waiting(job, "--within", "0s", "--yes") as first:
        assert "n0: 2 live, " in (line := said(first))
        assert "; no other node takes runs" in line
        at = "n0 drains, and its time is over: 2 live runs stay, for no other node takes runs"
        until(lambda: at in job.log, bool, job)
        first.send_signal(signal.SIGINT)
        assert first.wait(DEADLINE_S) == -signal.SIGINT  # of which a shell makes 130
    shown = read(job, "node", "show", "n0")
    assert (shown["draining"], shown["within_s"], shown["live"]) == (True, 0.0, 2)
    assert refused(job, "node", "drain", "n0", "--within", "0s", "--yes") == "n0 is draining already"
    with waiting(job) as second:  # it only waits
        assert "n0: 2 live, " in said(second)
        assert read(job, "node", "undrain", "n0") == {"node": "n0", "draining": False}
        assert second.wait(DEADLINE_S) == 1
        assert second.communicate()[1].splitlines()[-1] == "n0 takes runs again"
    assert job.harnesses("t*") == before


def waiting(job: Job, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gyre.cli.gyrectl", "node", "drain", "n0", *words, "--wait"]
    return subprocess.Popen([*command, "--dir", str(job.dir.root)], stderr=subprocess.PIPE, text=True)


def said(program: subprocess.Popen[str]) -> str:
    assert program.stderr is not None
    return program.stderr.readline()


def test_a_run_that_is_restarted_begins_again_as_its_next_attempt(job: Job) -> None:
    live = next(run.run for run in asyncio.run(job.books()).runs if run.state.value == "live")
    before = job.harnesses(live)
    assert "is lost for training" in gyrectl(job, "run", "restart", live).output  # and nobody says yes
    assert read(job, "run", "restart", live, "--yes") == {"run": live}
    assert before.keys() == {f"{live}/1"}
    until(lambda: job.harnesses(live), lambda now: f"{live}/1" not in now, job)
    shown = read(job, "run", "show", live)  # it waits again: who waited before it may have its place
    assert (shown["run"], shown["attempt"], shown["purpose"], shown["outcome"]) == (live, 2, "train", None)
    at = f"{live}: begins again as attempt 2, by gyrectl"
    until(lambda: at in job.log, bool, job)


def test_runs_that_are_cancelled_settle_as_no_evidence_and_are_not_started_again(job: Job) -> None:
    runs = asyncio.run(job.books()).runs
    queued = max(run.run for run in runs if run.state.value == "queued")
    live = next(run.run for run in runs if run.state.value == "live")
    assert "is lost for training" in gyrectl(job, "run", "cancel", live).output  # and nobody says yes
    for run in (queued, live):
        assert read(job, "run", "cancel", run, "--yes") == {
            "run": run,
            "outcome": "infra_failed",
            "reason": "cancelled",
        }
        assert refused(job, "run", "cancel", run, "--yes") == f"{run} is neither queued nor live"
    cancelled = {run.run: run for run in asyncio.run(job.books()).runs if run.reason == "cancelled"}
    attempts = {run.run: run.attempt for run in runs}
    assert {(run.run, run.attempt, run.reward) for run in cancelled.values()} == {
        (run, attempts[run], None) for run in (queued, live)
    }
    assert not any(job.harnesses(run) for run in (queued, live))


def test_the_shell_completes_commands() -> None:
    words = {"_GYRECTL_COMPLETE": "complete_bash", "COMP_WORDS": "gyrectl cell ", "COMP_CWORD": "2"}
    program = Path(sys.executable).with_name("gyrectl")
    done = subprocess.run([program], env={**os.environ, **words}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["list", "switch", "pin", "unpin"]


# ---------------------------------------------------------------------------------------------- held, and let go on


def test_a_paused_job_launches_nothing_and_ends_what_lives(job: Job) -> None:
    assert refused(job, "job", "resume") == "the job is running, not paused"
    assert read(job, "job", "pause") == {"state": "paused"}
    assert refused(job, "job", "pause") == "the job is paused, not running"
    before = read(job, "job", "show")
    job.open_gate()
    none_live = until(lambda: read(job, "job", "show"), lambda shown: shown["live"] == 0, job)
    assert none_live["state"] == "paused"
    assert none_live["queued"] <= before["queued"]
    assert none_live["launched_groups"] == 2
    assert "paused" in gyrectl(job, "status").output


def test_a_job_that_is_let_go_on_comes_to_its_end_and_who_watches_it_sees_that(job: Job) -> None:
    top = [sys.executable, "-m", "gyre.cli.gyrectl", "top", "--json", "--dir", str(job.dir.root)]
    with subprocess.Popen(top, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["phase"] == "paused"
        assert read(job, "job", "resume") == {"state": "running"}
        assert asyncio.run(job.ended()) == 0, job.tail()
        seen = [json.loads(line) for line in watching.communicate(timeout=DEADLINE_S)[0].splitlines()]
    assert watching.returncode == 0
    assert all(status["state"] in ("running", "paused", "finished") for status in seen)
    assert job.processes() == {}


# ---------------------------------------------------------------------------------------------- after its end


def test_what_the_job_was_is_read_from_its_file_when_it_has_ended(job: Job) -> None:
    shown = read(job, "job", "show")
    assert (shown["state"], shown["running"], shown["steps"], shown["version"]) == ("finished", False, 2, 2)
    assert [row["step"] for row in read(job, "snapshot", "history")] == [None, 1, 2]
    assert [(row["step"], row["groups"]) for row in read(job, "step", "list")] == [(1, 2), (2, 2)]
    assert read(job, "group", "list", "--state", "open") == []
    (node,) = read(job, "node", "list")
    assert (node["there"], node["leads"], node["live"], node["queued"]) == (False, False, 0, 0)
    assert gyrectl(job, "leader", "show").exit_code == 1


def test_orders_and_the_live_view_need_a_job_that_runs(job: Job) -> None:
    for words in (("top",), ("cell", "switch", "c0", "train"), ("leader", "resign"), ("job", "pause")):
        assert "is not running" in refused(job, *words)
    found = {each["what"]: each["state"] for each in json.loads(gyrectl(job, "doctor", "--json").stdout)}
    assert "gyred" not in found
    assert found["store"] == found["port"] == "ok"


def test_a_store_that_is_not_whole_is_a_fault_with_the_mend(job: Job) -> None:
    whole = job.dir.store.read_bytes()
    for beside in job.dir.root.glob("store.db-*"):
        beside.unlink()
    job.dir.store.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    result = gyrectl(job, "doctor")
    job.dir.store.write_bytes(whole)
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("fault    store")]
    assert "begin again in another folder" in line
