"""`gyrectl run …`: what the runs of a job did, from their journals on disk.

They are read whether the job runs or has ended, and are never changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gyre.cli.client import find_job
from gyre.cli.run_files import RunFiles
from gyre.config import JobFileError
from gyre.errors import BadInput, GyreError

run_app = typer.Typer(
    help="Look into the runs of a job: what they sampled, and what of it is trained.", no_args_is_help=True
)

Run = Annotated[str, typer.Argument(help="The run; `gyrectl run list` names them.", show_default=False)]
Attempt = Annotated[int | None, typer.Option(help="The run's attempt; default: its last.")]
Dir = Annotated[Path | None, typer.Option("--dir", help="The job's folder; default: the newest one under runs/.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


_PIPED_WIDTH = 240
"""Columns where the output is no terminal: more than any line of a tree needs."""


@run_app.command("list")
def list_runs(folder: Dir = None, as_json: AsJson = False) -> None:
    """List the runs that have a journal: open ones and closed ones."""
    from gyre.cli.run_view import list_view, listed

    with _one_line_errors():
        files = RunFiles(find_job(folder))
        rows = [listed(file) for file in files.some((), None)]
    _tell_unreadable(files)
    if as_json:
        _print_json(rows)
    else:
        _console().print(list_view(rows))


@run_app.command()
def tree(run: Run, attempt: Attempt = None, folder: Dir = None, as_json: AsJson = False) -> None:
    """Draw a run's tree: its calls, their roles and tokens, what of it is trained, and why the rest is not.

    gyrectl run tree train-3-7
    """
    from gyre.cli.run_view import tree_plain, tree_view

    with _one_line_errors():
        files = RunFiles(find_job(folder))
        file, j_max = files.one(run, attempt), files.j_max
    if as_json:
        _print_json(tree_plain(file, j_max))
    else:
        _console().print(tree_view(file, j_max))


@run_app.command()
def replay(
    run: Run,
    call: Annotated[
        str,
        typer.Argument(help="The call's number or id; without it every call, each with what was new in its prompt."),
    ] = "",
    attempt: Attempt = None,
    folder: Dir = None,
    as_json: AsJson = False,
) -> None:
    """Print a call's exact prompt and output, token by token with log-probs and weight versions.

    gyrectl run replay train-3-7 12
    """
    from gyre.cli.run_view import replay_plain, replay_view

    with _one_line_errors():
        files = RunFiles(find_job(folder))
        found = files.one(run, attempt).run
        calls = [found.find(call)] if call else list(found.calls.values())
        words = files.words()
    if as_json:
        for each in calls:
            _print_json(replay_plain(found, each, words))
        return
    for each in calls:
        _console().print(replay_view(found, each, words, whole_prompt=bool(call)))


@run_app.command()
def export(
    out: Annotated[Path, typer.Option("--out", help="The folder to write to; it is made.", show_default=False)],
    runs: Annotated[list[str] | None, typer.Argument(help="The runs; default: all.", show_default=False)] = None,
    attempt: Attempt = None,
    folder: Dir = None,
) -> None:
    """Write runs for analysis: calls and lineages, as JSONL and as Parquet (docs/export.md has the columns).

    gyrectl run export --out analysis
    """
    from gyre.cli.run_export import write_export

    with _one_line_errors():
        files = RunFiles(find_job(folder))
        written = write_export(files.some(runs or (), attempt), files.j_max, files.words(), out)
    _tell_unreadable(files)
    console = _console()
    console.print(f"{written.runs} runs: {written.calls} calls, {written.lineages} lineages", markup=False)
    for path in written.files:
        console.print(str(path), markup=False)
    if not written.parquet:
        console.print("pyarrow is not installed, so no Parquet was written: pip install 'gyre[export]'", markup=False)


def _tell_unreadable(files: RunFiles) -> None:
    for line in files.unreadable:
        _errors().print(line, style="yellow", markup=False)


@contextmanager
def _one_line_errors() -> Generator[None]:
    try:
        yield
    except GyreError as error:
        _errors().print(str(error), style="red", markup=False)
        raise typer.Exit(2 if isinstance(error, BadInput | JobFileError) else 1) from error


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def _errors() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
