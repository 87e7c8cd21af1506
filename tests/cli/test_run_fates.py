"""What became of a run as a whole, by the job's records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre.cli.report import Books
from gyre.cli.run_fates import UNKNOWN, Fate, Fates
from gyre.config import JobSpec
from gyre.ids import GroupId, NodeId, RunId, TaskId
from gyre.store.records import GroupRecord, GroupState, Purpose, RunRecord, RunState, StepRecord
from gyre.trajectory.records import LineageInfo, LineageRole, Outcome, RunTrace

SPEC = JobSpec.model_validate(
    {
        "job": {"name": "j", "steps": 3},
        "model": {"path": "builtin:tiny"},
        "tasks": {"source": "builtin:chores"},
        "batch": {"staleness": 1},
    }
)
STEP = 4


def run(
    name: str, reward: float | None, outcome: Outcome = Outcome.FINISHED, lowest: int = 3, **changes: object
) -> RunRecord:
    lineages = (LineageInfo(0, LineageRole.MAIN, 40, 10, lowest), LineageInfo(1, LineageRole.SUB_AGENT, 30, 5, 3))
    trace = RunTrace(RunId(name), 2, 3, 15, 15, 60, lineages, 0, 0, 0, 0.0, "")
    made = RunRecord(
        RunId(name), GroupId("g"), RunState.SETTLED, 2, NodeId("n"), outcome, reward, "why", trace, 0.0, 0.0
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def fates(*runs: RunRecord, purpose: Purpose = Purpose.TRAIN, state: GroupState = GroupState.CONSUMED) -> Fates:
    names = tuple(each.run for each in runs)
    group = GroupRecord(GroupId("g"), TaskId("t"), purpose, 0, names, state, 3, STEP)
    step = StepRecord(STEP, STEP, (GroupId("g"),), len(runs), 0.5, 15, 1, (), {}, 0.0)
    return Fates(Books(None, None, (step,), (group,), runs, (), ()), SPEC)


def test_a_run_that_was_trained_has_its_step_and_the_lineages_that_it_trained() -> None:
    known = fates(run("a", 1.0, lowest=1), run("b", 0.0))
    assert known.of(RunId("b"), 2) == Fate("train", "finished", 0.0, STEP, frozenset({0, 1}), "")
    old = known.of(RunId("a"), 2)
    assert (old.step, old.lineages) == (STEP, {1}), "lineage 0 is two versions too old"
    assert (old.trained_in(1), old.trained_in(0), old.trained_in(None)) == (STEP, None, None)


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (fates(run("a", 1.0), run("b", 0.0), purpose=Purpose.HELDOUT_AFTER), "it is held out"),
        (fates(run("a", None, Outcome.EVALUATOR_FAILED), run("b", 0.0)), "it has no reward: why"),
        (fates(run("a", 1.0), run("b", 1.0)), "its reward is its group's mean, so there is nothing to learn from it"),
        (fates(run("a", 1.0), run("b", 0.0), state=GroupState.SETTLED), "no step has trained its group yet"),
        (fates(run("a", None, state=RunState.LIVE, outcome=None), run("b", 0.0)), "it has not settled yet"),
        (fates(run("a", 1.0, attempt=3), run("b", 0.0)), "attempt 3 counts"),
    ],
)
def test_a_run_of_which_nothing_is_trained_says_why(known: Fates, why: str) -> None:
    fate = known.of(RunId("a"), 2)
    assert (fate.step, fate.lineages, fate.not_trained) == (None, frozenset(), why)


def test_nothing_is_said_of_what_the_records_do_not_tell() -> None:
    assert fates(run("a", 1.0), run("b", 0.0)).of(RunId("c"), 1) == UNKNOWN
    assert Fates(None, None).of(RunId("a"), 2) == UNKNOWN
