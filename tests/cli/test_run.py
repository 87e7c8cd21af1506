"""`gyrectl run …` on journals as a gateway leaves them: open, closed, torn; while nothing of them is changed."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from gyre.cli.gyrectl import app
from gyre.cli.run_files import RunFiles
from gyre.cli.run_output import visible
from gyre.config import JobSpec
from gyre.ids import CallId, GroupId, NodeId, RunId, TaskId
from gyre.store.open import keys_for, open_store
from gyre.store.records import GroupRecord, GroupState, Purpose, RunRecord, RunState
from gyre.store.typed import TypedStore
from gyre.trajectory.journal import (
    SEGMENT_HEADER,
    CallDelivered,
    CallEnded,
    CallSampled,
    CallStarted,
    JournalRecord,
    RunClosed,
    RunOpened,
    encode,
)
from gyre.trajectory.records import LineageRole, Outcome

MAIN, MAIN_SUMMARY, SUB, _, AUXILIARY = LineageRole
CIRCUMSTANCES = {"new_thread": False, "without_answers": False, "after_summary": False, "left_answer": False}
NONE_OF_THEM = json.dumps(CIRCUMSTANCES).encode()
SPEC = {
    "job": {"name": "looked-at", "steps": 1},
    "model": {"path": "builtin:tiny"},
    "tasks": {"source": "builtin:chores"},
    "batch": {"j_max": 2},
}


def call(
    seq: int,
    base: int | None,
    suffix: list[int],
    output: list[int],
    role: LineageRole = MAIN,
    *,
    delivered: bool = True,
) -> list[JournalRecord]:
    name = CallId(f"r.1.{seq}")
    request = {
        "thread": "t" if role is SUB else "",
        "circumstances": CIRCUMSTANCES | {"new_thread": base is None},
        "body": {"extra": seq},
    }
    count = len(output)
    records: list[JournalRecord] = [
        CallStarted(
            call=name,
            seq=seq,
            started_unix_s=1700000000.0 + seq,
            dialect="openai-chat",
            digest=b"d",
            role=role,
            base=None if base is None else CallId(f"r.1.{base}"),
            suffix=array("i", suffix).tobytes(),
            max_tokens=64,
            request=json.dumps(request).encode(),
        ),
        CallSampled(
            name, array("i", output).tobytes(), array("f", [-0.5] * count).tobytes(), array("i", [3] * count).tobytes()
        ),
        CallEnded(name, "stop", (), b"{}"),
    ]
    return [*records, CallDelivered(name)] if delivered else records


RUN: list[JournalRecord] = [
    RunOpened(RunId("r"), GroupId("g"), 1, "key", "codex", 1.0, 64),
    *call(0, None, [40, 41, 42], [50, 51]),
    *call(1, 0, [43], [52]),
    *call(2, None, [60, 61], [62, 63, 64], SUB),
    *call(3, 1, [44], [53, 54], MAIN_SUMMARY),
    *call(4, None, [70], [71], AUXILIARY),
    *call(5, None, [80], [81], SUB),
    *call(6, 1, [45], [55], delivered=False),
    call(7, 1, [46], [])[0],
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    root = tmp_path / "job"
    root.mkdir()
    (root / "job.json").write_text(JobSpec.model_validate_json(json.dumps(SPEC)).to_json())
    (root / "node.toml").write_text(
        f'[node]\nname = "n0"\ndir = "{root}"\nbase = "{tmp_path}"\nstore = "sqlite://{root}/store.db"\n'
    )
    write(root / "journal/open/r/1", RUN)
    closed = [RunOpened(RunId("done"), GroupId("g"), 2, "k", "scripted", 1.0, 64), *call(0, None, [40], [41])]
    write(root / "journal/closed/done.2", [*closed, RunClosed(RunId("done"), 2, "the disk was full")])
    asyncio.run(write_records(root))
    return root


async def write_records(root: Path) -> None:
    """One group, of which one run has failed and the other lives."""
    url = f"sqlite://{root}/store.db"
    store, keys = TypedStore(open_store(url)), keys_for(url, "looked-at")
    runs = RunId("r"), RunId("done")
    live = RunRecord(runs[0], GroupId("g"), RunState.LIVE, 1, NodeId("n0"), None, None, "", None, 0.0, 0.0)
    failed = replace(
        live, run=runs[1], state=RunState.SETTLED, attempt=2, outcome=Outcome.INFRA_FAILED, reason="a disk"
    )
    group = GroupRecord(GroupId("g"), TaskId("t"), Purpose.TRAIN, 0, runs, GroupState.OPEN, 0, 0)
    await store.put(f"{keys.root}groups/g", group)
    for record in (live, failed):
        await store.put(keys.run(record.run), record)
    await store.store.close()


def write(folder: Path, records: list[JournalRecord], tail: bytes = b"") -> None:
    folder.mkdir(parents=True)
    (folder / "000000.journal").write_bytes(SEGMENT_HEADER + b"".join(map(encode, records)) + tail)


def gyrectl(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


def plain(*arguments: str) -> Any:
    result = gyrectl(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def content(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (root / "journal").rglob("*.journal")}


def test_a_copy_of_another_nodes_journal_is_read_as_one_of_ours_and_is_said_to_be_one(job: Path) -> None:
    for folder in ("open/there/1", "open/r/1"):  # r has moved, and its copy here is of no more use
        run = RunId(folder.split("/")[1])
        opened = RunOpened(run, GroupId("g"), 1, "k", "scripted", 1.0, 64)
        write(job / "copies/node-a" / folder, [opened, *call(0, None, [40], [41])])
    rows = {row["run"]: row for row in plain("list", "--dir", str(job))}
    assert {run: row["copy_of"] for run, row in rows.items()} == {"r": "", "done": "", "there": "node-a"}
    assert rows["r"]["calls"] == 8
    assert "open, copy of node-a" in gyrectl("list", "--dir", str(job)).stdout
    assert plain("tree", "there", "--dir", str(job))["sampled_tokens"] == 1


def test_list_names_open_and_closed_runs_and_how_far_they_are(job: Path) -> None:
    rows = {row["run"]: row for row in plain("list", "--dir", str(job))}
    assert (rows["r"]["state"], rows["r"]["calls"], rows["r"]["delivered_calls"]) == ("open", 8, 6)
    assert rows["r"]["sampled_tokens"] == 2 + 1 + 3 + 2 + 1 + 1
    assert (rows["done"]["attempt"], rows["done"]["state"], rows["done"]["failure"]) == (
        2,
        "closed",
        "the disk was full",
    )
    text = gyrectl("list", "--dir", str(job)).stdout
    assert "6 of 8" in text
    assert "the disk was full" in text


def test_tree_says_of_each_call_what_is_trained_and_why_the_rest_is_not(job: Path) -> None:
    found = plain("tree", "r", "--dir", str(job))
    told = [(row["seq"], row["use"], row["lineage"], row["context_in"], row["parent"]) for row in found["calls"]]
    assert told == [
        (0, "counted", 0, [], None),
        (1, "counted", 0, [], "r.1.0"),
        (2, "counted", 1, [], None),
        (3, "counted", 0, [], "r.1.1"),
        (4, "auxiliary", None, [], None),
        (5, "over j_max", None, [], None),
        (6, "undelivered", None, [], "r.1.1"),
        (7, "unanswered", None, [], "r.1.1"),
    ]
    assert found["faults"] == []
    assert (found["purpose"], found["outcome"], found["not_trained"]) == ("train", "", "it has not settled yet")
    failed = plain("tree", "done", "--dir", str(job))
    assert (failed["outcome"], failed["step"], failed["not_trained"]) == (
        "infra_failed",
        None,
        "it has no reward: a disk",
    )


def test_tree_says_that_it_cannot_tell_what_was_trained_where_the_records_are_gone(job: Path) -> None:
    (job / "store.db").unlink()
    result = gyrectl("tree", "r", "--dir", str(job))
    assert result.exit_code == 0
    assert "what was trained is not told" in result.stderr
    assert "trained in step" not in result.stdout


def test_tree_is_drawn_with_a_line_for_every_call(job: Path) -> None:
    text = gyrectl("tree", "r", "--dir", str(job)).stdout
    for part in (
        "#0 main",
        "#3 main-summary",
        "not trained: auxiliary",
        "not trained: undelivered",
        "fork: new-thread",
    ):
        assert part in text
    assert text.splitlines()[0].strip() == "not settled: nothing of it is trained, for it has not settled yet"
    assert len(text.splitlines()) == 10


def test_replay_gives_a_calls_exact_prompt_and_output(job: Path) -> None:
    found = plain("replay", "r", "1", "--dir", str(job))
    assert found["prompt_ids"] == [40, 41, 42, 50, 51, 43]
    assert [(token["id"], token["logprob"], token["version"]) for token in found["output"]] == [(52, -0.5, 3)]
    assert found["request"] == {"extra": 1}
    assert found["prompt_text"]
    assert plain("replay", "r", "r.1.1", "--dir", str(job)) == found
    text = gyrectl("replay", "r", "1", "--dir", str(job)).stdout
    assert "-0.5000" in text
    assert "prompt, 6 tokens" in text


def test_replay_of_a_whole_run_shows_of_each_prompt_what_was_new(job: Path) -> None:
    lines = gyrectl("replay", "r", "--dir", str(job), "--json").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == list(range(8))
    text = gyrectl("replay", "r", "--dir", str(job)).stdout
    assert "prompt, 6 tokens, of which 5 are the call before it" in text
    assert "no end on record" in text


def test_a_run_of_which_this_node_has_no_journal_is_listed_from_its_record(job: Path) -> None:
    url = f"sqlite://{job}/store.db"

    async def add() -> None:
        store, keys = TypedStore(open_store(url)), keys_for(url, "looked-at")
        group, node = GroupId("g"), NodeId("node-b")
        there = RunRecord(RunId("far"), group, RunState.SETTLED, 1, node, Outcome.FINISHED, 0.25, "", None, 0.0, 0.0)
        for record in (
            there,
            replace(there, run=RunId("r"), attempt=2, state=RunState.QUEUED, outcome=None, reward=None),
        ):
            await store.put(keys.run(record.run), record)
        await store.store.close()

    asyncio.run(add())
    rows = {(row["run"], row["attempt"]): row for row in plain("list", "--dir", str(job))}
    assert list(rows) == [("done", 2), ("far", 1), ("r", 1), ("r", 2)]
    parts = ("run_state", "node", "task", "outcome", "reward", "state", "calls")
    assert [rows["far", 1][part] for part in parts] == ["settled", "node-b", "t", "finished", 0.25, "", None]
    assert [rows["r", 2][part] for part in parts] == ["queued", "node-b", "t", None, None, "", None]
    assert [rows["r", 1][part] for part in parts] == [None, None, None, None, None, "open", 8]  # over: it began again
    assert [rows["done", 2][part] for part in parts] == ["settled", "n0", "t", "infra_failed", None, "closed", 1]
    text = gyrectl("list", "--dir", str(job)).stdout
    (line,) = [line for line in text.splitlines() if line.startswith("far")]
    assert line.split() == ["far", "1", "finished", "node-b", "t", "0.250", "-", "-", "-", "-", "-"]


def test_a_torn_tail_is_looked_past_and_left_as_it_is(job: Path) -> None:
    write(
        job / "journal/open/torn/1",
        [RunOpened(RunId("torn"), GroupId("g"), 1, "k", "x", 1.0, 9)],
        b"torn in the middle",
    )
    write(job / "journal/open/empty/1", [], b"t")
    before = content(job)
    rows = {row["run"]: row for row in plain("list", "--dir", str(job))}
    assert rows["torn"]["damaged"]
    assert "empty" not in rows
    listed = gyrectl("list", "--dir", str(job))
    assert listed.exit_code == 0
    assert listed.stderr.startswith("attempt 1: journal of run empty: 'nothing' is not allowed")
    assert listed.stderr.endswith(f"1 bytes from byte {len(SEGMENT_HEADER)} of 000000.journal on are not read\n")
    assert plain("tree", "torn", "--dir", str(job))["calls"] == []
    assert content(job) == before


def test_damage_in_a_journals_middle_is_said_with_its_place(job: Path, tmp_path: Path) -> None:
    path = job / "journal/closed/done.2/000000.journal"
    data = bytearray(path.read_bytes())
    whole = SEGMENT_HEADER + encode(RunOpened(RunId("done"), GroupId("g"), 2, "k", "scripted", 1.0, 64))
    data[len(whole) + 20] ^= 0xFF
    path.write_bytes(data)
    said = f"damaged: {len(data) - len(whole)} bytes from byte {len(whole)} of 000000.journal on are not read"
    assert said in gyrectl("list", "--dir", str(job)).stdout
    assert {row["run"]: row["damaged"] for row in plain("list", "--dir", str(job))} == {"r": "", "done": said}
    for arguments in (["tree", "done"], ["replay", "done"], ["export", "--out", str(tmp_path / "out")]):
        result = gyrectl(*arguments, "--dir", str(job))
        assert (result.exit_code, result.stderr) == (0, f"run done, attempt 2: {said}\n")


def test_a_journal_that_cannot_be_read_is_named_and_the_others_are_gone_on_with(job: Path, tmp_path: Path) -> None:
    (job / "journal/open/dir/1/000000.journal").mkdir(parents=True)
    for arguments in (["list"], ["export", "--out", str(tmp_path / "out")]):
        result = gyrectl(*arguments, "--dir", str(job))
        assert result.exit_code == 0, result.output
        assert result.stderr.startswith("attempt 1: journal of run dir: ")
        assert result.stderr.endswith("is not allowed; a file that can be read (Is a directory)\n")
        assert len(result.stderr.splitlines()) == 1
    result = gyrectl("tree", "dir", "--dir", str(job))
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


STEERING = "\x1b]0;t\x07 \x9b31m \x00 \r \u202e \u2066 \x7f"


def test_what_would_steer_the_terminal_is_shown_and_not_sent(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HostileWords:
        def text(self, token_ids: Sequence[int]) -> str:
            return STEERING

    monkeypatch.setattr(RunFiles, "words", lambda self: HostileWords())  # pyright: ignore[reportUnknownLambdaType]
    opened = RunOpened(RunId(f"e{STEERING}"), GroupId("g"), 1, "k", f"p{STEERING}", 1.0, 64)
    end = RunClosed(RunId("evil"), 1, f"f{STEERING}")
    write(job / "journal/closed/evil.1", [opened, *call(0, None, [40], [41]), end])
    write(job / "journal/open/un\x1bread/1", [])
    for arguments in (["list"], ["tree", "evil"], ["replay", "evil"], ["replay", "evil", "0"], ["tree", "no\x1b"]):
        result = gyrectl(*arguments, "--dir", str(job))
        said = result.stdout + result.stderr
        assert "\\x1b" in said
        assert all(char.isprintable() or char == "\n" for char in said), arguments


def test_lines_and_tabs_of_a_text_stay(job: Path) -> None:
    assert visible("a\n\tb \N{SNOWMAN}é") == "a\n\tb \N{SNOWMAN}é"
    assert visible("a\x1b[31m\u202e") == "a\\x1b[31m\\u202e"


@pytest.mark.parametrize("columns", [80, 50, 12])
@pytest.mark.parametrize("arguments", [["list"], ["tree", "r"], ["replay", "r", "1"]])
def test_nothing_is_lost_on_a_narrow_terminal(job: Path, arguments: list[str], columns: int) -> None:
    def words(text: str) -> str:
        return "".join(char for char in text if char.isalnum() or char in "#,():-.")

    wide = words(on_a_terminal(400, *arguments, "--dir", str(job)))
    assert sorted(words(on_a_terminal(columns, *arguments, "--dir", str(job)))) == sorted(wide)


def on_a_terminal(columns: int, *arguments: str) -> str:
    """What the command writes to a terminal of that width."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    code = "from gyre.cli.gyrectl import app; app()"
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", *arguments],
        stdin=its,
        stdout=its,
        stderr=subprocess.PIPE,
        env={**env, "TERM": "dumb"},
    )
    os.close(its)
    written = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        written += data
    os.close(ours)
    assert process.wait(60) == 0, process.communicate()
    return written.decode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tree", "nobody"], "run: 'nobody' is not allowed; a run with a journal on this node"),
        (["tree", "r", "--attempt", "7"], "run: 'r, attempt 7' is not allowed; a run with a journal on this node"),
        (["replay", "r", "99"], "call: '99' is not allowed; a call of run r: 0 to 7, or its id"),
        (["export", "nobody", "--out", "x"], "run: 'nobody' is not allowed"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(job: Path, arguments: list[str], said: str) -> None:
    result = gyrectl(*arguments, "--dir", str(job))
    assert result.exit_code == 2
    assert result.stderr.startswith(said)
    assert len(result.stderr.splitlines()) == 1


def test_export_writes_calls_and_lineages_as_jsonl_and_parquet_that_agree(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = gyrectl("export", "--out", str(out), "--dir", str(job))
    assert result.exit_code == 0, result.output
    for name in ("calls", "lineages"):
        lines = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        assert pq.read_table(out / f"{name}.parquet").to_pylist() == lines
    calls = [json.loads(line) for line in (out / "calls.jsonl").read_text().splitlines()]
    assert len(calls) == 9
    assert calls[2]["suffix_ids"] == [43]
    assert json.loads(calls[2]["request"]) == {"extra": 1}
    lineages = [json.loads(line) for line in (out / "lineages.jsonl").read_text().splitlines()]
    assert (lineages[0]["run"], lineages[0]["lineage"], lineages[0]["counted_tokens"]) == ("done", 0, 1)
    assert {(row["run"], row["purpose"], row["outcome"], row["step"]) for row in calls} == {
        ("r", "train", None, None),
        ("done", "train", "infra_failed", None),
    }
    counted = sum(row["counted_tokens"] for row in calls)
    assert counted == sum(row["counted_tokens"] for row in lineages) == sum(sum(row["counted"]) for row in lineages)
    assert not list(out.glob("*.draft"))


def test_export_without_pyarrow_writes_jsonl_and_says_so(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = gyrectl("export", "r", "--out", str(tmp_path / "out"), "--dir", str(job))
    assert result.exit_code == 0, result.output
    assert "pyarrow is not installed, so no Parquet was written: pip install 'gyre[export]'" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["calls.jsonl", "lineages.jsonl"]


def test_an_export_that_fails_leaves_no_drafts(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert gyrectl("export", "nope", "--out", str(out), "--dir", str(job)).exit_code == 2
    assert list(out.iterdir()) == []


def test_json_has_null_for_a_number_that_is_not_finite(job: Path, tmp_path: Path) -> None:
    started, *others = call(0, None, [40], [41])
    started = replace(
        started, request=b'{"thread": "", "circumstances": %s, "body": {"top_p": Infinity}}' % NONE_OF_THEM
    )
    opened = RunOpened(RunId("inf"), GroupId("g"), 1, "k", "codex", 1.0, 64)
    write(job / "journal/open/inf/1", [opened, replace(started, started_unix_s=inf), *others])
    out = tmp_path / "out"
    result = gyrectl("export", "inf", "--out", str(out), "--dir", str(job))
    assert result.exit_code == 0, result.output
    (row,) = [strict(line) for line in (out / "calls.jsonl").read_text().splitlines()]
    assert (row["started_unix_s"], strict(row["request"])) == (None, {"top_p": None})
    assert [strict(line)["run"] for line in (out / "lineages.jsonl").read_text().splitlines()] == ["inf"]
    assert strict(gyrectl("replay", "inf", "0", "--json", "--dir", str(job)).stdout)["request"] == {"top_p": None}


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_every_column_of_the_export_is_documented() -> None:
    from gyre.cli.run_export import CALLS, LINEAGES

    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    for name in (*CALLS, *LINEAGES):
        assert f"| `{name}` |" in page, name
