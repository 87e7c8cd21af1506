"""`gyrectl`: start, watch and stop a job, and ask what happened.

Exit codes: 0 done; 1 the job failed, or nothing answered; 2 bad input; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if Path(sys.argv[0]).name in ("gyrectl", "gyrectl.py"):
    # Ctrl-C while the rest is still loading, or in a short command, ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from gyre.cli import client, live
from gyre.cli.actor_cli import actor_app
from gyre.cli.cluster_cli import cell_app, leader_app, node_app, snapshot_app
from gyre.cli.pki_cli import pki_app
from gyre.cli.run_cli import run_app
from gyre.cli.up import Options
from gyre.cli.up import up as run_up
from gyre.cli.work_cli import group_app, job_app, step_app
from gyre.config import JobFileError, load_job
from gyre.errors import BadInput, GyreError, Refused
from gyre.wire import to_plain

if TYPE_CHECKING:
    from gyre.cli.doctor import Finding

T = TypeVar("T")

app = typer.Typer(
    help="Steer Gyre: elastic online RL for agents in unmodified harnesses.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(run_app, name="run")
app.add_typer(actor_app, name="actor")
app.add_typer(job_app, name="job")
app.add_typer(cell_app, name="cell")
app.add_typer(node_app, name="node")
app.add_typer(leader_app, name="leader")
app.add_typer(snapshot_app, name="snapshot")
app.add_typer(group_app, name="group")
app.add_typer(step_app, name="step")
app.add_typer(pki_app, name="pki")
console = Console()
errors = Console(stderr=True, highlight=False, soft_wrap=True)

JobFile = Annotated[Path, typer.Argument(help="The job file (TOML).", show_default=False)]
Dir = Annotated[Path | None, typer.Option("--dir", help="The job's folder; default: the newest one under runs/.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _fail(error: Exception) -> int:
    errors.print(str(error), style="red", markup=False)
    return 2 if isinstance(error, BadInput | JobFileError) else 1


def _run(work: Callable[[], Awaitable[T]]) -> T:
    async def main() -> T:
        return await work()

    try:
        return asyncio.run(main())
    except GyreError as error:
        raise typer.Exit(_fail(error)) from error


@app.command()
def up(
    job: JobFile,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the unfinished job from its last snapshot.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, in place of the job file's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, in place of the job file's.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the report as JSON to this file.")] = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="The job's folder, in place of runs/NAME.")] = None,
    unconfined: Annotated[
        bool, typer.Option("--unconfined", help="Run sampled commands as you, with no sandbox.")
    ] = False,
) -> None:
    """Run a job on this machine: one gyred, the embedded store, the cells of the job file.

    Ctrl-C ends it cleanly; `gyrectl up JOB --resume` goes on from the last snapshot.

        gyrectl up gyre/demo/quickstart.toml --steps 3 --seed 7
    """
    overrides: dict[str, object] = {}
    if steps is not None:
        overrides["job.steps"] = steps
    if seed is not None:
        overrides["job.seed"] = seed
    if unconfined:
        overrides["harness.confine"] = "unconfined"
    options = Options(job=job, overrides=overrides, resume=resume, report=report, folder=folder)
    try:
        code = run_up(options, console)
    except GyreError as error:
        code = _fail(error)
    raise typer.Exit(code)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="A job file, or a node.toml.", show_default=False)]) -> None:
    """Validate a job file or a node.toml: each fault is one line naming the key, the value and what is allowed.

    gyrectl check job.toml
    """
    from gyre.actors.node_config import NodeConfig
    from gyre.cli.check import check_job, is_node_file

    try:
        if is_node_file(file):
            NodeConfig.load(file)
        elif faults := check_job(load_job(file), file.parent):
            raise JobFileError(file, faults)
    except GyreError as error:
        raise typer.Exit(_fail(error)) from error
    console.print(f"{file.name}: ok", markup=False)


@app.command()
def status(folder: Dir = None, as_json: AsJson = False) -> None:
    """Show a running job: phase, reward, water level, cells, switches."""
    found = _run(lambda: client.status(client.find_job(folder)))
    if as_json:
        sys.stdout.write(json.dumps(to_plain(found)) + "\n")
    else:
        console.print(live.render(found))


@app.command()
def top(folder: Dir = None, as_json: AsJson = False) -> None:
    """Watch a running job, as `up` shows it, until it ends or Ctrl-C; with --json, one status a line.

    gyrectl top --dir runs/quickstart
    """
    from gyre.cli.top import watch

    _run(lambda: watch(client.find_job(folder), console, as_json=as_json))


@app.command()
def doctor(folder: Dir = None, as_json: AsJson = False) -> None:
    """Look at what a job stands on: each line is ok, a warning or a fault, with the mend. Exit code 1 at a fault.

    gyrectl doctor
    """
    from gyre.cli.doctor import State, examine

    async def work() -> list[Finding]:
        # Where no job is named and none is found, there is still the machine to look at.
        return await examine(client.find_job(folder) if folder or list(Path("runs").glob("*/job.json")) else None)

    findings = _run(work)
    if as_json:
        sys.stdout.write(json.dumps([finding.to_json() for finding in findings]) + "\n")
    else:
        for finding in findings:
            console.print(finding.line(), markup=False, highlight=False, soft_wrap=True, style=finding.colour)
    if any(finding.state is State.FAULT for finding in findings):
        raise typer.Exit(1)


@app.command()
def stop(folder: Dir = None) -> None:
    """End a running job cleanly; it can be resumed. A cluster's job is ended by `gyrectl job stop`."""

    async def work() -> None:
        job = client.find_job(folder)
        if not client.is_lone(job):
            raise Refused("it is a cluster's job: `gyrectl job stop` ends it, and SIGTERM ends a node's gyred")
        await client.stop(job, "gyrectl stop")

    _run(work)
    console.print("stopping")


@app.command()
def report(folder: Dir = None, as_json: AsJson = False) -> None:
    """Print the report of a job that runs or has ended, from its records."""
    job, found = _run(lambda: client.report(client.find_job(folder)))
    if as_json:
        sys.stdout.write(json.dumps(found.to_json()) + "\n")
    else:
        console.print(live.summary(found, str(job.report_html)))


@app.command()
def trace(
    switch: Annotated[
        str, typer.Argument(help="A switch id (see report.html), a trace id, or nothing for the last.")
    ] = "",
    folder: Dir = None,
    as_json: AsJson = False,
) -> None:
    """Print the waterfall of a role switch from the node's own span ring."""
    from gyre.telemetry.waterfall import waterfall

    spans = _run(lambda: client.trace(client.find_job(folder), switch))
    if as_json:
        sys.stdout.write(json.dumps([to_plain(span) for span in spans]) + "\n")
    else:
        for line in waterfall(spans):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
