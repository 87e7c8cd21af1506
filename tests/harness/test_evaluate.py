"""Evaluation: a score only from an evaluator that ended well in its time and said one; else a reason, never a 0."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from gyre.harness import keeper
from gyre.harness.confine import Sandbox
from gyre.harness.evaluate import Evaluation, RunInfo, Said, evaluate, verdict
from gyre.harness.tasks import Task
from gyre.ids import TaskId
from gyre.trajectory.records import Outcome

from .conftest import Bench, a_task, processes, python, until

FINISHED = RunInfo(Outcome.FINISHED, submitted=True)


async def word_of(
    bench: Bench, sandbox: Sandbox, *evaluator: str, limit_s: float = 30.0, data: bytes = b"{}"
) -> Evaluation:
    folder = bench.folder("r1")
    task = a_task(evaluator=evaluator, data=data)
    folder.prepare(task)
    return await evaluate(task, folder, FINISHED, limit_s, sandbox, hidden=(bench.job,))


async def test_the_score_is_what_the_evaluator_prints_last(bench: Bench, sandbox: Sandbox) -> None:
    said = await word_of(bench, sandbox, "sh", "-c", """echo working; echo '{"score": 0.25}'""")
    assert said == Evaluation(0.25, "")


async def test_the_evaluator_is_given_the_workspace_the_task_and_the_run(bench: Bench, sandbox: Sandbox) -> None:
    code = """
import json, sys
workspace, task, run = sys.argv[1:]
assert open(workspace + "/a.txt").read() == "b\\na\\n"
assert json.load(open(task)) == {"expected": {"b.txt": "x"}}
assert json.load(open(run)) == {"outcome": "finished", "submitted": True}
print(json.dumps({"score": 1}))
"""
    data = json.dumps({"expected": {"b.txt": "x"}}).encode()
    said = await word_of(bench, sandbox, *python(code), "{workspace}", "{task}", "{run}", data=data)
    assert said == Evaluation(1.0, "")


async def test_a_disk_that_takes_no_evaluation_says_nothing_of_the_run(bench: Bench, sandbox: Sandbox) -> None:
    folder = bench.folder("r1")
    task = a_task(evaluator=("true",))
    folder.prepare(task)
    with patch.object(Path, "write_bytes", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        said = await evaluate(task, folder, FINISHED, 30, sandbox)
    assert (said.score, said.failed_here) == (None, True)
    assert "No space left on device" in said.reason


async def test_a_timed_out_run_is_scored_on_what_it_left(bench: Bench, sandbox: Sandbox) -> None:
    folder = bench.folder("r1")
    task = a_task(evaluator=("sh", "-c", """grep -q timed_out {run} && grep -q null {run} && echo '{"score": 0.4}'"""))
    folder.prepare(task)
    info = RunInfo(Outcome.TIMED_OUT, submitted=None)
    assert await evaluate(task, folder, info, 30, sandbox) == Evaluation(0.4, "")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'no such file: b.txt' >&2; exit 2", "the evaluator ended with exit code 2: no such file: b.txt"),
        ("exit 1", "the evaluator ended with exit code 1: it said nothing"),
        ("true", "the evaluator's last line is '', and not {\"score\": s}"),
        ("echo 0.5", "the evaluator's last line is '0.5', and not {\"score\": s}"),
        ("""echo '{"score": 0.5'""", 'the evaluator\'s last line is \'{"score": 0.5\', and not {"score": s}'),
        ("""echo '{"score": 1.5}'""", "the evaluator's score is 1.5, and not a number from 0 to 1"),
        ("""echo '{"score": NaN}'""", "the evaluator's score is nan, and not a number from 0 to 1"),
        ("""echo '{"score": true}'""", "the evaluator's score is True, and not a number from 0 to 1"),
        ("""echo '{"score": null}'""", "the evaluator's score is None, and not a number from 0 to 1"),
    ],
)
async def test_anything_else_is_a_failure_with_its_reason(
    bench: Bench, sandbox: Sandbox, script: str, reason: str
) -> None:
    assert await word_of(bench, sandbox, "sh", "-c", script) == Evaluation(None, reason)


def test_an_evaluator_that_was_killed_failed() -> None:
    said = Said('{"score": 1.0}', "")
    assert verdict(keeper.End(signal=11), said, 5).reason.startswith("the evaluator was killed by signal 11")
    assert verdict(keeper.End(signal=11), said, 5).score is None


async def test_an_evaluator_that_is_not_there_failed(bench: Bench, sandbox: Sandbox) -> None:
    said = await word_of(bench, sandbox, "/no/such/evaluator")
    assert said.score is None
    assert "/no/such/evaluator" in said.reason


async def test_an_evaluator_that_hangs_is_ended_whole_at_its_limit(bench: Bench, sandbox: Sandbox) -> None:
    marker = f"65{os.getpid()}"
    said = await word_of(
        bench, sandbox, "sh", "-c", f"""echo '{{"score": 1}}'; setsid -f sleep {marker}; sleep {marker}""", limit_s=0.5
    )
    assert said == Evaluation(None, "the evaluator did not end within 0.5 s")
    assert not processes(f"sleep {marker}")


async def test_the_tasks_own_limit_takes_the_place_of_the_jobs(bench: Bench, sandbox: Sandbox) -> None:
    folder = bench.folder("r1")
    task = Task(TaskId("t"), "go", {}, ("sleep", "600"), b"{}", evaluator_limit_s=0.3)
    folder.prepare(task)
    said = await evaluate(task, folder, FINISHED, 600, sandbox)
    assert said.reason == "the evaluator did not end within 0.3 s"


async def test_endless_output_neither_fills_memory_nor_hides_the_limit(bench: Bench, sandbox: Sandbox) -> None:
    said = await word_of(bench, sandbox, "yes", limit_s=0.5)
    assert said.reason == "the evaluator did not end within 0.5 s"


async def test_an_evaluator_whose_wait_is_cancelled_is_ended(bench: Bench, sandbox: Sandbox) -> None:
    marker = f"66{os.getpid()}"
    waiting = asyncio.ensure_future(word_of(bench, sandbox, "sh", "-c", f"sleep {marker} & sleep {marker}"))
    await asyncio.to_thread(until, lambda: len(processes(f"sleep {marker}")) >= 2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.to_thread(until, lambda: not processes(f"sleep {marker}"))


async def test_what_a_run_wrote_cannot_reach_the_job_through_its_evaluator(bench: Bench, confined: Sandbox) -> None:
    folder = bench.folder("r1")
    task = a_task(evaluator=("sh", "./check.sh"))
    folder.prepare(task)
    (bench.job / "secret").write_text("answers")
    (folder.workspace / "check.sh").write_text(
        f"cat {bench.job}/secret; echo x > {bench.job}/harm; echo '{{\"score\": 1}}'"
    )
    assert (await evaluate(task, folder, FINISHED, 30, confined, hidden=(bench.job,))).score == 1.0
    assert not (bench.job / "harm").exists()


async def test_an_evaluator_sees_its_tasks_folder_where_that_is_hidden_from_runs(
    bench: Bench, confined: Sandbox, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks"
    for name in ("one", "two"):
        (tasks / name).mkdir(parents=True)
        (tasks / name / "check.sh").write_text("""ls {0}; echo '{"score": 1}'""")
    folder = bench.folder("r1")
    script = f"""test -e {tasks}/one/check.sh && ! test -e {tasks}/two && echo '{{"score": 1}}'"""
    task = Task(TaskId("t"), "go", {}, ("sh", "-c", script), b"{}", evaluator_folder=tasks / "one")
    folder.prepare(task)
    assert (await evaluate(task, folder, FINISHED, 30, confined, hidden=(bench.job, tasks))).score == 1.0
    assert bench.shell(folder, confined, f"ls {tasks}").strip() != "one"
