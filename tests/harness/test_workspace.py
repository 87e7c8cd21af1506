"""The folder of a run: made afresh for each attempt, and removed whatever the run did to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.harness.tasks import Task
from gyre.harness.workspace import RunFolder, WorkspaceError
from gyre.ids import RunId, TaskId

from .conftest import a_task


def folder(runs: Path) -> RunFolder:
    return RunFolder.of(runs, RunId("r1"), 1)


def test_a_prepared_workspace_holds_the_tasks_files(tmp_path: Path) -> None:
    made = folder(tmp_path)
    files = {"a.txt": b"a\n", "src/main.sh": b"#!/bin/sh\n"}
    made.prepare(Task(TaskId("t"), "go", files, ("true",), b"{}", executable=frozenset({"src/main.sh"})))
    found = {path.relative_to(made.workspace).as_posix(): path for path in made.workspace.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == files
    assert {name for name, path in found.items() if path.stat().st_mode & 0o100} == {"src/main.sh"}
    assert made.home.is_dir()


def test_nobody_else_may_look_into_a_runs_folder(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.prepare(a_task())
    assert made.root.stat().st_mode & 0o777 == 0o700


def test_what_an_earlier_try_left_is_gone_when_a_workspace_is_prepared_again(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.prepare(a_task())
    (made.workspace / "a.txt").write_text("changed")
    (made.workspace / "left").mkdir(mode=0o500)
    made.exit_file.write_text("{}")
    made.prepare(a_task())
    assert [path.name for path in made.workspace.iterdir()] == ["a.txt"]
    assert (made.workspace / "a.txt").read_bytes() == b"b\na\n"
    assert not made.exit_file.exists()


def test_attempts_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = (RunFolder.of(tmp_path, RunId("r1"), attempt) for attempt in (1, 2))
    first.prepare(a_task())
    second.prepare(a_task({"b.txt": b""}))
    assert (first.workspace / "a.txt").exists()


def test_discard_keeps_the_log_and_removes_what_the_run_wrote_even_where_it_locked_it(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.prepare(a_task())
    made.log.write_text("said\n")
    locked = made.workspace / "locked"
    (locked / "deep").mkdir(parents=True)
    (made.workspace / "link").symlink_to(tmp_path)
    (locked / "deep").chmod(0)
    locked.chmod(0)
    made.discard()
    made.discard()
    assert not made.workspace.exists()
    assert not made.home.exists()
    assert made.log.read_text() == "said\n"
    assert tmp_path.exists()


def test_a_workspace_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "r1").write_text("a file where the folder should be")
    with pytest.raises(WorkspaceError, match=r"workspace .*r1/1/workspace cannot be written: Not a directory"):
        folder(tmp_path).prepare(a_task())
