"""Tasks and their sources: what a job file may name, and what is refused, each in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre.config import TasksSection
from gyre.errors import BadInput
from gyre.harness.tasks import Task, open_source
from gyre.ids import TaskId

TASK = """
instruction = "Sort the lines of a.txt into b.txt."

[evaluator]
argv = ["python3", "{folder}/check.py", "{workspace}", "{task}", "{run}"]
limit_s = 5
"""


def write_task(root: Path, name: str, text: str = TASK) -> Path:
    folder = root / name
    (folder / "files" / "sub").mkdir(parents=True)
    (folder / "task.toml").write_text(text)
    (folder / "files" / "a.txt").write_text("b\na\n")
    (folder / "files" / "sub" / "go.sh").write_text("#!/bin/sh\n")
    (folder / "files" / "sub" / "go.sh").chmod(0o755)
    return folder


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for name in ("train/one", "train/two", "train/three", "heldout/four", "heldout/five"):
        write_task(tmp_path, name)
    return tmp_path


def test_a_folder_task_has_its_instruction_files_evaluator_and_limit(tasks: Path) -> None:
    source = open_source(TasksSection(source=str(tasks), heldout=2), seed=0, base_dir=Path("/"))
    five, four = source.heldout()
    assert (five.id, four.id) == ("heldout/five", "heldout/four")
    assert four.instruction == "Sort the lines of a.txt into b.txt."
    assert four.files == {"a.txt": b"b\na\n", "sub/go.sh": b"#!/bin/sh\n"}
    assert four.executable == {"sub/go.sh"}
    check = str(tasks / "heldout/four/check.py")
    assert four.evaluator == ("python3", check, "{workspace}", "{task}", "{run}")
    assert four.evaluator_limit_s == 5
    assert json.loads(four.data) == {"id": "heldout/four", "instruction": four.instruction}
    assert source.private_folders == (tasks,)


def test_training_goes_round_all_tasks_in_an_order_that_only_the_seed_and_the_round_decide(tasks: Path) -> None:
    spec = TasksSection(source=".", heldout=0)
    first, again = (open_source(spec, seed=7, base_dir=tasks) for _ in range(2))
    rounds = [[first.train(3 * epoch + place).id for place in range(3)] for epoch in range(8)]
    assert all(sorted(each) == ["train/one", "train/three", "train/two"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert [again.train(index).id for index in range(24)] == [name for each in rounds for name in each]


def test_tasks_train_limits_how_many_training_tasks_are_gone_round(tasks: Path) -> None:
    source = open_source(TasksSection(source=".", heldout=0, train=2), seed=7, base_dir=tasks)
    assert len({source.train(index).id for index in range(20)}) == 2
    chores = open_source(TasksSection(source="builtin:chores", heldout=0, train=3), seed=1, base_dir=tasks)
    assert [chores.train(index).id for index in range(6)] == [chores.train(index % 3).id for index in range(6)]


def test_heldout_takes_the_first_tasks_by_name_and_all_where_there_are_fewer(tasks: Path) -> None:
    def names(count: int) -> list[str]:
        spec = TasksSection(source=".", heldout=count)
        return [task.id for task in open_source(spec, seed=0, base_dir=tasks).heldout()]

    assert names(1) == ["heldout/five"]
    assert names(9) == ["heldout/five", "heldout/four"]


def test_the_builtin_source_is_there(tmp_path: Path) -> None:
    source = open_source(TasksSection(source="builtin:chores", heldout=4), seed=3, base_dir=tmp_path)
    assert len(source.heldout()) == 4
    assert source.train(0).instruction


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("instruction = 3\nevaluator.argv = ['true']", "train/one/task.toml: instruction: 3 is not allowed"),
        ("evaluator.argv = ['true']", "train/one/task.toml: instruction: None is not allowed; this key is required"),
        ("instruction = ' '\nevaluator.argv = ['true']", "train/one/task.toml: instruction: ' ' is not allowed"),
        ("instruction = 'x'", "train/one/task.toml: evaluator: None is not allowed; this key is required"),
        ("instruction = 'x'\nevaluator.argv = []", "train/one/task.toml: evaluator.argv: [] is not allowed"),
        ("instruction = 'x'\nevaluator.argv = ['']", "train/one/task.toml: evaluator.argv.0: '' is not allowed"),
        (
            "instruction = 'x'\nevaluator.argv = ['true']\nevaluator.limit_s = 0",
            "train/one/task.toml: evaluator.limit_s: 0 is not allowed",
        ),
        (
            "instruction = 'x'\ninstructions = 'y'\nevaluator.argv = ['true']",
            "train/one/task.toml: instructions: 'y' is not allowed; no such key; "
            "known: instruction, evaluator.argv, evaluator.limit_s",
        ),
        ("instruction = ", "it must be TOML"),
    ],
)
def test_a_malformed_task_is_refused_in_one_line_that_names_file_and_key(tmp_path: Path, text: str, fault: str) -> None:
    write_task(tmp_path, "train/one", text)
    with pytest.raises(BadInput) as refused:
        open_source(TasksSection(source=str(tmp_path), heldout=0), seed=0, base_dir=tmp_path)
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"it must hold train/<task>/task.toml"):
        open_source(TasksSection(source=str(tmp_path), heldout=0), seed=0, base_dir=tmp_path)
    write_task(tmp_path, "train/one")
    with pytest.raises(BadInput, match=r"tasks.heldout: 5 is not allowed; 0, as .* holds no heldout/<task>/task.toml"):
        open_source(TasksSection(source=str(tmp_path), heldout=5), seed=0, base_dir=tmp_path)


def test_a_folder_that_is_no_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train" / "empty").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"train/empty/task.toml: .* a file that can be read"):
        open_source(TasksSection(source=str(tmp_path), heldout=0), seed=0, base_dir=tmp_path)


def test_a_link_among_the_files_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "train/one")
    (folder / "files" / "secrets").symlink_to("/etc")
    with pytest.raises(BadInput, match="train/one/files: 'secrets' is not allowed; only plain files and folders"):
        open_source(TasksSection(source=str(tmp_path), heldout=0), seed=0, base_dir=tmp_path)


@pytest.mark.parametrize("source", ["builtin:mazes", "no/such/folder"])
def test_an_unknown_source_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(BadInput, match=r"tasks.source: .* is not allowed; builtin:chores, or a folder of tasks"):
        open_source(TasksSection(source=source), seed=0, base_dir=tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "", "nul\0byte"])
def test_a_task_cannot_write_outside_its_workspace(name: str) -> None:
    with pytest.raises(BadInput, match="a path inside the workspace"):
        Task(TaskId("t"), "do it", {name: b""}, ("true",), b"{}")


def test_an_instruction_is_text_of_a_bounded_size() -> None:
    Task(TaskId("t"), "x" * 100_000, {}, ("true",), b"{}")
    for instruction in ("", " \n", "x" * 100_001, "nul\0byte"):
        with pytest.raises(BadInput, match="task t: instruction"):
            Task(TaskId("t"), instruction, {}, ("true",), b"{}")


def test_a_task_needs_an_evaluator() -> None:
    for evaluator in ((), ("",)):
        with pytest.raises(BadInput, match="task t: evaluator"):
            Task(TaskId("t"), "do it", {}, evaluator, b"{}")
