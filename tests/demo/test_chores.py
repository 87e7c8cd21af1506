"""The task family: what a task holds, and what its split promises."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.demo.chores import (
    HELDOUT_NAMES,
    HELDOUT_PAIRS,
    OPERATIONS,
    TRAIN_NAMES,
    TRAIN_PAIRS,
    ChoresSource,
    ChoresTask,
    heldout_task,
    make_task,
    train_task,
)
from gyre.demo.demonstrations import COMMANDS, HABITS, RIGHT_COMMANDS, SUBMIT, demonstrate

SEEDS = st.integers(min_value=0, max_value=2**32)
INDICES = st.integers(min_value=0, max_value=10_000)


def names_of(task: ChoresTask) -> set[str]:
    return {*task.files, *(chore.target for chore in task.chores)}


def pair_of(task: ChoresTask) -> tuple[str, ...]:
    return tuple(chore.operation for chore in task.chores)


@settings(max_examples=50, deadline=None)
@given(SEEDS, INDICES)
def test_a_task_is_a_function_of_its_seed_and_index(seed: int, index: int) -> None:
    assert train_task(seed, index) == train_task(seed, index)
    assert heldout_task(seed, index) == heldout_task(seed, index)
    assert train_task(seed, index) != train_task(seed + 1, index)
    assert heldout_task(seed, index) != heldout_task(seed + 1, index)


def test_a_task_is_the_same_in_another_process() -> None:
    code = "from gyre.demo.chores import *; print(repr((train_task(7, 3), heldout_task(7, 3))))"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == repr((train_task(7, 3), heldout_task(7, 3)))


@settings(max_examples=100, deadline=None)
@given(SEEDS, INDICES)
def test_held_out_names_and_combinations_never_occur_in_training(seed: int, index: int) -> None:
    trained, held = train_task(seed, index), heldout_task(seed, index)
    assert names_of(trained) <= set(TRAIN_NAMES)
    assert names_of(held) <= set(HELDOUT_NAMES)
    assert not names_of(trained) & names_of(held)
    assert pair_of(trained) in TRAIN_PAIRS
    assert pair_of(held) in HELDOUT_PAIRS


def test_the_split_is_disjoint_and_every_operation_is_trained_in_both_places() -> None:
    assert not set(TRAIN_NAMES) & set(HELDOUT_NAMES)
    assert not set(TRAIN_PAIRS) & set(HELDOUT_PAIRS)
    for place in (0, 1):
        assert {pair[place] for pair in TRAIN_PAIRS} == {pair[place] for pair in HELDOUT_PAIRS} == set(OPERATIONS)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(min_value=0, max_value=500))
def test_eight_training_tasks_in_a_row_ask_for_every_training_pair_and_list_half(seed: int, block: int) -> None:
    tasks = [train_task(seed, 8 * block + place) for place in range(8)]
    assert sorted(map(pair_of, tasks)) == sorted(TRAIN_PAIRS)
    assert sum(task.list_file is not None for task in tasks) == 4


def test_thirty_two_held_out_tasks_are_distinct_and_ask_for_every_pair_both_ways() -> None:
    tasks = [heldout_task(1, index) for index in range(32)]
    assert len({repr(task) for task in tasks}) == 32
    assert len({(pair_of(task), task.list_file is None) for task in tasks}) == 2 * len(HELDOUT_PAIRS)


@settings(max_examples=100, deadline=None)
@given(SEEDS, INDICES)
def test_the_chores_can_be_read_in_the_prompt_or_in_the_file_that_it_names(seed: int, index: int) -> None:
    task = train_task(seed, index)
    instructions = [chore.instruction for chore in task.chores]
    if task.list_file is None:
        assert task.prompt.split("\n") == instructions
    else:
        assert task.list_file in task.prompt.split()
        assert task.files[task.list_file].splitlines() == instructions
    assert {chore.source for chore in task.chores} <= set(task.files)
    assert not {chore.target for chore in task.chores} & set(task.files)


def run_shell(command: str, workspace: Path) -> int:
    return subprocess.run(["/bin/sh", "-c", command], cwd=workspace, timeout=10, check=False).returncode


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_the_right_command_leaves_what_is_expected_and_every_other_command_something_else(
    operation: str, tmp_path: Path
) -> None:
    other = next(name for name in OPERATIONS if name != operation)
    for draw in range(5):
        task = make_task(random.Random(draw), (operation, other), TRAIN_NAMES, listed=False)
        chore = task.chores[0]
        (tmp_path / chore.source).write_text(task.files[chore.source])
        for command in COMMANDS:
            assert run_shell(command.format(source=chore.source, target=chore.target), tmp_path) == 0
            left = (tmp_path / chore.target).read_text()
            assert (left == task.expected[chore.target]) == (command == RIGHT_COMMANDS[operation])


def operation_of(line: str) -> str | None:
    for name, operation in OPERATIONS.items():
        if re.fullmatch(operation.instruction.format(source=r"\w+", target=r"\w+"), line):
            return name
    return None


def test_demonstrations_end_with_a_submission_and_know_no_held_out_combination() -> None:
    assert not set(HABITS.values()) & set(RIGHT_COMMANDS.values())
    rng = random.Random(3)
    met: set[tuple[str, ...]] = set()
    for _ in range(300):
        demonstration = demonstrate(rng)
        assert [turn.observation is None for turn in demonstration.turns].index(True) == len(demonstration.turns) - 1
        assert demonstration.turns[-1].command == SUBMIT
        for text in (demonstration.prompt, *(turn.observation or "" for turn in demonstration.turns)):
            met.add(tuple(name for line in text.split("\n") if (name := operation_of(line))))
    assert {asked for asked in met if len(asked) == 2} == set(TRAIN_PAIRS)


def test_the_source_gives_tasks_that_the_evaluator_scores(tmp_path: Path) -> None:
    source = ChoresSource(seed=5, heldout=6)
    assert [task.id for task in source.heldout()] == [f"chores-5-heldout-{index}" for index in range(6)]
    task, chores = source.train(2), train_task(5, 2)
    assert task == ChoresSource(seed=5, heldout=0).train(2)
    assert task.instruction == chores.prompt
    workspace, task_path, run_path = tmp_path / "workspace", tmp_path / "task.json", tmp_path / "run.json"
    workspace.mkdir()
    for name, content in task.files.items():
        (workspace / name).write_bytes(content)
    task_path.write_bytes(task.data)
    run_path.write_text('{"outcome": "finished", "submitted": true}')
    places = {"{workspace}": str(workspace), "{task}": str(task_path), "{run}": str(run_path)}
    argv = [places.get(part, part) for part in task.evaluator]
    for chore, right in zip(chores.chores, (0.5, 1.0), strict=True):
        run_shell(RIGHT_COMMANDS[chore.operation].format(source=chore.source, target=chore.target), workspace)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(done.stdout) == {"score": right}
