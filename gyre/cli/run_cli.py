"""`gyrectl run …`: what the runs of a job did, from their journals on disk; and the end of one that is not wanted.

Journals are read whether the job runs or has ended, and are never changed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gyre.actors.messages_gyrectl import CancelRun, RestartRun
from gyre.cli.client import Job, books, find_folder, find_job, order, reading
from gyre.cli.run_files import RunFiles
from gyre.cli.run_output import show, strict_json, visible
from gyre.cli.saying import Cluster, Yes, done, say, show_row
from gyre.errors import BadInput, GyreError, Unavailable
from gyre.ids import RunId
from gyre.jobdir import JobDir
from gyre.store.records import GroupRecord, RunRecord, RunState

run_app = typer.Typer(
    help="Look into the runs of a job: what they sampled, and what of it is trained.", no_args_is_help=True
)

Run = Annotated[str, typer.Argument(help="The run; `gyrectl run list` names them.", show_default=False)]
Attempt = Annotated[int | None, typer.Option(help="The run's attempt; default: its last.")]
Dir = Annotated[Path | None, typer.Option("--dir", help="The job's folder; default: the newest one under runs/.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


CANCELLED_S, LOOK_S = 60.0, 0.1


@run_app.command("list")
def list_runs(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """List every run: its state, node, task and reward; and what its journal holds, where this node has that.

    gyrectl run list
    """
    from gyre.cli.run_view import list_view, run_rows

    with _one_line_errors():
        job = find_job(folder, cluster)
        files = RunFiles(job) if isinstance(job, JobDir) else None
        found = files.books("what became of the runs") if files else asyncio.run(books(job))
        tasks = {group.group: group.task for group in found.groups} if found else {}
        rows = run_rows(files.some((), None) if files else (), found.runs if found else (), tasks)
    _tell(files.unreadable if files else ())
    if as_json:
        _print_json(rows)
    else:
        show(list_view(rows), wrapped=True)


@run_app.command()
def tree(
    run: Run, attempt: Attempt = None, folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False
) -> None:
    """Draw a run's tree: its calls, their roles and tokens, what of it is trained, and why the rest is not.

    gyrectl run tree train-3-7
    """
    from gyre.cli.run_view import tree_plain, tree_view

    with _one_line_errors():
        files = RunFiles(find_folder(folder, cluster))
        file, j_max = files.one(run, attempt), files.j_max
        fate = files.fates().of(file.run.opened.run, file.run.opened.attempt)
    _tell(files.unreadable + files.damaged)
    if as_json:
        _print_json(tree_plain(file, j_max, fate))
    else:
        show(tree_view(file, j_max, fate), wrapped=True)


@run_app.command()
def replay(
    run: Run,
    call: Annotated[
        str,
        typer.Argument(help="The call's number or id; without it every call, each with what was new in its prompt."),
    ] = "",
    attempt: Attempt = None,
    folder: Dir = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Print a call's exact prompt and output, token by token with log-probs and weight versions.

    gyrectl run replay train-3-7 12
    """
    from gyre.cli.run_view import replay_plain, replay_view

    with _one_line_errors():
        files = RunFiles(find_folder(folder, cluster))
        found = files.one(run, attempt).run
        calls = [found.find(call)] if call else list(found.calls.values())
        words = files.words()
    _tell(files.damaged)
    if as_json:
        for each in calls:
            _print_json(replay_plain(found, each, words))
        return
    for each in calls:
        show(replay_view(found, each, words, whole_prompt=bool(call)), wrapped=False)


@run_app.command()
def export(
    out: Annotated[Path, typer.Option("--out", help="The folder to write to; it is made.", show_default=False)],
    runs: Annotated[list[str] | None, typer.Argument(help="The runs; default: all.", show_default=False)] = None,
    attempt: Attempt = None,
    folder: Dir = None,
    cluster: Cluster = None,
) -> None:
    """Write runs for analysis: calls and lineages, as JSONL and as Parquet (docs/export.md has the columns).

    gyrectl run export --out analysis
    """
    from gyre.cli.run_export import write_export

    with _one_line_errors():
        files = RunFiles(find_folder(folder, cluster))
        written = write_export(files.some(runs or (), attempt), files.j_max, files.fates(), files.words(), out)
    _tell(files.unreadable + files.damaged)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{written.runs} runs: {written.calls} calls, {written.lineages} lineages", markup=False)
    for path in written.files:
        console.print(visible(str(path)), markup=False)
    if not written.parquet:
        console.print("pyarrow is not installed, so no Parquet was written: pip install 'gyre[export]'", markup=False)


@run_app.command("show")
def show_run(run: Run, folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Show a run's record: its task, where it lives, how it ended, its reward, and the figures of its calls.

    gyrectl run show t000003-07
    """

    async def work() -> dict[str, Any]:
        async with reading(find_job(folder, cluster)) as (store, keys):
            found = await store.get(keys.run(RunId(run)), RunRecord)
            group = None if found is None else await store.get(f"{keys.root}groups/{found.record.group}", GroupRecord)
        if found is None or group is None:
            raise _no_such(run)
        record, trace = found.record, found.record.trace
        return {
            "run": record.run,
            "group": record.group,
            "task": group.record.task,
            "purpose": group.record.purpose.value,
            "state": record.state.value,
            "attempt": record.attempt,
            "node": record.node,
            "outcome": None if record.outcome is None else record.outcome.value,
            "reward": record.reward,
            "reason": record.reason,
            "step": group.record.step or None,
            "started_unix_s": record.started_unix_s,
            "ended_unix_s": record.ended_unix_s,
            "calls": None if trace is None else trace.calls,
            "sampled_tokens": None if trace is None else trace.sampled_tokens,
            "counted_tokens": None if trace is None else trace.counted_tokens,
            "lineages": None if trace is None else len(trace.lineages),
            "interrupted_calls": None if trace is None else trace.interrupted_calls,
            "max_silence_s": None if trace is None else trace.max_silence_s,
        }

    show_row(done(work), as_json=as_json)


@run_app.command()
def restart(run: Run, yes: Yes = False, folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """End what a live run does, and have it begin again as its next attempt, on a node that takes runs.

    gyrectl run restart t000003-07
    """
    job = done(lambda: _job_of(folder, cluster, run))
    if not yes:
        typer.confirm(f"What this attempt of {run} did is lost for training. Begin it again?", abort=True, err=True)
    done(lambda: order(job, RestartRun(RunId(run))))
    say(visible(f"{run}: begins again"), as_json=as_json, run=run)


@run_app.command()
def cancel(run: Run, yes: Yes = False, folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """End a run that is queued or live. It settles as infra_failed, "cancelled": in no baseline and no loss.

    gyrectl run cancel t000003-07
    """
    job = done(lambda: _job_of(folder, cluster, run))
    if not yes:
        typer.confirm(f"What {run} did so far is lost for training. Cancel it?", abort=True, err=True)
    settled = done(lambda: _cancel(job, RunId(run)))
    outcome = settled.outcome.value if settled.outcome else ""
    say(
        visible(f"{run}: {outcome}, {settled.reason}"), as_json=as_json, run=run, outcome=outcome, reason=settled.reason
    )


async def _job_of(folder: Path | None, cluster: Path | None, run: str) -> Job:
    """The job, which has such a run. Raises BadInput."""
    job = find_job(folder, cluster)
    async with reading(job) as (store, keys):
        if await store.get(keys.run(RunId(run)), RunRecord) is None:
            raise _no_such(run)
    return job


def _no_such(run: str) -> BadInput:
    return BadInput("run", run, "a run of the job; gyrectl run list names those that have begun")


async def _cancel(job: Job, run: RunId) -> RunRecord:
    """Order it, and wait until the run has settled."""
    await order(job, CancelRun(run))
    until_s = time.monotonic() + CANCELLED_S
    while True:
        async with reading(job) as (store, keys):
            found = await store.get(keys.run(run), RunRecord)
        if found is not None and found.record.state is RunState.SETTLED:
            return found.record
        if time.monotonic() > until_s:
            raise Unavailable(f"{run} was told to end, and has not settled within {CANCELLED_S:g} s")
        await asyncio.sleep(LOOK_S)


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        _errors().print(visible(line), style="yellow", markup=False)


@contextmanager
def _one_line_errors() -> Generator[None]:
    try:
        yield
    except GyreError as error:
        _errors().print(visible(str(error)), style="red", markup=False)
        raise typer.Exit(2 if isinstance(error, BadInput) else 1) from error
    except OSError as error:
        _errors().print(visible(f"{error.filename} cannot be read: {error.strerror}"), style="red", markup=False)
        raise typer.Exit(1) from error


def _errors() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(strict_json(value) + "\n")
