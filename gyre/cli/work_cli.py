"""`gyrectl group|step|job …`: what was launched and trained, and whether more is launched.

What is read comes from the job's state store, while the job runs and after it has ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyre.actors.messages_gyrectl import EndJob, PauseJob
from gyre.cli import client, tables
from gyre.cli.check import check_job
from gyre.cli.cluster_file import member
from gyre.cli.cluster_job import ClusterJob
from gyre.cli.saying import AsJson, Cluster, Dir, Yes, done, say, show_row, show_rows
from gyre.cli.submit import submit_job
from gyre.config import FileError, load_job
from gyre.errors import BadInput, Unavailable
from gyre.store.records import GroupRecord, GroupState, JobRecord, JobState, RunRecord, SnapshotRecord, StepRecord

group_app = typer.Typer(help="Look at the groups of runs.", no_args_is_help=True)
step_app = typer.Typer(help="Look at the optimizer steps.", no_args_is_help=True)
job_app = typer.Typer(help="Look at the job, hold it, let it go on.", no_args_is_help=True)


@group_app.command("list")
def list_groups(
    state: Annotated[str, typer.Option(metavar="open|settled|consumed", help="Only groups in this state.")] = "",
    folder: Dir = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """List the groups: how many of their runs have settled, their mean reward, the step that consumed them.

    gyrectl group list --state open
    """

    async def work() -> list[tables.Row]:
        if state and state not in tuple(GroupState):
            raise BadInput("--state", state, f"one of {', '.join(GroupState)}")
        async with client.reading(client.find_job(folder, cluster)) as (store, keys):
            groups = await store.range(f"{keys.root}groups/", GroupRecord)
            runs = await store.range(f"{keys.root}runs/", RunRecord)
        wanted = GroupState(state) if state else None
        return tables.group_rows([item.record for item in groups.items], [item.record for item in runs.items], wanted)

    columns = ("group", "task", "purpose", "state", "runs", "settled", "mean_reward", "version", "step")
    show_rows(done(work), columns, as_json=as_json)


@step_app.command("list")
def list_steps(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """List the steps: their rewards, tokens, and the cells whose gradients are in them; `--json` has all metrics.

    gyrectl step list
    """

    async def work() -> list[tables.Row]:
        async with client.reading(client.find_job(folder, cluster)) as (store, keys):
            steps = await store.range(f"{keys.root}steps/", StepRecord)
        return tables.step_rows([item.record for item in steps.items])

    columns = ("step", "version", "groups", "scored_runs", "mean_reward", "counted_tokens", "micro_steps", "cells")
    show_rows(done(work), (*columns, "finished_unix_s"), as_json=as_json)


@job_app.command("show")
def show_job(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Show the job in one record: its state, how far it is, its runs.

    gyrectl job show --json
    """

    async def work() -> tables.Row:
        job = client.find_job(folder, cluster)
        async with client.reading(job) as (store, keys):
            found = await store.get(keys.job, JobRecord)
            snapshot = await store.get(keys.snapshot, SnapshotRecord)
            steps = await store.range(f"{keys.root}steps/", StepRecord)
            runs = await store.range(f"{keys.root}runs/", RunRecord)
        if found is None:
            raise Unavailable(f"{client.called(job)} has not begun yet")
        return tables.job_row(
            found.record,
            snapshot.record if snapshot else None,
            len(steps.items),
            [item.record for item in runs.items],
            running=await client.is_running(job),
        )

    show_row(done(work), as_json=as_json)


@job_app.command()
def submit(
    file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)],
    node: Annotated[
        Path | None,
        typer.Option("--node", metavar="NODE.toml", help="The file of a node of the cluster, on that node."),
    ] = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Have a cluster's nodes work on a job. There is one at a time; its name is its own for ever.

    On a node what the job file names is looked at too: the model, the tasks, the harness. From elsewhere it cannot be.

    gyrectl job submit job.toml --node node.toml
    """

    async def work() -> str:
        spec = load_job(file)
        if node is None:
            job = client.find_job(None, cluster)
            if not isinstance(job, ClusterJob):
                raise BadInput("--cluster", None, f"the file of a cluster (or ${client.CLUSTER}), or --node")
            store = job.file.store
        else:
            config, _ = member(node)
            store = config.store
            if faults := check_job(spec, config.base):
                raise FileError(file, faults)
        await submit_job(store, spec)
        return spec.job.name

    name = done(work)
    say(f"{name}: submitted", as_json=as_json, job=name)


@job_app.command()
def pause(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Launch no new runs; live ones go on, and what is ready is trained. It holds over restarts, until `job resume`.

    gyrectl job pause
    """
    done(lambda: client.order(client.find_job(folder, cluster), PauseJob(paused=True)))
    say("paused; gyrectl job resume launches runs again", as_json=as_json, state="paused")


@job_app.command()
def resume(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Launch runs again.

    gyrectl job resume
    """
    done(lambda: client.order(client.find_job(folder, cluster), PauseJob(paused=False)))
    say("running", as_json=as_json, state="running")


@job_app.command()
def stop(yes: Yes = False, folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """End the job for good, on every node: it has failed, "stopped by gyrectl". Asks first.

    gyrectl job stop --dir /var/lib/gyre/jobs/my-job
    """

    async def look() -> tuple[client.Job, str]:
        job = client.find_job(folder, cluster)
        return job, (await client.spec_of(job)).job.name

    job, name = done(look)
    if not yes:
        typer.confirm(f"{name} cannot go on after this, and its live runs are lost. End it?", abort=True, err=True)

    async def work() -> None:
        try:
            await client.order(job, EndJob())
        except Unavailable:  # the node may have ended the job, and itself for it, before it could answer
            async with client.reading(job) as (store, keys):
                found = await store.get(keys.job, JobRecord)
            if found is None or found.record.state is not JobState.FAILED:
                raise

    done(work)
    say(f"{name}: ended", as_json=as_json, job=name, state="failed")
