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
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from gyre import __version__
from gyre.cli import client, live
from gyre.cli.actor_cli import actor_app
from gyre.cli.cluster_cli import cell_app, leader_app, node_app, snapshot_app
from gyre.cli.config_cli import config_app
from gyre.cli.pki_cli import pki_app
from gyre.cli.run_cli import run_app
from gyre.cli.saying import Cluster, NodeFile, say
from gyre.cli.up import Options
from gyre.cli.up import up as run_up
from gyre.cli.work_cli import group_app, job_app, step_app
from gyre.errors import BadInput, GyreError, Refused
from gyre.jobdir import JobDir
from gyre.wire import to_plain

if TYPE_CHECKING:
    from gyre.cli.findings import Finding
    from gyre.cli.report import Report

T = TypeVar("T")

app = typer.Typer(
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
app.add_typer(config_app, name="config")
app.add_typer(pki_app, name="pki")
console = Console()
errors = Console(stderr=True, highlight=False, soft_wrap=True)

JobFile = Annotated[Path, typer.Argument(help="The job file (TOML).", show_default=False)]
Dir = Annotated[Path | None, typer.Option("--dir", help="The job's folder; default: the newest one under runs/.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"gyrectl {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print gyrectl's version.")
    ] = False,
) -> None:
    """Steer Gyre: elastic online RL for agents in unmodified harnesses."""


def _fail(error: Exception) -> int:
    errors.print(str(error), style="red", markup=False)
    return 2 if isinstance(error, BadInput) else 1


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
def status(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Show a running job: phase, reward, water level, cells, switches. It says when the state store is away.

    gyrectl status --json
    """
    found = _run(lambda: client.status(client.find_job(folder, cluster)))
    if as_json:
        sys.stdout.write(json.dumps(to_plain(found)) + "\n")
    else:
        console.print(live.render(found))


@app.command()
def top(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Watch a running job, as `up` shows it, until it ends or Ctrl-C; with --json, one status a line.

    gyrectl top --dir runs/quickstart
    """
    from gyre.cli.top import watch

    _run(lambda: watch(client.find_job(folder, cluster), console, as_json=as_json))


@app.command()
def doctor(folder: Dir = None, cluster: Cluster = None, node: NodeFile = None, as_json: AsJson = False) -> None:
    """Look at what a job stands on: each line is ok, a warning or a fault, with the mend. Exit code 1 at a fault.

    With --node at what a node of a cluster stands on, job or not; with --cluster at what can be seen of a cluster from afar.

    gyrectl doctor
    gyrectl doctor --node /etc/gyre/node-a.toml
    """
    from gyre.cli.cluster_doctor import examine_cluster, examine_node
    from gyre.cli.doctor import examine
    from gyre.cli.findings import State

    async def work() -> list[Finding]:
        if node is not None:
            return await examine_node(node)
        named = folder or cluster or os.environ.get(client.CLUSTER)
        if not named and not list(Path("runs").glob("*/job.json")):
            return await examine(None)  # there is still the machine to look at
        job = client.find_job(folder, cluster)
        return await examine(job) if isinstance(job, JobDir) else await examine_cluster(job)

    findings = _run(work)
    if as_json:
        sys.stdout.write(json.dumps([finding.to_json() for finding in findings]) + "\n")
    else:
        for finding in findings:
            console.print(finding.line(), markup=False, highlight=False, soft_wrap=True, style=finding.colour)
    if any(finding.state is State.FAULT for finding in findings):
        raise typer.Exit(1)


@app.command()
def stop(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """End a running job cleanly; it can be resumed. A cluster's job is ended by `gyrectl job stop`.

    gyrectl stop --dir runs/quickstart
    """

    async def work() -> None:
        job = client.find_job(folder, cluster)
        if not isinstance(job, JobDir) or not client.is_lone(job):
            raise Refused("it is a cluster's job: `gyrectl job stop` ends it, and SIGTERM ends a node's gyred")
        await client.stop(job, "gyrectl stop")

    _run(work)
    say("stopping", as_json=as_json, stopping=True)


@app.command()
def report(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Print the report of a job that runs or has ended, from its records.

    gyrectl report --json
    """

    async def work() -> tuple[Report, str]:
        job = client.find_job(folder, cluster)
        return await client.report(job), str(job.report_html) if isinstance(job, JobDir) else ""

    found, html = _run(work)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json()) + "\n")
    else:
        console.print(live.summary(found, html))


@app.command()
def trace(
    switch: Annotated[
        str, typer.Argument(help="A switch id (see report.html), a trace id, or nothing for the last.")
    ] = "",
    folder: Dir = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Print the waterfall of a role switch from the node's own span ring.

    gyrectl trace
    """
    from gyre.telemetry.waterfall import waterfall

    spans = _run(lambda: client.trace(client.find_job(folder, cluster), switch))
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
