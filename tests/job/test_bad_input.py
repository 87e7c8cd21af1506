"""What harnesses, evaluators, workspaces and disks may do to a job: each hurts its own run, with the reason, and no other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from gyre.store.records import RunRecord
from gyre.trajectory.records import Outcome

from .a_job import SCORE, WAIT, Job

SCRIPT = [
    {"ask": "{task}"},
    {"run": "od -An -N2 -tu2 /dev/urandom | tr -d ' ' > score"},
    *[{"run": WAIT}] * 8,
    *[{"ask": "go on"}] * 12,
    {"run": "[ ! -e never ] || sleep 1000"},
    {"run": "[ ! -e never ] || sleep 1000"},
    {"submit": True},
]
RUN_S = 60.0


async def test_each_bad_thing_is_the_end_of_its_own_run_only(make_job: Callable[..., Job]) -> None:
    job = make_job(
        job={"steps": 1},
        tasks={"heldout": 0},
        batch={"groups": 6, "group_size": 2},
        harness={"max_live": 12, "attempts": 2},
        limits={"run_s": RUN_S, "evaluator_s": 20.0},
    )
    job.script = SCRIPT
    for name in ("plain", "full", "unwritable"):
        job.add_task(f"train/{name}", {"gate": "closed"})
    job.add_task("train/endless", {"gate": "closed", "never": ""})
    job.add_task("train/crash", {"gate": "closed"}, score="raise SystemExit('the scorer is broken')")
    job.add_task("train/hang", {"gate": "closed"}, score=SCORE + "import time; time.sleep(1000)", limit_s=1)
    job.add_task("heldout/none")
    job.write()

    index = {name: place for place in range(6) if (name := job.task(place).removeprefix("train/"))}
    blocked = f"t{index['unwritable']:06d}-00"
    job.dir.runs.mkdir(parents=True)
    (job.dir.runs / blocked).write_text("in the way of its folder")
    job.start(journal_bytes=256 * 1024)
    status = await job.until_status("all runs at their gates", lambda now: now.live == 11 and now.settled == 1)

    journal = job.seen_by(status.pids["gateway"], job.dir.journal)
    with (journal / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(b"0" * 4096)
    job.open_gate(f"t{index['full']:06d}-*")
    await job.until_status("the runs that cannot be journaled to be over", lambda now: now.settled == 3)
    (journal / "filler").unlink()
    job.open_gate()
    assert await job.ended() == 0, job.tail()

    books = await job.books()
    runs: dict[str, list[RunRecord]] = {name: [] for name in index}
    for run in books.runs:
        name = next(name for name, place in index.items() if run.group == f"t{place:06d}")
        runs[name].append(run)
    for run in runs["plain"]:
        assert (run.outcome, run.attempt, run.reason) == (Outcome.FINISHED, 1, "")
    for run in runs["endless"]:
        assert (run.outcome, run.attempt) == (Outcome.TIMED_OUT, 1)
        assert run.reward is not None
        assert "limit of 60 s" in run.reason
    for run in runs["crash"]:
        assert (run.outcome, run.reward, run.attempt) == (Outcome.EVALUATOR_FAILED, None, 1)
        assert "the scorer is broken" in run.reason
    for run in runs["hang"]:
        assert (run.outcome, run.reward, run.attempt) == (Outcome.EVALUATOR_FAILED, None, 1)
        assert "did not end within 1 s" in run.reason
    for run in runs["full"]:
        assert (run.outcome, run.reward, run.attempt) == (Outcome.INFRA_FAILED, None, 1)
        assert "No space left on device" in run.reason
    for run in runs["unwritable"]:
        if run.run == blocked:
            assert (run.outcome, run.reward, run.attempt) == (Outcome.INFRA_FAILED, None, 2)
            assert "cannot be written" in run.reason
        else:
            assert (run.outcome, run.attempt, run.reason) == (Outcome.FINISHED, 1, "")
    for run in books.runs:
        if run.outcome is not Outcome.INFRA_FAILED:
            assert run.trace is not None
            assert (run.trace.calls, run.trace.interrupted_calls) == (13, 0)
        else:
            assert run.reason in job.log
    (step,) = books.steps
    assert step.scored_runs == 5, "plain, endless, and the one that could be written"
