"""A site in memory, and actors that stand in for its others: they note what they are told, and fail when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from gyre.actors.directory import Directory
from gyre.actors.messages import Ok
from gyre.actors.messages_replica import DropSums, MergeSums, OptimizerStep, StepDone
from gyre.actors.runtime import Actor, ActorSystem, handles
from gyre.actors.site import Site
from gyre.children import Children
from gyre.config import BatchSection, HarnessSection, JobSection, JobSpec, ModelSection, TasksSection
from gyre.errors import GyreError
from gyre.harness.confine import UNCONFINED
from gyre.harness.launch import Launcher
from gyre.harness.profiles import Settings, profile
from gyre.harness.tasks import Task
from gyre.ids import CellId, GroupId, NodeId, RunId, TaskId
from gyre.jobdir import JobDir
from gyre.sched.launch import group_id, run_id
from gyre.store.election import campaign_txn, elected
from gyre.store.embedded import EmbeddedStore
from gyre.store.protocol import Txn
from gyre.store.records import (
    CellSpecRecord,
    CoreRecord,
    GroupRecord,
    GroupState,
    JobRecord,
    JobState,
    Keys,
    LeaderRecord,
    NodeRecord,
    Purpose,
    RunRecord,
    RunState,
    SnapshotRecord,
)
from gyre.store.typed import TypedStore, put_record
from gyre.telemetry.tracing import Tracing
from gyre.trajectory.records import LineageInfo, LineageRole, Outcome, RunTrace

DEADLINE_S = 120.0
CELLS = (CellId("c0"), CellId("c1"))

SPEC = JobSpec(
    job=JobSection(name="small", steps=2),
    model=ModelSection(path="builtin:tiny"),
    tasks=TasksSection(source="builtin:chores", heldout=0),
    harness=HarnessSection(profile="scripted"),
    batch=BatchSection(groups=2, group_size=2, staleness=0, micro_step_tokens=64),
)


class NoTasks:
    """A source of empty tasks."""

    name = "none"
    private_folders: tuple[Path, ...] = ()

    def train(self, index: int) -> Task:
        return Task(TaskId(f"train-{index}"), "do nothing", {}, ("true",), b"{}")

    def heldout(self) -> list[Task]:
        return []


def a_site(tmp_path: Path, spec: JobSpec = SPEC) -> Site:
    job = JobDir(tmp_path / "job")
    job.create()
    children = Children(job.state)
    store, keys = TypedStore(EmbeddedStore.open(None)), Keys("small")
    return Site(
        node=NodeId("n0"),
        spec=spec,
        job=job,
        base=tmp_path,
        model_dir=tmp_path,
        keys=keys,
        store=store,
        children=children,
        tracing=Tracing("test"),
        secret=job.secret(),
        source=NoTasks(),
        sandbox=UNCONFINED,
        launcher=Launcher(children, job.state, profile("scripted"), Settings(), UNCONFINED),
        hidden=(),
        active_before_s=0.0,
        cells=CELLS,
        directory=Directory(store, keys),
    )


async def first_records(site: Site) -> None:
    """The job's record, snapshot 0, and the one node with its cells, which leads and has the core."""
    node, keys = site.node, site.keys
    job = JobRecord("small", site.spec.to_json(), JobState.RUNNING, "", 0, 0, None, None, 0.0, 0.0)
    puts = (
        put_record(keys.job, job),
        put_record(keys.snapshot, SnapshotRecord(0, "digest-0", node)),
        put_record(keys.node(node), NodeRecord(node, "", "", 4)),
        *(put_record(keys.cell_spec(cell), CellSpecRecord(cell, node, 4)) for cell in CELLS),
        put_record(keys.core, CoreRecord(CELLS[0], node)),
    )
    await site.store.commit(Txn(puts=puts))


async def lead(site: Site) -> int:
    """Have this node lead; its token."""
    lease = await site.store.store.lease(600.0)
    result = await site.store.commit(campaign_txn(site.keys, LeaderRecord(site.node, ""), lease.id))
    token = elected(result, lease.id)
    assert token is not None
    return token


class Follower(Actor):
    """Keeps the site's directory true, and does nothing else of a membership actor."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def pre_start(self) -> None:
        directory = self._site.directory
        for mirror in directory.mirrors:
            self.task(mirror.follow(directory.changed))


async def follow(site: Site, system: ActorSystem) -> None:
    """Have the directory known from now on."""
    site.refs["member"] = system.spawn("member", lambda: Follower(site))
    await until(lambda: site.directory.listed)


async def settle_group(site: Site, index: int, rewards: tuple[float | None, ...] = (0.0, 1.0)) -> GroupId:
    """A training group whose runs have ended with these rewards; each run has one lineage of 40 tokens, 10 counted."""
    group = group_id(Purpose.TRAIN, index)
    runs = tuple(run_id(group, member) for member in range(len(rewards)))
    puts = [
        put_record(
            site.keys.run(run),
            RunRecord(
                run,
                group,
                RunState.SETTLED,
                1,
                site.node,
                Outcome.INFRA_FAILED if reward is None else Outcome.FINISHED,
                reward,
                "",
                _trace(run),
                0.0,
                0.0,
            ),
        )
        for run, reward in zip(runs, rewards, strict=True)
    ]
    record = GroupRecord(group, TaskId("t"), Purpose.TRAIN, index, runs, GroupState.SETTLED, 0, 0)
    await site.store.commit(Txn(puts=(*puts, put_record(site.keys.group(group), record))))
    return group


def _trace(run: RunId) -> RunTrace:
    lineage = LineageInfo(0, LineageRole.MAIN, 40, 10, 0)
    return RunTrace(run, 1, 1, 10, 10, 40, (lineage,), 0, 0, 0, 0.0, "")


async def until(enough: Callable[[], object]) -> None:
    """Look again and again until it is enough."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if enough():
                return
            await asyncio.sleep(0.01)


class CoreReplica(Actor):
    """The core's replica as the core actor reaches it: it keeps count of what is merged, in place of any gradient."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        """How many micro-steps each transfer holds."""
        self.merged: list[str] = []
        self.stepped: list[tuple[str, ...]] = []
        """The transfers that each step was taken on."""
        self.faults: list[tuple[type, GyreError]] = []
        """The next message of that type fails so."""
        self.hold: dict[type, asyncio.Event] = {}
        """Messages of that type wait for it."""
        self.seen: list[object] = []

    async def _take(self, message: object) -> None:
        self.seen.append(message)
        if type(message) in self.hold:
            await self.hold[type(message)].wait()
        for place, (kind, error) in enumerate(self.faults):
            if isinstance(message, kind):
                del self.faults[place]
                raise error

    @handles(DropSums)
    async def drop(self, message: DropSums) -> Ok:
        await self._take(message)
        self.merged.clear()
        return Ok()

    @handles(MergeSums)
    async def merge(self, message: MergeSums) -> Ok:
        await self._take(message)
        self.merged.append(message.transfer)
        return Ok()

    @handles(OptimizerStep)
    async def step(self, message: OptimizerStep) -> StepDone:
        await self._take(message)
        self.stepped.append(tuple(self.merged))
        micro_steps = sum(self.sizes[transfer] for transfer in self.merged)
        self.merged.clear()
        return StepDone(message.version, f"digest-{message.version}", {"micro_steps": float(micro_steps)})
