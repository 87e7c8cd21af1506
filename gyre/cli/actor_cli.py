"""`gyrectl actor …`: what the actors of a job's processes are at, on this machine, or on every node of a cluster.

Each process is asked by itself, before its actors' mailboxes: one that is stuck is seen too.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from gyre.actors.inspection import ActorInfo, ActorList, ListActors, totals_by_kind
from gyre.actors.remote import connect
from gyre.cli.client import Job, find_job, reading
from gyre.cli.saying import Cluster
from gyre.errors import BadInput, GyreError, Unavailable
from gyre.jobdir import JobDir
from gyre.wire import to_plain

ASK_S = 5.0

actor_app = typer.Typer(
    help="Look at the actors of a running job: their mailboxes, and what they are at.", no_args_is_help=True
)

Dir = Annotated[Path | None, typer.Option("--dir", help="The job's folder; default: the newest one under runs/.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@actor_app.command("list")
def list_actors(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """List the actors of gyred, the gateway and the replicas: what waits, since when, what is in hand.

    gyrectl actor list
    """
    processes = _asked(folder, cluster)
    if as_json:
        sys.stdout.write(json.dumps({name: to_plain(listed) for name, listed in processes.items()}) + "\n")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("actor", "state", "in hand"):
        table.add_column(heading, no_wrap=True)
    for heading in ("waiting", "oldest", "handled", "mean", "slowest", "expired", "dropped", "refused", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for listed in processes.values():
        for actor in listed.actors:
            table.add_row(*_row(actor))
    _console().print(table)


@actor_app.command()
def show(
    name: Annotated[str, typer.Argument(help="The actor, as `gyrectl actor list` names it.", show_default=False)],
    folder: Dir = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Show all that is known of one actor.

    gyrectl actor show node-0/core
    """
    processes = _asked(folder, cluster)
    known = {actor.name: actor for listed in processes.values() for actor in listed.actors}
    found = known.get(name)
    if found is None:
        _fail(BadInput("actor", name, f"one of these is allowed: {', '.join(sorted(known))}"))
    if as_json:
        sys.stdout.write(json.dumps(to_plain(found)) + "\n")
        return
    totals = found.totals
    for line in (
        f"{found.name} ({totals.kind}): {found.state}",
        f"mailbox   {found.waiting} of {found.mailbox_messages} wait, {found.control} of them control messages; "
        f"the oldest for {found.oldest_s:.3f} s",
        f"in hand   {found.in_hand or 'nothing'}" + (f", for {found.in_hand_s:.3f} s" if found.in_hand else ""),
        f"beside    {found.beside} concurrent handlers, {found.tasks} tasks, {found.timers} timers",
        f"handled   {totals.handled}, {_mean_ms(found):.3f} ms each, the slowest {found.slowest_s * 1000:.3f} ms",
        f"not       {totals.expired} expired, {totals.dropped} dropped, {totals.refused} refused",
        f"failures  {totals.failures}" + (f"; the last {found.last_failure}" if found.last_failure else ""),
    ):
        _console().print(line, markup=False)


@actor_app.command()
def metrics(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Print the actors' figures as Prometheus metrics, for a textfile collector; or in JSON, by process and kind.

    gyrectl actor metrics > /var/lib/node_exporter/gyre.prom
    """
    from gyre.telemetry.actor_metrics import render

    processes = _asked(folder, cluster)
    if as_json:
        totals = {name: [to_plain(each) for each in totals_by_kind(listed)] for name, listed in processes.items()}
        sys.stdout.write(json.dumps(totals) + "\n")
        return
    sys.stdout.write(render(processes).decode())


def _asked(folder: Path | None, cluster: Path | None) -> dict[str, ActorList]:
    """What each process of the job answers; those that do not are named on stderr."""
    try:
        processes, silent = asyncio.run(ask_all(find_job(folder, cluster)))
    except GyreError as error:
        _fail(error)
    for name, reason in silent.items():
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"{name}: {reason}", style="yellow", markup=False)
    return processes


async def ask_all(job: Job) -> tuple[dict[str, ActorList], dict[str, str]]:
    """The answers of the job's processes, gyred first, and why others gave none. Raises Unavailable for gyred's; of a
    cluster's job, where none answers."""
    if isinstance(job, JobDir):
        answers = await _ask_here(job)
        if not isinstance(answers.get("node"), ActorList):
            raise Unavailable(f"the job in {job.root} is not running") from answers.get("node")  # type: ignore[misc]
    else:
        async with reading(job) as (store, keys):
            places = await job.processes(store, keys)
        answers = {
            name: _of(name, told) for name, told in (await job.ask_all(places, ListActors(), ASK_S, ActorList)).items()
        }
        if not any(isinstance(answer, ActorList) for answer in answers.values()):
            why = next(iter(answers.values()), None)
            raise Unavailable(f"no node of the cluster {job.file.cluster} answers{f': {why}' if why else ''}")
    found = {name: answer for name, answer in answers.items() if isinstance(answer, ActorList)}
    return found, {name: str(answer) for name, answer in answers.items() if not isinstance(answer, ActorList)}


def _of(process: str, told: ActorList | GyreError) -> ActorList | GyreError:
    """Every node has children of the same names: their actors are named after the node too."""
    node, _, child = process.partition("/")
    if not child or not isinstance(told, ActorList):
        return told
    return replace(told, actors=tuple(replace(actor, name=f"{node}/{actor.name}") for actor in told.actors))


async def _ask_here(job: JobDir) -> Mapping[str, ActorList | GyreError]:
    secret = job.secret()
    names = sorted((path.stem for path in job.sockets.glob("*.sock")), key=lambda name: (name != "node", name))

    async def ask(name: str) -> ActorList | Unavailable:
        async with connect(job.address(name), secret) as process:
            try:
                return await process.ask(ListActors(), ASK_S, ActorList)
            except Unavailable as error:
                return error

    return dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))


def _row(actor: ActorInfo) -> tuple[str, ...]:
    totals = actor.totals
    return (
        actor.name,
        actor.state,
        f"{actor.in_hand} {actor.in_hand_s:.1f} s" if actor.in_hand else "",
        f"{actor.waiting}/{actor.mailbox_messages}",
        f"{actor.oldest_s:.3f} s" if actor.waiting else "",
        str(totals.handled),
        f"{_mean_ms(actor):.2f} ms",
        f"{actor.slowest_s * 1000:.1f} ms",
        *(str(count or "") for count in (totals.expired, totals.dropped, totals.refused, totals.failures)),
    )


def _mean_ms(actor: ActorInfo) -> float:
    return actor.totals.handling_s * 1000 / max(1, actor.totals.handled)


def _fail(error: GyreError) -> NoReturn:
    Console(stderr=True, highlight=False, soft_wrap=True).print(str(error), style="red", markup=False)
    raise typer.Exit(2 if isinstance(error, BadInput) else 1) from error


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 240)
