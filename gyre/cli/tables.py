"""The rows that `gyrectl cell list` and its like show: pure, from the records of the state store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gyre.actors.messages_gyrectl import CellStatus
from gyre.actors.messages_journals import Copies
from gyre.ids import CellId, NodeId
from gyre.sched.launch import mean
from gyre.store.records import (
    CellRoleRecord,
    CellSpecRecord,
    GroupRecord,
    GroupState,
    JobRecord,
    LeaderRecord,
    NodeRecord,
    PinRecord,
    RunRecord,
    RunState,
    SnapshotRecord,
    StepRecord,
    WaitingRecord,
)
from gyre.store.typed import Versioned

Row = dict[str, Any]


def cell_rows(
    specs: Sequence[CellSpecRecord],
    core: CellId | None,
    roles: Mapping[CellId, CellRoleRecord],
    pins: Sequence[PinRecord],
) -> list[Row]:
    """Every cell; one that has not reported yet has no role."""
    pinned = {pin.cell: pin.role.value for pin in pins}
    rows: list[Row] = []
    for spec in sorted(specs, key=lambda spec: spec.cell):
        role = roles.get(spec.cell)
        rows.append(
            {
                "cell": spec.cell,
                "node": spec.node,
                "core": spec.cell == core,
                "role": role.observed.value if role else None,
                "desired": role.desired.value if role else None,
                "pinned": pinned.get(spec.cell),
                "version": role.version if role else None,
                "epoch": role.epoch if role else None,
                "slots": spec.slots,
            }
        )
    return rows


def node_rows(
    nodes: Sequence[NodeRecord],
    specs: Sequence[CellSpecRecord],
    runs: Sequence[RunRecord],
    draining: Mapping[NodeId, float | None],
    leader: NodeId | None,
    core: NodeId | None,
) -> list[Row]:
    """Every node that has joined; `nodes` are those that are there, `draining` has the seconds that each may take."""
    there = {node.node: node for node in nodes}
    return [
        {
            "node": node,
            "there": node in there,
            "waits": False,
            "draining": node in draining,
            "within_s": draining.get(node),
            "leads": leader == node,
            "core": core == node,
            "cells": [spec.cell for spec in sorted(specs, key=lambda spec: spec.cell) if spec.node == node],
            "queued": sum(run.node == node and run.state is RunState.QUEUED for run in runs),
            "live": sum(run.node == node and run.state is RunState.LIVE for run in runs),
            "trouble": (there[node].trouble or None) if node in there else None,
            "address": there[node].address if node in there else None,
        }
        for node in sorted({spec.node for spec in specs} | set(there) | set(draining))
    ]


def with_waiting(rows: Sequence[Row], waiting: Sequence[WaitingRecord]) -> list[Row]:
    """The nodes of a job, and those of its cluster that wait for one, as they are now."""
    nothing = {
        "draining": False,
        "within_s": None,
        "leads": False,
        "core": False,
        "queued": 0,
        "live": 0,
        "trouble": None,
    }
    waits = {
        each.node: {"node": each.node, "there": True, "waits": True, **nothing, "cells": [], "address": each.address}
        for each in waiting
    }
    here = {row["node"] for row in rows if row["there"]}
    found = {row["node"]: row for row in rows} | {node: row for node, row in waits.items() if node not in here}
    return [found[node] for node in sorted(found)]


def drain_line(nodes: Sequence[Row], node: str) -> str | None:
    """What of a node that drains is still waited for, from the rows of all nodes; None: nothing is live or queued there."""
    row = next(row for row in nodes if row["node"] == node)
    if not row["live"] and not row["queued"]:
        return None
    takers = any(other["there"] and not other["draining"] and not other["trouble"] for other in nodes)
    return f"{node}: {row['live']} live, {row['queued']} queued{'' if takers else '; no other node takes runs'}"


def copies_row(copies: Copies | None) -> Row:
    """Which node has the copies of a node's journals, and what it lacks; nothing where that is not known."""
    if copies is None:
        return {"copies_on": None, "copies_lack_bytes": None, "copies_lack_why": None}
    return {
        "copies_on": copies.peer or None,
        "copies_lack_bytes": copies.behind_bytes,
        "copies_lack_why": copies.why or None,
    }


def kv_row(cells: Sequence[CellStatus], node: Row) -> Row:
    """Of each cell of a node, over which transport its engine's KV moves, and why; null where that is not known."""
    told = {cell.cell: cell.kv_carrier or None for cell in cells}
    return {"kv_transport": {cell: told.get(cell) for cell in node["cells"]}}


def leader_row(leader: Versioned[LeaderRecord] | None, *, running: bool) -> Row:
    """Who leads. A gyred that was killed leaves its name behind until the next one starts: then nobody leads."""
    if leader is None or not running:
        return {"node": None, "token": None, "address": None, "lease": None}
    found = leader.record
    return {"node": found.node, "token": leader.create_revision, "address": found.address, "lease": leader.lease}


def snapshot_rows(now: SnapshotRecord, steps: Sequence[StepRecord], kept: Mapping[int, str]) -> list[Row]:
    """Every version up to now. `kept` are the folders of those that are still on disk."""
    made = {step.version: step for step in steps}
    return [
        {
            "version": version,
            "authoritative": version == now.version,
            "step": made[version].step if version in made else None,
            "published_unix_s": made[version].finished_unix_s if version in made else None,
            "mean_reward": made[version].mean_reward if version in made else None,
            "path": kept.get(version),
        }
        for version in range(now.version + 1)
    ]


def group_rows(groups: Sequence[GroupRecord], runs: Sequence[RunRecord], state: GroupState | None) -> list[Row]:
    """Groups in the order of their launch; only those in `state` when one is given."""
    by_id = {run.run: run for run in runs}
    rows: list[Row] = []
    for group in sorted(groups, key=lambda group: (group.version, group.purpose.value, group.index)):
        if state is not None and group.state is not state:
            continue
        members = [by_id[run] for run in group.runs if run in by_id]
        rows.append(
            {
                "group": group.group,
                "task": group.task,
                "purpose": group.purpose.value,
                "state": group.state.value,
                "runs": len(group.runs),
                "settled": sum(run.state is RunState.SETTLED for run in members),
                "mean_reward": mean([run.reward for run in members if run.reward is not None]),
                "version": group.version,
                "step": group.step or None,
            }
        )
    return rows


def step_rows(steps: Sequence[StepRecord]) -> list[Row]:
    return [
        {
            "step": step.step,
            "version": step.version,
            "groups": len(step.groups),
            "scored_runs": step.scored_runs,
            "mean_reward": step.mean_reward,
            "counted_tokens": step.counted_tokens,
            "micro_steps": step.micro_steps,
            "cells": list(step.cells),
            "finished_unix_s": step.finished_unix_s,
            "metrics": step.metrics,
        }
        for step in sorted(steps, key=lambda step: step.step)
    ]


def job_row(
    job: JobRecord, snapshot: SnapshotRecord | None, steps: int, runs: Sequence[RunRecord], *, running: bool
) -> Row:
    """The job in one record. `running`: its gyred lives."""
    return {
        "job": job.name,
        "state": job.state.value,
        "running": running,
        "reason": job.reason,
        "steps": steps,
        "version": snapshot.version if snapshot else None,
        "launched_groups": job.launched_groups,
        "consumed_groups": job.consumed_groups,
        **{state.value: sum(run.state is state for run in runs) for state in RunState},
        "heldout_before": job.heldout_before,
        "heldout_after": job.heldout_after,
        "started_unix_s": job.started_unix_s,
        "active_s": job.active_s,
    }
