"""`gyrectl cell|node|leader|snapshot …`: who does what, and a person's orders to the leader.

What is read comes from the job's state store, while the job runs and after it has ended. What is ordered goes to the
job's gyred, and its leader writes it or says in one line why not.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from gyre.actors.messages_gyrectl import DrainNode, PinCell, ResignLeader, SwitchCell
from gyre.cli import client, tables
from gyre.cli.saying import AsJson, Dir, Yes, done, say, show_row, show_rows
from gyre.errors import BadInput, Unavailable
from gyre.ids import CellId, NodeId
from gyre.jobdir import JobDir
from gyre.sched.orders import ORDERED
from gyre.store.records import (
    CellRoleRecord,
    CellSpecRecord,
    CoreRecord,
    DrainRecord,
    LeaderRecord,
    NodeRecord,
    PinRecord,
    Role,
    RunRecord,
    SnapshotRecord,
    StepRecord,
)
from gyre.store.typed import Versioned
from gyre.train.snapshot import list_snapshots

ELECTED_S = 10.0
LOOK_S = 0.05

cell_app = typer.Typer(help="Look at the cells, and order their roles.", no_args_is_help=True)
node_app = typer.Typer(help="Look at the nodes, and have one give its work away.", no_args_is_help=True)
leader_app = typer.Typer(help="Look at the leader, or have it step down.", no_args_is_help=True)
snapshot_app = typer.Typer(help="Look at the authoritative weights.", no_args_is_help=True)

Cell = Annotated[str, typer.Argument(help="The cell; `gyrectl cell list` names them.", show_default=False)]
Node = Annotated[str, typer.Argument(help="The node; `gyrectl node list` names them.", show_default=False)]
Wanted = Annotated[str, typer.Argument(metavar="rollout|train", help="The role.", show_default=False)]


# ---------------------------------------------------------------------------------------------- cells


@cell_app.command("list")
def list_cells(folder: Dir = None, as_json: AsJson = False) -> None:
    """List the cells: their role, the one ordered, a pin, the weight version they hold.

    gyrectl cell list
    """
    rows = done(lambda: _cells(client.find_job(folder)))
    show_rows(rows, ("cell", "node", "core", "role", "desired", "pinned", "version", "slots"), as_json=as_json)


@cell_app.command()
def switch(cell: Cell, role: Wanted, folder: Dir = None, as_json: AsJson = False) -> None:
    """Order a cell to a role, once. The policy decides again when it has come to rest; `cell pin` keeps it there.

    gyrectl cell switch c1 train
    """

    async def work() -> Role:
        wanted = _role(role)
        await client.order(client.find_job(folder), SwitchCell(CellId(cell), wanted))
        return wanted

    wanted = done(work)
    say(f"{cell}: ordered to {wanted.value}", as_json=as_json, cell=cell, ordered=wanted.value)


@cell_app.command()
def pin(cell: Cell, role: Wanted, yes: Yes = False, folder: Dir = None, as_json: AsJson = False) -> None:
    """Keep a cell in a role until `cell unpin`, restarts included. Asks first where it would end all training.

    gyrectl cell pin c1 rollout
    """

    async def look() -> tuple[JobDir, bool]:
        job, wanted = client.find_job(folder), _role(role)
        core = any(row["core"] and row["cell"] == cell for row in await _cells(job))
        return job, core and wanted is Role.ROLLOUT

    job, ends_training = done(look)
    if ends_training and not yes:
        typer.confirm(f"{cell} is the core: no step will be taken until it is unpinned. Pin it?", abort=True, err=True)
    done(lambda: client.order(job, PinCell(CellId(cell), _role(role))))
    say(f"{cell}: pinned to {role}", as_json=as_json, cell=cell, pinned=role)


@cell_app.command()
def unpin(cell: Cell, folder: Dir = None, as_json: AsJson = False) -> None:
    """Let the policy decide about a cell again.

    gyrectl cell unpin c1
    """
    done(lambda: client.order(client.find_job(folder), PinCell(CellId(cell), None)))
    say(f"{cell}: unpinned", as_json=as_json, cell=cell, pinned=None)


def _role(text: str) -> Role:
    if text not in ORDERED:
        raise BadInput("role", text, "rollout or train")
    return Role(text)


async def _cells(job: JobDir) -> list[tables.Row]:
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
def list_nodes(folder: Dir = None, as_json: AsJson = False) -> None:
    """List the nodes: whether each is there, what it has, and the runs that wait and live there.

    gyrectl node list
    """
    columns = ("node", "there", "draining", "leads", "core", "cells", "queued", "live", "address")
    show_rows(done(lambda: _nodes(client.find_job(folder))), columns, as_json=as_json)


@node_app.command("show")
def show_node(node: Node, folder: Dir = None, as_json: AsJson = False) -> None:
    """Show one node, and which other one has the copies of its journals.

    gyrectl node show node-a
    """

    async def work() -> tables.Row:
        job = client.find_job(folder)
        row = _named(await _nodes(job), node)
        return row | tables.copies_row(await client.copies(job, NodeId(node)))

    show_row(done(work), as_json=as_json)


@node_app.command()
def drain(node: Node, folder: Dir = None, as_json: AsJson = False) -> None:
    """Give a node no new run, and the ones that have not begun there to others. What lives there ends there.

    gyrectl node drain node-a
    """
    done(lambda: _drain(client.find_job(folder), node, draining=True))
    say(f"{node}: draining", as_json=as_json, node=node, draining=True)


@node_app.command()
def undrain(node: Node, folder: Dir = None, as_json: AsJson = False) -> None:
    """Give a node runs again.

    gyrectl node undrain node-a
    """
    done(lambda: _drain(client.find_job(folder), node, draining=False))
    say(f"{node}: takes runs again", as_json=as_json, node=node, draining=False)


async def _drain(job: JobDir, node: str, *, draining: bool) -> None:
    _named(await _nodes(job), node)
    await client.order(job, DrainNode(NodeId(node), draining))


def _named(rows: list[tables.Row], node: str) -> tables.Row:
    for row in rows:
        if row["node"] == node:
            return row
    raise BadInput("node", node, f"one of {', '.join(row['node'] for row in rows)}")


async def _nodes(job: JobDir) -> list[tables.Row]:
    async with client.reading(job) as (store, keys):
        nodes = await store.range(keys.nodes, NodeRecord)
        specs = await store.range(keys.cells, CellSpecRecord)
        runs = await store.range(f"{keys.root}runs/", RunRecord)
        drains = await store.range(keys.drains, DrainRecord)
        leader = await store.get(keys.leader, LeaderRecord)
        core = await store.get(keys.core, CoreRecord)
    # A lone gyred that was killed leaves its record behind until the next one begins.
    there = not client.is_lone(job) or client.gyred_of(job) is not None
    return tables.node_rows(
        [item.record for item in nodes.items] if there else [],
        [item.record for item in specs.items],
        [item.record for item in runs.items],
        {item.record.node for item in drains.items}
        | {item.record.node for item in nodes.items if not item.record.max_live},
        leader.record.node if leader and there else None,
        core.record.node if core else None,
    )


@leader_app.command("show")
def show_leader(folder: Dir = None, as_json: AsJson = False) -> None:
    """Show which node leads, and its token, which fences all that it writes. Exit code 1 when nobody leads.

    gyrectl leader show
    """

    async def work() -> tables.Row:
        job = client.find_job(folder)
        there = not client.is_lone(job) or client.gyred_of(job) is not None
        return tables.leader_row(await _leader(job), running=there)

    row = done(work)
    show_row(row, as_json=as_json)
    if row["node"] is None:
        raise typer.Exit(1)


@leader_app.command()
def resign(folder: Dir = None, as_json: AsJson = False) -> None:
    """Have the leader give its lease up, and wait until one is elected again. Nothing in progress is lost.

    gyrectl leader resign
    """

    async def work() -> tuple[Versioned[LeaderRecord], int, float]:
        job = client.find_job(folder)
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


async def _leader(job: JobDir) -> Versioned[LeaderRecord] | None:
    async with client.reading(job) as (store, keys):
        return await store.get(keys.leader, LeaderRecord)


# ---------------------------------------------------------------------------------------------- snapshots


@snapshot_app.command("show")
def show_snapshot(folder: Dir = None, as_json: AsJson = False) -> None:
    """Show the authoritative snapshot: its version, its manifest's digest, the node that made it.

    gyrectl snapshot show
    """

    async def work() -> tables.Row:
        found, _ = await _snapshots(client.find_job(folder))
        return {"version": found.version, "digest": found.digest, "node": found.node}

    show_row(done(work), as_json=as_json)


@snapshot_app.command()
def history(folder: Dir = None, as_json: AsJson = False) -> None:
    """List every version so far: which step made it, when, and whether it is still on disk.

    gyrectl snapshot history
    """

    async def work() -> list[tables.Row]:
        job = client.find_job(folder)
        now, steps = await _snapshots(job)
        kept = {version: str(path) for version, path in list_snapshots(job.snapshots)}
        return tables.snapshot_rows(now, steps, kept)

    columns = ("version", "authoritative", "step", "published_unix_s", "mean_reward", "path")
    show_rows(done(work), columns, as_json=as_json)


async def _snapshots(job: JobDir) -> tuple[SnapshotRecord, list[StepRecord]]:
    async with client.reading(job) as (store, keys):
        now = await store.get(keys.snapshot, SnapshotRecord)
        steps = await store.range(f"{keys.root}steps/", StepRecord)
    if now is None:
        raise Unavailable(f"the job in {job.root} has no snapshot yet")
    return now.record, [item.record for item in steps.items]
