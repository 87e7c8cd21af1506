"""The run actor: one run from its place in the queue to its reward.

    queued -> live: workspace, the gateway lets it in, the harness starts
    live -> settled: the harness ends or reaches its limit; the gateway closes its tree; the evaluator scores what is left

An attempt that failed through no fault of its own (infra_failed) is started again as the next attempt while the job
allows it, on another node where one takes runs; whatever the old attempt still does is refused by its key and its attempt
number. A new gyred makes new run actors: where the harness of the last attempt lives or has left its end, they go on with it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gyre.actors.gateways import insist
from gyre.actors.messages import CloseRun, GatewayStatus, GetGatewayStatus, Ok, OpenRun, RunEnded, RunFailed, RunMoved
from gyre.actors.messages_gyrectl import CancelRun
from gyre.actors.runtime import Actor, handles
from gyre.actors.site import Site
from gyre.children import ProcessRef
from gyre.errors import GyreError, Refused
from gyre.harness import keeper
from gyre.harness.evaluate import Evaluation, RunInfo
from gyre.harness.launch import HarnessExit, HarnessProcess
from gyre.harness.tasks import Task
from gyre.harness.workspace import RunFolder, WorkspaceError
from gyre.ids import RunId
from gyre.sched.placement import NOWHERE, anyone_takes
from gyre.store.protocol import Compare, Txn
from gyre.store.records import GroupRecord, RunRecord, RunState
from gyre.store.typed import Versioned, put_record
from gyre.trajectory.outcome import (
    GatewayReport,
    HarnessEnd,
    HarnessEnding,
    Judgement,
    Verdict,
    failure_of_ours,
    harness_end,
    judge,
)
from gyre.trajectory.records import Outcome, RunTrace
from gyre.wire import record

ASK_S = 120.0
CLOSE_S = 300.0
END_GRACE_S = 2.0
CANCELLED = Verdict(Outcome.INFRA_FAILED, None, "cancelled")
LEFT_GRACE_S = 0.5
"""For each of the two signals to a harness that is ended because the job is."""


@record("run.begin")
@dataclass(frozen=True)
class _Begin:
    pass


@dataclass(frozen=True)
class _Ticket:
    """What a later gyred must know to go on with an attempt: in the run's folder."""

    key: str
    deadline_s: float
    """By the machine's monotonic clock, which a jump of the wall clock does not move."""
    launched: bool
    """Its harness may be there. False: the attempt can still begin as if nothing had been."""

    @staticmethod
    def read(folder: RunFolder) -> _Ticket | None:
        try:
            plain = json.loads(ticket_file(folder).read_text(encoding="utf-8"))
            return _Ticket(str(plain["key"]), float(plain["deadline"]), bool(plain["launched"]))
        except (OSError, ValueError, KeyError):
            return None

    def write(self, folder: RunFolder) -> None:
        """Whole or not at all. Raises WorkspaceError."""
        plain = {"key": self.key, "deadline": self.deadline_s, "launched": self.launched}
        path = ticket_file(folder)
        try:
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(plain), encoding="utf-8")
            fresh.replace(path)
        except OSError as error:
            raise WorkspaceError(f"{path} cannot be written: {error.strerror}") from error


class RunActor(Actor):
    """One run. It ends itself when the run has settled."""

    def __init__(self, site: Site, run: RunId, *, cancelled: bool = False) -> None:
        self._site = site
        self._run = run
        self._cancelled = cancelled
        self._moved = False
        self._process: HarnessProcess | None = None

    async def pre_start(self) -> None:
        self.task(self._live(), lambda revision: RunEnded(self._run, revision))

    @handles(RunFailed)
    async def on_failed(self, message: RunFailed) -> None:
        """The gateway stopped the run (its reason is in the trace): there is no point in letting the harness go on."""
        if self._process is not None and self._process.alive:
            self._site.say(f"{self._run}: {message.reason}")
            await self._process.end(END_GRACE_S)

    @handles(CancelRun)
    async def on_cancel(self, _: CancelRun) -> None:
        """A person wants no more of it: its harness is ended, and it is not started again."""
        self._cancelled = True
        if self._process is not None and self._process.alive:
            await self._process.end(END_GRACE_S)

    @handles(RunMoved)
    async def on_moved(self, _: RunMoved) -> None:
        """Another node has been given the run: whatever this attempt still does is of no use."""
        if not self._moved:
            self._moved = True
            self._site.say(f"{self._run}: it was given away; the attempt here is ended")
            if self._process is not None and self._process.alive:
                await self._process.end(END_GRACE_S)

    @handles(RunEnded)
    async def on_ended(self, message: RunEnded) -> None:
        self._site.refs["node"].tell(message)
        self.stop()

    # ------------------------------------------------------------------------------------------ the run

    async def _live(self) -> int:
        """Until the run has settled or is another node's; the revision of its record that says so."""
        site = self._site
        found = await self._read()
        while self._ours(found):
            self._moved = False
            group = await site.store.get(site.keys.group(found.record.group), GroupRecord)
            assert group is not None
            task = site.task(group.record.purpose, group.record.index)
            folder = RunFolder.of(site.job.runs, self._run, found.record.attempt)
            adopted = await self._adopt(found.record, folder)
            if adopted is None and self._cancelled:
                found = await self._settle(found, CANCELLED, await self._close(found.record.attempt))
                continue
            if adopted is None:
                await site.ready.wait()
                key = secrets.token_urlsafe(18)
                if found.record.state is RunState.LIVE:
                    ticket = _Ticket.read(folder)
                    if ticket is None or ticket.launched:
                        found = await self._next_attempt(found, "its harness was gone when gyred came back")
                        folder = RunFolder.of(site.job.runs, self._run, found.record.attempt)
                    else:
                        key = ticket.key
                found = await self._write(
                    found, replace(found.record, state=RunState.LIVE, started_unix_s=site.outside.unix_s())
                )
                if not self._ours(found):
                    continue
                try:
                    adopted = await self._start(found.record, folder, task, key)
                except GyreError as error:
                    found = await self._failed_to_start(found, str(error))
                    continue
            self._process, ticket = adopted
            found = await self._follow(found, folder, task, adopted[0], ticket)
        return found.mod_revision

    def _ours(self, found: Versioned[RunRecord]) -> bool:
        return found.record.state is not RunState.SETTLED and found.record.node == self._site.node

    async def _read(self) -> Versioned[RunRecord]:
        found = await self._site.store.get(self._site.keys.run(self._run), RunRecord)
        assert found is not None, "a run actor is made for a run that the store has"
        return found

    async def _write(self, old: Versioned[RunRecord], new: RunRecord) -> Versioned[RunRecord]:
        site, key = self._site, self._site.keys.run(self._run)
        result = await site.store.commit(Txn((Compare.modified(key, old.mod_revision),), (put_record(key, new),)))
        if not result.succeeded:
            site.say(f"{self._run}: its record was changed by another; going by that")
        return await self._read()

    # ------------------------------------------------------------------------------------------ an attempt begins

    async def _start(self, run: RunRecord, folder: RunFolder, task: Task, key: str) -> tuple[HarnessProcess, _Ticket]:
        site, spec = self._site, self._site.spec
        folder.prepare(task)
        ticket = _Ticket(key, site.outside.monotonic_s() + spec.limits.run_s, launched=False)
        ticket.write(folder)
        await self._open(run, ticket)
        status = await site.gateway.ask(GetGatewayStatus(), ASK_S, GatewayStatus)
        base_url = f"{status.base_url}/run/{run.run}/{ticket.key}"
        ticket = replace(ticket, deadline_s=site.outside.monotonic_s() + spec.limits.run_s, launched=True)
        ticket.write(folder)
        return await site.launcher.start(folder, base_url, task.instruction), ticket

    async def _open(self, run: RunRecord, ticket: _Ticket) -> None:
        spec = self._site.spec
        order = OpenRun(
            run=run.run,
            group=run.group,
            attempt=run.attempt,
            key=ticket.key,
            profile=spec.harness.profile,
            temperature=spec.sampling.temperature,
            max_tokens=spec.sampling.max_tokens,
        )
        await self._site.gateway.ask(order, ASK_S, Ok)

    async def _adopt(self, run: RunRecord, folder: RunFolder) -> tuple[HarnessProcess, _Ticket] | None:
        """The attempt that an earlier gyred started, if its harness lives or has left its end."""
        if run.state is not RunState.LIVE:
            return None
        process, ticket = self._site.launcher.adopt(folder), _Ticket.read(folder)
        if process is None or ticket is None:
            return None
        try:
            await self._open(run, ticket)
        except Refused as error:  # it was closed, and its end not written down: asked again, the gateway has its trace
            self._site.say(f"{run.run}: {error}")
        # An evaluator that an earlier gyred has started would speak for ours.
        await self._site.outside.end_marked(f"{folder.mark}/evaluation")
        self._site.say(f"adopted {run.run} (pid {process.ref.pid})")
        return process, ticket

    async def _next_attempt(self, old: Versioned[RunRecord], why: str) -> Versioned[RunRecord]:
        self._site.say(f"{self._run}: attempt {old.record.attempt + 1} ({why})")
        return await self._write(old, replace(old.record, state=RunState.QUEUED, attempt=old.record.attempt + 1))

    async def _begin_elsewhere(self, old: Versioned[RunRecord]) -> Versioned[RunRecord]:
        """What has failed here may fail here again, whatever the reason is: the leader gives the run to another node."""
        run, here = old.record, self._site.node
        self._site.warn(f"{self._run}: attempt {run.attempt + 1} begins on another node, for the last one failed here")
        failed_on = tuple(dict.fromkeys((*run.failed_on, here)))
        again = replace(run, state=RunState.QUEUED, attempt=run.attempt + 1, node=NOWHERE, failed_on=failed_on)
        return await self._write(old, again)

    async def _failed_to_start(self, found: Versioned[RunRecord], reason: str) -> Versioned[RunRecord]:
        trace = await self._close(found.record.attempt)
        return await self._settle(found, Verdict(Outcome.INFRA_FAILED, None, reason), trace)

    # ------------------------------------------------------------------------------------------ an attempt ends

    async def _follow(
        self, found: Versioned[RunRecord], folder: RunFolder, task: Task, process: HarnessProcess, ticket: _Ticket
    ) -> Versioned[RunRecord]:
        spec = self._site.spec
        exit_, stopped = await self._until_end(process, ticket)
        ended_s = self._site.outside.monotonic_s()
        trace = await self._close(found.record.attempt)
        if self._moved:
            ticket_file(folder).unlink(missing_ok=True)
            return await self._read()
        end = _ending(exit_, ticket, spec.limits.run_s, ended_s, timed_out=stopped)
        report = GatewayReport(trace.calls, trace.interrupted_calls, trace.failure)
        judgement: Judgement | None = None
        if not self._cancelled and not failure_of_ours(end, report):
            scored = await self._evaluate(task, folder, end, exit_)
            judgement = Judgement(scored.score, scored.reason, scored.failed_here)
        verdict = CANCELLED if self._cancelled else judge(end, report, judgement)
        settled = await self._settle(found, verdict, trace)
        ticket_file(folder).unlink(missing_ok=True)  # of no more use: nobody takes this attempt up again
        if verdict.outcome in (Outcome.FINISHED, Outcome.TIMED_OUT):
            folder.discard()
        return settled

    async def _close(self, attempt: int) -> RunTrace:
        trace = await insist(self._site.gateway, CloseRun(self._run, attempt), RunTrace, CLOSE_S)
        assert trace is not None, "it is wanted until it is there"
        return trace

    async def _until_end(self, process: HarnessProcess, ticket: _Ticket) -> tuple[HarnessExit, bool]:
        """How the harness ended, and whether it was we who ended it at its limit."""
        left_s = 0.0 if self._cancelled else ticket.deadline_s - self._site.outside.monotonic_s()
        exit_ = await process.wait(max(0.0, left_s))
        if exit_ is not None:
            return exit_, False
        return await process.end(END_GRACE_S), True

    async def _evaluate(self, task: Task, folder: RunFolder, end: HarnessEnd, exit_: HarnessExit) -> Evaluation:
        outcome = Outcome.TIMED_OUT if end.ending is HarnessEnding.TIMED_OUT else Outcome.FINISHED
        limit_s = self._site.spec.limits.evaluator_s
        info = RunInfo(outcome, exit_.submitted)
        site = self._site
        return await site.outside.evaluate(task, folder, info, limit_s, site.sandbox, site.hidden)

    async def _settle(self, found: Versioned[RunRecord], verdict: Verdict, trace: RunTrace) -> Versioned[RunRecord]:
        site, run = self._site, found.record
        if verdict.outcome is Outcome.INFRA_FAILED:
            site.say(f"{run.run} attempt {run.attempt}: {verdict.reason}")
            if run.attempt < site.spec.harness.attempts and not self._cancelled:
                if anyone_takes(room for room in site.directory.rooms if room.node not in (site.node, *run.failed_on)):
                    return await self._begin_elsewhere(found)
                if not trace.failure:
                    return await self._next_attempt(found, "the last one failed through no fault of its own")
        elif verdict.outcome is Outcome.EVALUATOR_FAILED:
            site.say(f"{run.run}: {verdict.reason}")
        settled = replace(
            run,
            state=RunState.SETTLED,
            outcome=verdict.outcome,
            reward=verdict.reward,
            reason=verdict.reason,
            trace=trace,
            ended_unix_s=site.outside.unix_s(),
        )
        return await self._write(found, settled)


def _ending(exit_: HarnessExit, ticket: _Ticket, limit_s: float, ended_s: float, *, timed_out: bool) -> HarnessEnd:
    if exit_.failure:
        return HarnessEnd(HarnessEnding.LOST, None, exit_.failure.removeprefix("the harness "))
    if timed_out:
        return HarnessEnd(HarnessEnding.TIMED_OUT, None, f"was ended at its limit of {limit_s:g} s")
    return harness_end(
        started_s=ticket.deadline_s - limit_s,
        ended_s=min(ended_s, ticket.deadline_s - 1e-3),
        limit_s=limit_s,
        exit_code=exit_.exit_code,
        signal=None,
    )


def ticket_file(folder: RunFolder) -> Path:
    return folder.root / "ticket.json"


async def end_left_run(folder: RunFolder) -> None:
    """End the harness of an attempt that is not ours any more, and see to it that nobody takes it up again."""
    ticket_file(folder).unlink(missing_ok=True)
    await _end_left(folder)


async def end_left_runs(runs: Path) -> None:
    """End every harness that was started under `runs`, and see to it that no later gyred takes them up again."""
    for ticket in runs.glob("*/*/ticket.json"):
        ticket.unlink(missing_ok=True)
    async with asyncio.TaskGroup() as group:
        for path in runs.glob("*/*/process.json"):
            folder = RunFolder.of(runs, RunId(path.parent.parent.name), int(path.parent.name))
            group.create_task(_end_left(folder), name=f"end {path.parent}")


async def _end_left(folder: RunFolder) -> None:
    try:
        found = json.loads(folder.process_file.read_text(encoding="utf-8"))
        process = ProcessRef(int(found["pid"]), int(found["start_ticks"]))
    except (OSError, ValueError, KeyError):
        return
    # The keeper passes the first SIGTERM on, and takes the second as the end.
    for number, limit_s in ((signal.SIGTERM, LEFT_GRACE_S), (signal.SIGTERM, LEFT_GRACE_S), (signal.SIGKILL, 10.0)):
        if not process.signal(number):
            return
        process.signal(signal.SIGCONT)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await process.wait()
    # A keeper that had to be killed may have left the run's processes, where no namespace ends with it.
    await asyncio.to_thread(keeper.end_marked, folder.mark)
