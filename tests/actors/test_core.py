"""The core actor over a store in memory and a replica that stands in: whatever is lost when, every micro-step of a step
enters it exactly once, and nothing is stepped on that is not whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from gyre.actors.core import CoreActor
from gyre.actors.messages import JobFailed, Ok
from gyre.actors.messages_core import (
    Claim,
    ClaimMicroStep,
    CoreLeaving,
    CoreLost,
    GetProgress,
    GiveBack,
    Lead,
    Merged,
    Progress,
    Progressed,
    SumsStaged,
    WhoLeads,
)
from gyre.actors.messages_replica import DropSums, MergeSums, MicroStep, OptimizerStep, StepDone
from gyre.actors.remote import serve
from gyre.actors.runtime import Actor, ActorSystem, Backoff, LocalRef, handles
from gyre.actors.site import Site
from gyre.errors import Refused, StorageFull, Unavailable
from gyre.ids import CellId, NodeId
from gyre.store.election import campaign_txn, elected
from gyre.store.protocol import Delete, Txn
from gyre.store.records import GroupRecord, GroupState, LeaderRecord, RunRecord, SnapshotRecord, StepRecord
from gyre.store.typed import put_record

from .stand_ins import DEADLINE_S, CoreReplica, a_site, first_records, follow, settle_group, until

CORE, SATELLITE = CellId("c0"), CellId("c1")


class Others(Actor):
    """Scheduler, gateway and cells in one: answers who leads, and notes the rest."""

    def __init__(self, site: Site, token: int, told: list[object]) -> None:
        self._site = site
        self._token = token
        self._told = told

    @handles(WhoLeads)
    async def who(self, _: WhoLeads) -> None:
        self._site.core.tell(Lead(self._token))

    @handles(Progressed)
    async def progressed(self, _: Progressed) -> None:
        return

    @handles(JobFailed)
    async def failed(self, message: JobFailed) -> None:
        self._told.append(message)

    @handles(CoreLost)
    async def lost(self, message: CoreLost) -> None:
        self._told.append(message)


@dataclass
class Bench:
    site: Site
    core: LocalRef
    replica: CoreReplica
    told: list[object] = field(default_factory=list)
    transfers: int = 0

    async def claim(self, cell: CellId = CORE, version: int = 0) -> MicroStep | None:
        return (await self.core.ask(ClaimMicroStep(cell, version), DEADLINE_S, Claim)).work

    async def claim_all(self, cell: CellId = CORE, version: int = 0) -> list[MicroStep]:
        found: list[MicroStep] = []
        while (work := await self.claim(cell, version)) is not None:
            found.append(work)
        return found

    async def ship(self, work: list[MicroStep], cell: CellId = CORE, version: int = 0) -> bool:
        """Have the sums of these merged, as one transfer whose metrics count the micro-steps."""
        self.transfers += 1
        names = tuple(item.micro_step for item in work)
        metrics = {"token_count": float(10 * len(work)), "tokens_count": 1.0, "seconds_sum": 1.0}
        self.replica.sizes[f"{cell}-{self.transfers}"] = len(work)
        message = SumsStaged(cell, f"{cell}-{self.transfers}", names, version, metrics)
        return (await self.core.ask(message, DEADLINE_S, Merged)).accepted

    async def steps(self) -> list[StepRecord]:
        listing = await self.site.store.range(f"{self.site.keys.root}steps/", StepRecord)
        return [item.record for item in listing.items]

    async def progress(self) -> Progress:
        return await self.core.ask(GetProgress(), DEADLINE_S, Progress)

    async def until_progress(self, enough: Callable[[Progress], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if enough(await self.progress()):
                    return
                await asyncio.sleep(0.01)

    async def until_step(self, count: int) -> list[StepRecord]:
        await self.until_progress(lambda now: now.step == count + 1)
        steps = await self.steps()
        assert len(steps) == count
        return steps


@asynccontextmanager
async def a_bench(tmp_path: Path) -> AsyncIterator[Bench]:
    site = a_site(tmp_path)
    await first_records(site)
    lease = await site.store.store.lease(600.0)
    token = elected(await site.store.commit(campaign_txn(site.keys, LeaderRecord(site.node, ""), lease.id)), lease.id)
    assert token is not None
    replica = CoreReplica()
    async with ActorSystem.running("test") as system:
        told: list[object] = []
        for name in ("scheduler", "gateway", "cell-c0", "cell-c1"):
            site.refs[name] = system.spawn(name, lambda: Others(site, token, told))
        await follow(site, system)
        office = site.directory.core
        assert office is not None
        served = system.spawn("replica", lambda: replica)
        async with serve(served, site.child_address("replica-c0"), site.secret):
            site.refs["core"] = system.spawn("core", lambda: CoreActor(site, office), restart=Backoff(initial_s=0.01))
            await until(lambda: told)  # a core actor that begins has the replica begin anew with it
            told.clear()
            yield Bench(site, site.refs["core"], replica, told)
            for name in ("core", "replica"):
                await (site.refs["core"] if name == "core" else served).stop()
    await site.store.store.close()


async def test_a_batch_becomes_one_step_with_each_micro_step_in_it_once(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        groups = [await settle_group(bench.site, 0), await settle_group(bench.site, 1)]
        work = await claimed_batch(bench)
        assert await bench.ship(work[:2])
        assert await bench.steps() == []
        assert await bench.ship(work[2:])
        (step,) = await bench.until_step(1)
        assert (step.step, step.version, step.groups, step.scored_runs) == (1, 1, tuple(groups), 4)
        assert (step.counted_tokens, step.micro_steps, step.metrics["trained_tokens"]) == (40, 4, 40)
        assert bench.replica.stepped == [("c0-1", "c0-2")]
        for group in groups:
            found = await bench.site.store.get(bench.site.keys.group(group), GroupRecord)
            assert found is not None
            assert (found.record.state, found.record.step) == (GroupState.CONSUMED, 1)


async def claimed_batch(bench: Bench, cell: CellId = CORE) -> list[MicroStep]:
    """All four micro-steps, when the two groups have been planned."""
    await bench.until_progress(lambda progress: progress.micro_steps == 4)
    work = await bench.claim_all(cell)
    assert len(work) == 4
    return work


async def whole_batch(bench: Bench, cell: CellId = CORE) -> list[MicroStep]:
    for index in (0, 1):
        await settle_group(bench.site, index)
    return await claimed_batch(bench, cell)


async def test_sums_that_died_with_the_cores_replica_are_made_again(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        assert await bench.ship(work[:3])
        bench.core.tell(CoreLost())
        bench.replica.merged.clear()
        assert (await bench.progress()).merged_micro_steps == 0
        assert await bench.claim(SATELLITE) is None, "nobody claims until the core's replica is there again"
        again = await bench.claim_all()  # and with this claim it is
        assert {item.micro_step for item in again} == {item.micro_step for item in work[:3]}
        assert await bench.ship(again)
        assert await bench.ship(work[3:]), "a claim that was not shipped when the core's replica died still stands"
        (step,) = await bench.until_step(1)
        assert (step.micro_steps, step.metrics["trained_tokens"]) == (4, 40)
        assert bench.replica.stepped == [("c0-2", "c0-3")]


async def test_a_merge_that_failed_takes_all_sums_back(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        assert await bench.ship(work[:2])
        bench.replica.faults.append((MergeSums, Refused("transfer c0-2 is not staged here")))
        assert not await bench.ship(work[2:])
        again = await claimed_batch(bench)
        assert await bench.ship(again)
        (step,) = await bench.until_step(1)
        assert step.metrics["trained_tokens"] == 40
        assert bench.replica.stepped == [("c0-3",)], "what had been merged before was dropped"


async def test_sums_lost_while_they_are_merged_do_not_count(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        bench.replica.hold[MergeSums] = held = asyncio.Event()
        shipping = asyncio.create_task(bench.ship(work))
        await until(lambda: any(isinstance(message, MergeSums) for message in bench.replica.seen))
        bench.core.tell(CoreLost())
        assert (await bench.progress()).micro_steps == 4, "the actor answers while it waits for the replica"
        held.set()
        assert not await shipping
        assert bench.replica.stepped == []
        again = await claimed_batch(bench)
        assert await bench.ship(again)
        await bench.until_step(1)
        assert bench.replica.stepped == [("c0-2",)]


async def test_a_satellites_sums_that_came_before_the_core_was_back_wait_again(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        first = await whole_batch(bench)
        assert await bench.ship(first[:1])
        await bench.core.ask(GiveBack(CORE), DEADLINE_S, Ok)
        theirs = await bench.claim_all(SATELLITE)
        assert len(theirs) == 3
        bench.core.tell(CoreLost())
        assert not await bench.ship(theirs, SATELLITE)
        assert len(await bench.claim_all(CORE)) == 4


async def test_a_step_that_fails_is_taken_again_from_the_start_and_fails_the_job_in_the_end(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        bench.replica.faults += [(OptimizerStep, StorageFull("snapshot v00000001 could not be written"))] * 3
        for tries in (1, 2, 3):
            assert await bench.ship(work)
            await until(lambda tries=tries: sum(isinstance(m, CoreLost) for m in bench.told) == tries)
            bench.core.tell(CoreLost())  # the cell has ended it
            assert await bench.steps() == []
            work = await claimed_batch(bench)
        await until(lambda: any(isinstance(message, JobFailed) for message in bench.told))
        (failed,) = [message for message in bench.told if isinstance(message, JobFailed)]
        assert "failed 3 times: snapshot v00000001 could not be written" in failed.reason


async def test_a_step_whose_replica_died_under_it_is_no_second_loss(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        bench.replica.hold[OptimizerStep] = held = asyncio.Event()
        bench.replica.faults.append((OptimizerStep, Unavailable("the connection broke before the answer")))
        assert await bench.ship(work)
        await until(lambda: any(isinstance(message, OptimizerStep) for message in bench.replica.seen))
        bench.core.tell(CoreLost())
        await bench.progress()
        held.set()
        again = await claimed_batch(bench)
        assert await bench.ship(again)
        await bench.until_step(1)
        assert not any(isinstance(message, CoreLost) for message in bench.told), "the fresh replica is not ended"


async def test_a_step_on_less_than_the_batch_is_not_published(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        assert await bench.ship(work[:2])
        bench.replica.merged.clear()  # lost, and nobody says so
        assert await bench.ship(work[2:])
        await until(lambda: any(isinstance(message, CoreLost) for message in bench.told))
        assert await bench.steps() == []
        assert await bench.ship(await claimed_batch(bench))
        (step,) = await bench.until_step(1)
        assert step.metrics["trained_tokens"] == 40


async def lead_anew(site: Site) -> int:
    """Another leader's token, the one before being deposed."""
    lease = await site.store.store.lease(600.0)
    await site.store.commit(Txn(deletes=(Delete(site.keys.leader),)))
    token = elected(await site.store.commit(campaign_txn(site.keys, LeaderRecord(site.node, ""), lease.id)), lease.id)
    assert token is not None
    return token


async def test_a_step_taken_while_nobody_leads_is_published_by_the_next_leaders_token(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        bench.replica.hold[OptimizerStep] = held = asyncio.Event()
        assert await bench.ship(work)
        token = await lead_anew(bench.site)
        held.set()
        await bench.until_progress(lambda progress: progress.step_due)
        assert await bench.steps() == []
        bench.core.tell(Lead(token))
        await bench.until_step(1)
        assert len(bench.replica.stepped) == 1, "the step is not taken again"


async def test_a_deposed_leaders_token_that_comes_late_changes_nothing(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        token = await lead_anew(bench.site)
        bench.core.tell(Lead(token))
        bench.core.tell(Lead(token - 1))
        bench.core.tell(Lead(0))
        assert await bench.ship(work)
        await bench.until_step(1)


async def test_a_core_that_leaves_waits_for_its_step_and_steps_no_more(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        bench.replica.hold[OptimizerStep] = held = asyncio.Event()
        assert await bench.ship(work)
        await until(lambda: any(isinstance(message, OptimizerStep) for message in bench.replica.seen))
        leaving = asyncio.create_task(bench.core.ask(CoreLeaving(), DEADLINE_S, Ok))
        await bench.progress()
        assert not leaving.done()
        held.set()
        await leaving
        await bench.until_step(1)


async def test_merged_sums_outlive_a_stay_of_the_core_in_rollout(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        assert await bench.ship(work[:3])
        await bench.core.ask(CoreLeaving(), DEADLINE_S, Ok)
        assert await bench.ship(work[3:], CORE)
        progress = await bench.progress()
        assert (progress.merged_micro_steps, progress.step_due) == (4, True)
        assert bench.replica.stepped == []
        assert await bench.claim() is None  # the core is back, and steps at once
        await bench.until_step(1)
        assert bench.replica.stepped == [("c0-1", "c0-2")]
        assert sum(isinstance(message, DropSums) for message in bench.replica.seen) == 1, "that of the beginning"


async def test_a_core_actor_that_failed_begins_the_batch_again(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        work = await whole_batch(bench)
        assert await bench.ship(work[:2])
        bench.core.tell(StepDone(1, "of no step that it ordered", {}))  # it fails of that
        again = await claimed_batch(bench)
        assert bench.replica.merged == [], "what the replica held was of a batch that nobody knows of"
        assert await bench.ship(again)
        (step,) = await bench.until_step(1)
        assert step.metrics["trained_tokens"] == 40


async def test_a_group_that_no_run_of_can_be_scored_fails_the_job_and_one_of_two_does_not(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        await settle_group(bench.site, 0, (None, None))
        await settle_group(bench.site, 1, (0.0, 1.0))
        await bench.until_progress(lambda progress: progress.planned_groups == 2)
        work = await bench.claim_all()
        assert await bench.ship(work)
        (step,) = await bench.until_step(1)
        assert step.scored_runs == 2

        await settle_group(bench.site, 2, (None, None))
        await settle_group(bench.site, 3, (None,))
        await until(lambda: any(isinstance(message, JobFailed) for message in bench.told))
        published = await bench.site.store.get(bench.site.keys.snapshot, SnapshotRecord)
        assert published is not None
        assert published.record.version == 1


async def test_a_group_that_is_run_again_during_a_step_that_fails_is_planned_anew(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        site = bench.site
        first = await settle_group(site, 0)
        await settle_group(site, 1)
        await bench.until_progress(lambda now: now.planned_groups == 2)
        bench.replica.hold[OptimizerStep] = held = asyncio.Event()
        bench.replica.faults.append((OptimizerStep, StorageFull("no room")))
        assert await bench.ship(await bench.claim_all())
        await until(lambda: any(isinstance(message, OptimizerStep) for message in bench.replica.seen))
        found = await site.store.get(site.keys.group(first), GroupRecord)
        assert found is not None
        await site.store.put(site.keys.group(first), replace(found.record, state=GroupState.OPEN))
        await asyncio.sleep(0.1)  # it is heard of while the step is taken
        held.set()
        del bench.replica.hold[OptimizerStep]
        await bench.until_progress(lambda now: now.planned_groups == 1)
        await site.store.put(site.keys.group(first), found.record)
        await bench.until_progress(lambda now: now.planned_groups == 2)
        assert await bench.ship(await bench.claim_all())
        assert len(await bench.until_step(1)) == 1


async def test_runs_that_another_node_has_by_now_are_had_from_there(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        site, heir = bench.site, NodeId("n9")
        for index in (0, 1):
            await settle_group(site, index)
        await bench.until_progress(lambda now: now.planned_groups == 2)
        listing = await site.store.range(f"{site.keys.root}runs/", RunRecord)
        groups = await site.store.range(f"{site.keys.root}groups/", GroupRecord)
        moved = [put_record(item.key, replace(item.record, node=heir)) for item in listing.items]
        await site.store.commit(Txn(puts=(*moved, *(put_record(item.key, item.record) for item in groups.items))))

        async def homes() -> set[NodeId]:
            claims = [await bench.core.ask(ClaimMicroStep(CORE, 0), DEADLINE_S, Claim) for _ in range(4)]
            await bench.core.ask(GiveBack(CORE), DEADLINE_S, Ok)
            return {node for claim in claims for node in claim.homes.values()}

        async with asyncio.timeout(DEADLINE_S):
            while True:
                if await homes() == {heir}:
                    break
                await asyncio.sleep(0.01)
        assert await bench.ship(await bench.claim_all())
        assert len(await bench.until_step(1)) == 1


async def test_a_step_whose_runs_are_run_again_is_not_published(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        site = bench.site
        first = await settle_group(site, 0)
        await settle_group(site, 1)
        await bench.until_progress(lambda now: now.planned_groups == 2)
        bench.replica.hold[OptimizerStep] = held = asyncio.Event()
        assert await bench.ship(await bench.claim_all())
        await until(lambda: any(isinstance(message, OptimizerStep) for message in bench.replica.seen))
        found = await site.store.get(site.keys.group(first), GroupRecord)
        assert found is not None
        await site.store.put(site.keys.group(first), replace(found.record, state=GroupState.OPEN))
        held.set()
        del bench.replica.hold[OptimizerStep]
        await bench.until_progress(lambda now: now.planned_groups == 1)
        assert await bench.steps() == []
        await site.store.put(site.keys.group(first), found.record)
        await bench.until_progress(lambda now: now.planned_groups == 2)
        assert await bench.ship(await bench.claim_all())
        assert len(await bench.until_step(1)) == 1


async def run_again(site: Site) -> None:
    """All groups settle with a second attempt at each run, and nobody hears that they were open in between."""
    runs = await site.store.range(f"{site.keys.root}runs/", RunRecord)
    groups = await site.store.range(f"{site.keys.root}groups/", GroupRecord)
    again = [put_record(item.key, replace(item.record, attempt=2)) for item in runs.items]
    await site.store.commit(Txn(puts=(*again, *(put_record(item.key, item.record) for item in groups.items))))


def attempts_of(work: list[MicroStep]) -> set[int]:
    return {item.attempt for micro_step in work for item in micro_step.lineages}


async def test_runs_that_were_run_again_unheard_are_planned_anew(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        for index in (0, 1):
            await settle_group(bench.site, index)
        await bench.until_progress(lambda now: now.planned_groups == 2)
        assert await bench.ship([work] if (work := await bench.claim()) else [])
        await run_again(bench.site)
        async with asyncio.timeout(DEADLINE_S):
            while attempts_of(found := await bench.claim_all()) != {2}:
                await bench.core.ask(GiveBack(CORE), DEADLINE_S, Ok)
                await asyncio.sleep(0.01)
        assert len(found) == 4, "what the first attempts gave is not in the sums any more"
        assert await bench.ship(found)
        assert len(await bench.until_step(1)) == 1


async def test_a_step_whose_runs_were_run_again_unheard_is_not_published(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        site = bench.site
        for index in (0, 1):
            await settle_group(site, index)
        await bench.until_progress(lambda now: now.planned_groups == 2)
        bench.replica.hold[OptimizerStep] = held = asyncio.Event()
        assert await bench.ship(await bench.claim_all())
        await until(lambda: any(isinstance(message, OptimizerStep) for message in bench.replica.seen))
        await run_again(site)
        held.set()
        del bench.replica.hold[OptimizerStep]
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if found := await bench.claim_all():
                    break
                await asyncio.sleep(0.01)
        assert await bench.steps() == []
        assert attempts_of(found) == {2}
        assert await bench.ship(found)
        assert len(await bench.until_step(1)) == 1
