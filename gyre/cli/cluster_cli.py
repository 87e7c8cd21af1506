"""`gyrectl cell|node|leader|snapshot …`: who does what, and a person's orders to the leader.

What is read comes from the job's state store, while the job runs and after it has ended. What is ordered goes to the
job's gyred, and its leader writes it or says in one line why not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from gyre.actors.messages_gyrectl import CellStatus, DrainNode, PinCell, ResignLeader, SwitchCell
from gyre.actors.snapshot_folders import held_by
from gyre.cli import client, tables
from gyre.cli.cluster_file import seen_from
from gyre.cli.cluster_job import ClusterJob, NoJob
from gyre.cli.durations import seconds
from gyre.cli.saying import AsJson, Cluster, Dir, NodeFile, Yes, done, say, show_row, show_rows, tell
from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.ids import CellId, NodeId
from gyre.jobdir import JobDir
from gyre.sched.orders import ORDERED
from gyre.store.records import (
    CellRoleRecord,
    CellSpecRecord,
    CoreRecord,
    DrainRecord,
    JobRecord,
    JobState,
    LeaderRecord,
    NodeRecord,
    PinRecord,
    Role,
    RunRecord,
    SnapshotRecord,
    StepRecord,
)
from gyre.store.typed import Versioned

ELECTED_S = 10.0
LOOK_S = 0.05
WAIT_S = 1.0

cell_app = typer.Typer(help="Look at the cells, and order their roles.", no_args_is_help=True)
node_app = typer.Typer(help="Look at the nodes, and have one give its work away.", no_args_is_help=True)
leader_app = typer.Typer(help="Look at the leader, or have it step down.", no_args_is_help=True)
snapshot_app = typer.Typer(help="Look at the authoritative weights.", no_args_is_help=True)

Cell = Annotated[str, typer.Argument(help="The cell; `gyrectl cell list` names them.", show_default=False)]
Node = Annotated[str, typer.Argument(help="The node; `gyrectl node list` names them.", show_default=False)]
Wanted = Annotated[str, typer.Argument(metavar="rollout|train", help="The role.", show_default=False)]


# ---------------------------------------------------------------------------------------------- cells


@cell_app.command("list")
def list_cells(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """List the cells: their role, the one ordered, a pin, the weight version they hold.

    gyrectl cell list
    """
    rows = done(lambda: _cells(client.find_job(folder, cluster)))
    show_rows(rows, ("cell", "node", "core", "role", "desired", "pinned", "version", "slots"), as_json=as_json)


@cell_app.command()
def switch(cell: Cell, role: Wanted, folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Order a cell to a role, once. The policy decides again when it has come to rest; `cell pin` keeps it there.

    gyrectl cell switch c1 train
    """

    async def work() -> Role:
        job, wanted = client.find_job(folder, cluster), _role(role)
        _named(await _cells(job), "cell", cell)
        await client.order(job, SwitchCell(CellId(cell), wanted))
        return wanted

    wanted = done(work)
    say(f"{cell}: ordered to {wanted.value}", as_json=as_json, cell=cell, ordered=wanted.value)


@cell_app.command()
def pin(
    cell: Cell, role: Wanted, yes: Yes = False, folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False
) -> None:
    """Keep a cell in a role until `cell unpin`, restarts included. Asks first where it would end all training.

    gyrectl cell pin c1 rollout
    """

    async def look() -> tuple[client.Job, bool]:
        job, wanted = client.find_job(folder, cluster), _role(role)
        return job, _named(await _cells(job), "cell", cell)["core"] and wanted is Role.ROLLOUT

    job, ends_training = done(look)
    if ends_training and not yes:
        typer.confirm(f"{cell} is the core: no step will be taken until it is unpinned. Pin it?", abort=True, err=True)
    done(lambda: client.order(job, PinCell(CellId(cell), _role(role))))
    say(f"{cell}: pinned to {role}", as_json=as_json, cell=cell, pinned=role)


@cell_app.command()
def unpin(cell: Cell, folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Let the policy decide about a cell again.

    gyrectl cell unpin c1
    """

    async def work() -> None:
        job = client.find_job(folder, cluster)
        _named(await _cells(job), "cell", cell)
        await client.order(job, PinCell(CellId(cell), None))

    done(work)
    say(f"{cell}: unpinned", as_json=as_json, cell=cell, pinned=None)


def _role(text: str) -> Role:
    if text not in ORDERED:
        raise BadInput("role", text, "rollout or train")
    return Role(text)


async def _cells(job: client.Job) -> list[tables.Row]:
    async with client.reading(job) as (store, keys):
        specs = await store.range(keys.cells, CellSpecRecord)
        roles = await store.range(keys.roles, CellRoleRecord)
        pins = await store.range(f"{keys.root}pins/", PinRecord)
        core = await store.get(keys.core, CoreRecord)
    return tables.cell_rows(
        [item.record for item in specs.items],
        core.record.cell if core else None,
        {keys.cell_of(item.key): item.record for item in roles.items},
        [item.record for item in pins.items],
    )


# ---------------------------------------------------------------------------------------------- nodes, the leader


@node_app.command("list")
def list_nodes(folder: Dir = None, cluster: Cluster = None, node: NodeFile = None, as_json: AsJson = False) -> None:
    """List the nodes: whether each is there, waits for a job, what it has, and the runs that wait and live there.

    With --node or --cluster between jobs and before the first too.

    gyrectl node list
    """

    async def work() -> list[tables.Row]:
        job = client.find_job(folder, cluster) if node is None else ClusterJob(seen_from(node))
        waiting = await client.waiting(job)
        try:
            return tables.with_waiting(await _nodes(job), waiting)
        except NoJob:
            return tables.with_waiting([], waiting)

    columns = (
        "node",
        "there",
        "waits",
        "draining",
        "within_s",
        "leads",
        "core",
        "cells",
        "queued",
        "live",
        "trouble",
        "address",
    )
    show_rows(done(work), columns, as_json=as_json)


@node_app.command("show")
def show_node(node: Node, folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Show one node: which other one has the copies of its journals, how the KV of its engines moves, and why so.

    gyrectl node show node-a
    """

    async def work() -> tables.Row:
        job = client.find_job(folder, cluster)
        row = _named(await _nodes(job), "node", node)
        return (
            row | tables.copies_row(await client.copies(job, NodeId(node))) | tables.kv_row(await _seen_cells(job), row)
        )

    show_row(done(work), as_json=as_json)


async def _seen_cells(job: client.Job) -> Sequence[CellStatus]:
    """What the cells say of themselves, as far as they answer."""
    try:
        return (await client.status(job)).cells
    except GyreError:
        return ()


@node_app.command()
def drain(
    node: Node,
    within: Annotated[
        str | None, typer.Option(metavar="90s|10m|2h", help="What lives there still after this begins again elsewhere.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until nothing is live or queued there.")] = False,
    yes: Yes = False,
    folder: Dir = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Give a node no new run, and the ones that have not begun there to others. What lives there ends there.

    With --within, what still lives there when that time is over begins again elsewhere, as its next attempt. 0s asks first.
    --wait on a node that drains already only waits. Exit code 1 when it takes runs again before it is empty.

    gyrectl node drain node-a --within 10m --wait
    """

    async def look() -> tuple[client.Job, tables.Row, float | None]:
        within_s = None if within is None else seconds("--within", within)
        job = client.find_job(folder, cluster)
        return job, _named(await _nodes(job), "node", node), within_s

    job, seen, within_s = done(look)
    if wait and seen["draining"] and within_s in (None, seen["within_s"]):
        within_s = seen["within_s"]
    else:
        if within_s == 0 and seen["live"] and not yes:
            lost = f"What the {seen['live']} live runs of {node} did is lost for training: they begin again elsewhere."
            typer.confirm(f"{lost} Drain it at once?", abort=True, err=True)
        done(lambda: client.order(job, DrainNode(NodeId(node), True, within_s)))
    if not wait:
        say(
            f"{node}: draining{f' within {within}' if within else ''}",
            as_json=as_json,
            node=node,
            draining=True,
            within_s=within_s,
        )
        return
    done(lambda: _until_empty(job, node))
    say(
        f"{node}: nothing is live or queued there", as_json=as_json, node=node, draining=True, within_s=within_s, live=0
    )


@node_app.command()
def undrain(node: Node, folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Give a node runs again.

    gyrectl node undrain node-a
    """

    async def work() -> None:
        job = client.find_job(folder, cluster)
        _named(await _nodes(job), "node", node)
        await client.order(job, DrainNode(NodeId(node), draining=False))

    done(work)
    say(f"{node}: takes runs again", as_json=as_json, node=node, draining=False)


async def _until_empty(job: client.Job, node: str) -> None:
    """A line at each change. Raises Refused when the node takes runs again, Unavailable when nobody is there to empty it."""
    said = ""
    while True:
        try:
            rows, state = await _nodes(job), await _job_state(job)
        except Unavailable as error:  # etcd may come back
            line = str(error)
        else:
            row = _named(rows, "node", node)
            if not row["draining"]:
                raise Refused(f"{node} takes runs again")
            if state not in (JobState.RUNNING, JobState.PAUSED):
                return
            if not row["there"] and client.is_lone(job):
                raise Unavailable(f"{client.called(job)} is not running")
            if (line := tables.drain_line(rows, node)) is None:
                return
        if line != said:
            tell(line)
        said = line
        await asyncio.sleep(WAIT_S)


async def _job_state(job: client.Job) -> JobState | None:
    async with client.reading(job) as (store, keys):
        found = await store.get(keys.job, JobRecord)
    return found.record.state if found else None


def _named(rows: list[tables.Row], what: str, name: str) -> tables.Row:
    """The row of the node or the cell that is meant. Raises BadInput."""
    for row in rows:
        if row[what] == name:
            return row
    raise BadInput(what, name, f"one of {', '.join(row[what] for row in rows)}")


async def _nodes(job: client.Job) -> list[tables.Row]:
    async with client.reading(job) as (store, keys):
        nodes = await store.range(keys.nodes, NodeRecord)
        specs = await store.range(keys.cells, CellSpecRecord)
        runs = await store.range(f"{keys.root}runs/", RunRecord)
        drains = await store.range(keys.drains, DrainRecord)
        leader = await store.get(keys.leader, LeaderRecord)
        core = await store.get(keys.core, CoreRecord)
    # A lone gyred that was killed leaves its record behind until the next one begins.
    there = not client.is_lone(job) or await client.is_running(job)
    return tables.node_rows(
        [item.record for item in nodes.items] if there else [],
        [item.record for item in specs.items],
        [item.record for item in runs.items],
        {item.record.node: None for item in nodes.items if not item.record.max_live and not item.record.trouble}
        | {item.record.node: item.record.within_s for item in drains.items},
        leader.record.node if leader and there else None,
        core.record.node if core else None,
    )


@leader_app.command("show")
def show_leader(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Show which node leads, and its token, which fences all that it writes. Exit code 1 when nobody leads.

    gyrectl leader show
    """

    async def work() -> tables.Row:
        job = client.find_job(folder, cluster)
        there = not client.is_lone(job) or await client.is_running(job)
        return tables.leader_row(await _leader(job), running=there)

    row = done(work)
    show_row(row, as_json=as_json)
    if row["node"] is None:
        raise typer.Exit(1)


@leader_app.command()
def resign(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Have the leader give its lease up, and wait until one is elected again. Nothing in progress is lost.

    gyrectl leader resign
    """

    async def work() -> tuple[Versioned[LeaderRecord], int, float]:
        job = client.find_job(folder, cluster)
        before = await _leader(job)
        token = before.create_revision if before else 0
        began_s = time.monotonic()
        await client.order(job, ResignLeader())
        while (now := await _leader(job)) is None or now.create_revision <= token:
            if time.monotonic() - began_s > ELECTED_S:
                raise Unavailable(f"it resigned, but nobody was elected within {ELECTED_S:g} s; see gyrectl doctor")
            await asyncio.sleep(LOOK_S)
        return now, token, time.monotonic() - began_s

    now, token, took_s = done(work)
    line = f"{now.record.node} leads with token {now.create_revision}, after {took_s:.2f} s"
    say(line, as_json=as_json, node=now.record.node, token=now.create_revision, token_before=token, took_s=took_s)


async def _leader(job: client.Job) -> Versioned[LeaderRecord] | None:
    async with client.reading(job) as (store, keys):
        return await store.get(keys.leader, LeaderRecord)


# ---------------------------------------------------------------------------------------------- snapshots


@snapshot_app.command("show")
def show_snapshot(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """Show the authoritative snapshot: its version, its manifest's digest, the node that made it.

    gyrectl snapshot show
    """

    async def work() -> tables.Row:
        found, _ = await _snapshots(client.find_job(folder, cluster))
        return {"version": found.version, "digest": found.digest, "node": found.node}

    show_row(done(work), as_json=as_json)


@snapshot_app.command()
def history(folder: Dir = None, cluster: Cluster = None, as_json: AsJson = False) -> None:
    """List every version so far: which step made it, when, and where this node has it.

    gyrectl snapshot history
    """

    async def work() -> list[tables.Row]:
        job = client.find_job(folder, cluster)
        now, steps = await _snapshots(job)
        kept = {version: str(path) for version, path in held_by(job).items()} if isinstance(job, JobDir) else {}
        return tables.snapshot_rows(now, steps, kept)

    columns = ("version", "authoritative", "step", "published_unix_s", "mean_reward", "path")
    show_rows(done(work), columns, as_json=as_json)


async def _snapshots(job: client.Job) -> tuple[SnapshotRecord, list[StepRecord]]:
    async with client.reading(job) as (store, keys):
        now = await store.get(keys.snapshot, SnapshotRecord)
        steps = await store.range(f"{keys.root}steps/", StepRecord)
    if now is None:
        raise Unavailable(f"{client.called(job)} has no snapshot yet")
    return now.record, [item.record for item in steps.items]
