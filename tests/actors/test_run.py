"""The run actor beside others that fail: what it has asked of them it asks again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from gyre.actors.messages import CloseRun, RunEnded
from gyre.actors.run import RunActor
from gyre.actors.runtime import Actor, ActorSystem, Backoff, Failure, handles
from gyre.ids import GroupId, NodeId, RunId, TaskId
from gyre.sched.placement import NOWHERE
from gyre.store.protocol import Txn
from gyre.store.records import GroupRecord, GroupState, NodeRecord, Purpose, RunRecord, RunState
from gyre.store.typed import put_record
from gyre.trajectory.records import Outcome, RunTrace

from .stand_ins import a_site, first_records, follow, until

RUN = RunId("t000000-00")
GROUP = GroupId("t000000")


@dataclass(frozen=True)
class Fail:
    pass


class FailingGateway(Actor):
    """It answers what it is asked for the second time."""

    def __init__(self, asked: list[CloseRun]) -> None:
        self._asked = asked

    @handles(CloseRun, concurrent=True)
    async def close(self, message: CloseRun) -> RunTrace:
        self._asked.append(message)
        if len(self._asked) == 1:
            await asyncio.Event().wait()
        return RunTrace(message.run, message.attempt, 0, 0, 0, 0, (), 0, 0, 0, 0.0, "")

    @handles(Fail)
    async def fail(self, _: Fail) -> None:
        raise RuntimeError("it fails")


class Node(Actor):
    def __init__(self, ended: list[RunId]) -> None:
        self._ended = ended

    @handles(RunEnded)
    async def on_ended(self, message: RunEnded) -> None:
        self._ended.append(message.run)


async def test_a_run_that_is_closed_while_the_gateways_actor_fails_is_closed_by_the_next(tmp_path: Path) -> None:
    site = a_site(tmp_path)
    await first_records(site)
    run = RunRecord(RUN, GROUP, RunState.QUEUED, 1, site.node, None, None, "", None, 0.0, 0.0)
    group = GroupRecord(GROUP, TaskId("t"), Purpose.TRAIN, 0, (RUN,), GroupState.OPEN, 0, 0)
    puts = (put_record(site.keys.run(RUN), run), put_record(site.keys.group(GROUP), group))
    await site.store.commit(Txn(puts=puts))
    asked: list[CloseRun] = []
    ended: list[RunId] = []
    failed: list[Failure] = []
    async with ActorSystem.running("test", on_failure=failed.append) as system:
        gateway = system.spawn("gateway", lambda: FailingGateway(asked), restart=Backoff(initial_s=0.01))
        site.refs |= {"gateway": gateway, "node": system.spawn("node", lambda: Node(ended))}
        system.spawn("run", lambda: RunActor(site, RUN, cancelled=True))
        await until(lambda: asked)
        gateway.tell(Fail())
        await until(lambda: ended == [RUN])
    assert [failure.actor for failure in failed] == ["test/gateway"]
    found = await site.store.get(site.keys.run(RUN), RunRecord)
    assert found is not None
    assert found.record.state is RunState.SETTLED
    await site.store.store.close()


class FullGateway(Actor):
    """Its disk is full, and it says so of every run that it closes."""

    @handles(CloseRun)
    async def close(self, message: CloseRun) -> RunTrace:
        return RunTrace(message.run, message.attempt, 0, 0, 0, 0, (), 0, 0, 0, 0.0, "no space left on device")


@pytest.mark.parametrize("takes", [True, False])
async def test_what_has_failed_for_the_disk_here_begins_again_on_another_node_that_takes_runs(
    tmp_path: Path, *, takes: bool
) -> None:
    site = a_site(tmp_path)
    await first_records(site)
    run = RunRecord(RUN, GROUP, RunState.QUEUED, 1, site.node, None, None, "", None, 0.0, 0.0)
    group = GroupRecord(GROUP, TaskId("t"), Purpose.TRAIN, 0, (RUN,), GroupState.OPEN, 0, 0)
    other = NodeRecord(NodeId("n1"), "", "", 4 if takes else 0)
    puts = [put_record(site.keys.node(other.node), other)]
    puts += [put_record(site.keys.run(RUN), run), put_record(site.keys.group(GROUP), group)]
    await site.store.commit(Txn(puts=tuple(puts)))
    site.job.runs.rmdir()
    site.job.runs.write_text("where no run's folder can be")
    site.ready.set()
    ended: list[RunId] = []
    async with ActorSystem.running("test") as system:
        await follow(site, system)
        node, gateway = system.spawn("node", lambda: Node(ended)), system.spawn("gateway", FullGateway)
        site.refs |= {"gateway": gateway, "node": node}
        system.spawn("run", lambda: RunActor(site, RUN))
        await until(lambda: ended == [RUN])
    found = await site.store.get(site.keys.run(RUN), RunRecord)
    assert found is not None
    now = found.record
    if takes:
        assert (now.state, now.attempt, now.node, now.failed_on) == (RunState.QUEUED, 2, NOWHERE, (site.node,))
    else:
        assert (now.state, now.attempt, now.outcome) == (RunState.SETTLED, 1, Outcome.INFRA_FAILED)
    await site.store.store.close()
