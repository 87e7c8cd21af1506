"""The evaluator, run as the process it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gyre.demo.evaluate_chores as evaluate_chores

EXPECTED = {"robin": "6\n", "heron": "b\na\n"}


def evaluate(
    tmp_path: Path,
    left: dict[str, str],
    *,
    outcome: str = "finished",
    submitted: bool | None = True,
    task: str | None = None,
    run: str | None = None,
) -> subprocess.CompletedProcess[str]:
    workspace = tmp_path / "workspace"
    workspace.mkdir(exist_ok=True)
    for name, content in left.items():
        (workspace / name).write_text(content)
    task_path, run_path = tmp_path / "task.json", tmp_path / "run.json"
    task_path.write_text(json.dumps({"expected": EXPECTED}) if task is None else task)
    run_path.write_text(json.dumps({"outcome": outcome, "submitted": submitted}) if run is None else run)
    return evaluator(str(task_path), str(workspace), str(run_path))


def evaluator(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", evaluate_chores.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={})


def score(done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert list(json.loads(line)) == ["score"]
    return json.loads(line)["score"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({}, 0.0),
        ({"plum": "6\n"}, 0.0),
        ({"robin": "7\n"}, 0.05),
        ({"robin": "6\n"}, 0.5),
        ({"robin": "6\n", "heron": "a\nb\n"}, 0.55),
        ({"robin": "6", "heron": "b\na\n"}, 0.55),
        ({"robin": "6\n", "heron": "b\na\n"}, 1.0),
    ],
)
def test_each_expected_file_counts_its_share_and_a_wrong_one_a_tenth_of_it(
    tmp_path: Path, left: dict[str, str], right: float
) -> None:
    assert score(evaluate(tmp_path, left)) == pytest.approx(right)


@pytest.mark.parametrize(
    ("outcome", "submitted", "right"),
    [
        ("finished", True, 1.0),
        ("finished", None, 1.0),
        ("finished", False, 0.3),
        ("timed_out", False, 0.3),
        ("timed_out", None, 0.3),
        ("timed_out", True, 1.0),
    ],
)
def test_a_run_that_did_not_submit_gets_three_tenths(
    tmp_path: Path, outcome: str, submitted: bool | None, right: float
) -> None:
    assert score(evaluate(tmp_path, EXPECTED, outcome=outcome, submitted=submitted)) == pytest.approx(right)


def test_a_run_that_broke_off_still_gets_its_part_of_the_credit(tmp_path: Path) -> None:
    half = evaluate(tmp_path, {"robin": "6\n"}, outcome="timed_out", submitted=False)
    assert score(half) == pytest.approx(0.15)


def test_what_is_not_a_plain_file_counts_nothing_and_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / "answer").write_text("6\n")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "robin").symlink_to(tmp_path / "answer")
    os.mkfifo(workspace / "heron")
    assert score(evaluate(tmp_path, {})) == 0.0


def test_a_file_that_is_not_text_or_is_huge_is_only_wrong(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "robin").write_bytes(b"\xff\xfe\x00")
    with (workspace / "heron").open("wb") as file:
        file.truncate(1 << 30)
    assert score(evaluate(tmp_path, {})) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("task", "run", "named"),
    [
        ("{", None, "not JSON"),
        ("[1]", None, "want an object"),
        ("{}", None, "expected"),
        ('{"expected": {}}', None, "expected"),
        ('{"expected": {"robin": 6}}', None, "robin"),
        ('{"expected": {"../robin": "6"}}', None, "plain file name"),
        (None, "nonsense", "not JSON"),
        (None, '{"submitted": true}', "outcome"),
        (None, '{"outcome": "evaluator_failed", "submitted": true}', "outcome"),
        (None, '{"outcome": "finished", "submitted": "yes"}', "submitted"),
    ],
)
def test_input_it_cannot_score_ends_it_with_status_2_and_one_line(
    tmp_path: Path, task: str | None, run: str | None, named: str
) -> None:
    done = evaluate(tmp_path, {}, task=task, run=run)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert named in line


def test_missing_files_and_arguments_end_it_with_status_2_and_one_line(tmp_path: Path) -> None:
    for arguments in ((), ("a", "b"), (str(tmp_path / "no.json"), str(tmp_path), str(tmp_path / "no.json"))):
        done = evaluator(*arguments)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    done = evaluate(tmp_path, {})
    gone = evaluator(str(tmp_path / "task.json"), str(tmp_path / "gone"), str(tmp_path / "run.json"))
    assert done.returncode == 0
    assert (gone.returncode, len(gone.stderr.splitlines())) == (2, 1)
    assert "gone" in gone.stderr
