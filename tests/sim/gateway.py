"""The gateway: the product's engines, seats, generations and copies of journals, without the HTTP, the tokens' texts and
the trees.

Its journals and what its closed runs leave are files, as the product's are: a peer has copies of them, and a node that
takes runs over reads what was copied. What is open it knows from memory, which a gateway leaves to the next of its node.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

from gyre.actors.messages import (
    CloseRun,
    DrainEngine,
    GatewayStatus,
    GetGatewayStatus,
    GetLineages,
    Lineages,
    Ok,
    OpenRun,
    Ping,
    SetRoutes,
)
from gyre.actors.messages_journals import AskHeld, Attempt, CopyJournal, CopyTo, GetCopies, PutAway, TakeOver
from gyre.children import ChildSpec
from gyre.engine.records import IdText
from gyre.errors import Refused, Unavailable
from gyre.ids import CallId, NodeId, RunId
from gyre.proxy.closed_runs import ClosedRun, ClosedRuns
from gyre.proxy.copied_journals import CopiedJournals
from gyre.proxy.departure import Departure
from gyre.proxy.engines import Engines
from gyre.proxy.faults import Fault
from gyre.proxy.generation import Generation
from gyre.proxy.journals import closed_folder, open_folder, segment_path
from gyre.proxy.replication import ReplicaLink
from gyre.proxy.sampling import Sampling, Stretch
from gyre.trajectory.journal import SEGMENT_HEADER, CallSampled, JournalRecord, RunClosed, RunOpened, encode
from gyre.trajectory.records import Lineage, LineageInfo, LineageRole, RunTrace

from .engine import EngineClient
from .machine import Child, Machine, Served
from .net import SimRef
from .runs import CALL_TOKENS, COUNTED_TOKENS, LINEAGE_TOKENS

BLOCK_TOKENS = 16
WAIT_S = 1800.0
PROMPT = array("i", [1] * LINEAGE_TOKENS)
PROMPT_TEXT = IdText().grown(PROMPT)
SAMPLING = Sampling(temperature=1.0, max_tokens=CALL_TOKENS, stop_token_ids=(), stop=(), seed=None)


@dataclass
class Run:
    order: OpenRun
    sampled: dict[int, list[Stretch]] = field(default_factory=dict[int, list[Stretch]])
    """What was sampled of each call that has begun."""
    ended: set[int] = field(default_factory=set[int])
    """Calls whose tokens are journaled whole."""
    answered: set[int] = field(default_factory=set[int])
    closing: bool = False
    closed: RunTrace | None = None

    def so_far(self, number: int) -> Stretch | None:
        parts = self.sampled[number]
        if not parts:
            return None
        whole = Stretch(array("i"), array("f"), array("i"))
        for part in parts:
            whole.token_ids.extend(part.token_ids)
            whole.logprobs.extend(part.logprobs)
            whole.versions.extend(part.versions)
        return whole

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.order.run, self.order.attempt)

    def parts(self) -> list[Stretch]:
        """Of the calls that were answered."""
        return [part for number in sorted(self.answered) for part in self.sampled[number]]

    def lineages(self) -> tuple[Lineage, ...]:
        parts = self.parts()
        if not parts:
            return ()
        path = b"".join(part.token_ids.tobytes() for part in parts)
        logprobs = b"".join(part.logprobs.tobytes() for part in parts)
        versions = b"".join(part.versions.tobytes() for part in parts)
        counted = b"\1" * (len(path) // 4)
        run, attempt = self.order.run, self.order.attempt
        return (Lineage(run, attempt, 0, LineageRole.MAIN, path, counted, logprobs, versions),)

    def trace(self) -> RunTrace:
        parts = self.parts()
        lowest = min((version for part in parts for version in part.versions), default=-1)
        lineages = (LineageInfo(0, LineageRole.MAIN, LINEAGE_TOKENS, COUNTED_TOKENS, lowest),) if parts else ()
        return RunTrace(
            run=self.order.run,
            attempt=self.order.attempt,
            calls=len(self.answered),
            sampled_tokens=sum(len(part.token_ids) for part in parts),
            counted_tokens=COUNTED_TOKENS,
            tree_tokens=LINEAGE_TOKENS,
            lineages=lineages,
            continued_calls=0,
            interrupted_calls=0,
            prefix_tokens_recomputed=0,
            max_silence_s=0.0,
            failure="",
        )


@dataclass
class Journal:
    """What a gateway has written down, as the next one reads it: it begins with it."""

    runs: dict[RunId, Run] = field(default_factory=dict[RunId, Run])


class _JournalFile:
    """A run's journal in `folder`, with its copy: what gyre.proxy.journal_writer keeps, where no write ever fails."""

    def __init__(self, folder: Path, link: ReplicaLink | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = segment_path(folder, 0)
        self._link = link
        self._write(b"" if self._path.exists() else SEGMENT_HEADER)

    def append(self, entry: JournalRecord) -> None:
        self._write(encode(entry))

    async def sync(self) -> None:
        """Until the peer has it, if it is to be waited for."""
        if self._link is not None:
            await self._link.caught_up()

    def _write(self, data: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(data)
            size = file.tell()
        if self._link is not None:
            self._link.wrote(0, size)


@dataclass(eq=False)
class _Work:
    """A call that is sampled, for those who wait for its answer."""

    task: asyncio.Task[None]
    waiters: int = 0


class Gateway(Served):
    def __init__(self, machine: Machine, child: Child, spec: ChildSpec) -> None:
        super().__init__(machine, child)
        config = json.loads(spec.argv[-1])
        self._journal_dir, trajectories = Path(config["journal_dir"]), Path(config["trajectories_dir"])
        copies = None if config["copies_dir"] is None else Path(config["copies_dir"])
        self.runs = machine.journal.runs
        self.closed = ClosedRuns(trajectories)
        self.copies = CopiedJournals(NodeId(config["node"]), self._journal_dir, trajectories, copies)
        self.engines = Engines(WAIT_S, self._client)
        self._journals: dict[RunId, _JournalFile] = {}
        self._work: dict[tuple[RunId, int, int], _Work] = {}
        self._routing = asyncio.Lock()
        self._turns: dict[RunId, asyncio.Lock] = {}
        self.sampled = 0
        self.calls = 0

    async def run(self) -> None:
        await super().run()
        for run in self.runs.values():
            run.closing = False
            if run.closed is None:
                self._open_journal(run)
        if any(run.closed is None and len(run.sampled) > len(run.answered) for run in self.runs.values()):
            self.engines.inherit()

    def _way(self, address: str) -> SimRef:
        return self.world.child_ref(self.child.process, self.machine.name, address)

    def _client(self, url: str) -> EngineClient:
        return EngineClient(self.world, self.child.process, self.machine.name, url)

    async def answer(self, message: object) -> object:
        match message:
            case Ping():
                return Ok()
            case SetRoutes():
                async with self._routing:
                    await self.engines.set_routes(message)
                return Ok()
            case DrainEngine():
                await self.world.stage("drain", message.cell)
                if self.engines.accepts(message.cell):
                    raise Refused(f"{message.cell} has opened again")
                report = await Departure(self.engines, lambda *_: ()).carry_out(message)
                return replace(report, stop_s=0.0, move_s=0.0)
            case OpenRun():
                async with self._turns.setdefault(message.run, asyncio.Lock()):
                    return await self._open(message)
            case CloseRun():
                async with self._turns.setdefault(message.run, asyncio.Lock()):
                    return await self._close(message)
            case GetLineages():
                return Lineages(self.closed.lineages(message.run, message.attempt, message.indices))
            case CopyTo():
                place = message.place
                self.copies.copy_to(message, None if place is None else self._way(place.address))
                return Ok()
            case GetCopies():
                return self.copies.status()
            case TakeOver():
                return await self.copies.take_over(message)
            case AskHeld() | CopyJournal():
                return await self.copies.hold(message)
            case PutAway():
                answer = await self.copies.hold(message)
                self.world.watch.copied(self.machine.name, message)
                return answer
            case GetGatewayStatus():
                return GatewayStatus(
                    base_url=f"http://{self.machine.name}",
                    open_runs=sum(run.closed is None for run in self.runs.values()),
                    calls_in_flight=len(self._work),
                    calls_waiting=self.engines.waiting,
                    in_flight=self.engines.in_flight(),
                    calls=self.calls,
                    sampled_tokens=self.sampled,
                    max_silence_s=0.0,
                    prefix_tokens_recomputed=0,
                    failed_runs={},
                )
            case ("call", str(run), str(key), int(number)):
                return await self._call(RunId(run), key, number)
            case _:
                raise AssertionError(message)

    # ---------------------------------------------------------------------------------- runs

    async def _open(self, order: OpenRun) -> Ok:
        known = self.runs.get(order.run)
        if known is not None:
            if order.attempt < known.order.attempt or (order.attempt == known.order.attempt and known.closed):
                raise Refused(f"attempt {order.attempt} of {order.run} is over")
            if order.attempt == known.order.attempt:
                known.order = order
                return Ok()
        if known is not None:
            await self._discard(known)
        run = self.runs[order.run] = Run(order)
        self._open_journal(run).append(RunOpened(order.run, order.group, order.attempt, order.key, "sim", 1.0, 0))
        await self._journals[order.run].sync()
        return Ok()

    def _open_journal(self, run: Run) -> _JournalFile:
        link = self.copies.link(run.attempt)
        folder = open_folder(self._journal_dir, run.order.run, run.order.attempt)
        journal = self._journals[run.order.run] = _JournalFile(folder, link)
        return journal

    async def _discard(self, run: Run) -> None:
        """A higher attempt begins."""
        await self._end(run)
        if run.closed is None:
            self._put_away(run, "a later attempt began")
        self.copies.forget(run.attempt)

    async def _close(self, message: CloseRun) -> RunTrace:
        run = self.runs.get(message.run)
        if run is None or message.attempt != run.order.attempt:
            raise Refused(f"attempt {message.attempt} of {message.run} is not known")
        if run.closed is None:
            run.closing = True
            await self._end(run)
            trace, lineages = run.trace(), run.lineages()
            self.world.watch.left(message.run, message.attempt, lineages)
            self.closed.write(ClosedRun(trace, lineages))
            self._put_away(run, "")
            run.closed = trace
        await self.copies.closed(run.attempt)
        if (replication := self.copies._replication) is not None:
            link = replication._links.get(run.attempt)
            if link is not None and link._whole:
                self.world.watch.confirmed(run.attempt, replication.me, replication.node)
        return run.closed

    def _put_away(self, run: Run, failure: str) -> None:
        """Its journal is over."""
        name, attempt = run.order.run, run.order.attempt
        self._journals.pop(name).append(RunClosed(name, attempt, failure))
        target = closed_folder(self._journal_dir, name, attempt)
        target.parent.mkdir(exist_ok=True)
        open_folder(self._journal_dir, name, attempt).rename(target)

    async def _end(self, run: Run) -> None:
        """Return when no engine samples for it that answers."""
        attempt = (run.order.run, run.order.attempt)
        tasks = [work.task for at, work in self._work.items() if at[:2] == attempt]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------------------------- calls

    async def _call(self, name: RunId, key: str, number: int) -> Ok:
        """Whoever asks for the same call waits for the same answer; the last to stop waiting stops the sampling."""
        run = self.runs.get(name)
        if run is None or run.order.key != key or run.closing:
            raise Refused(f"{name} is not let in with that key")
        if number in run.answered:
            return Ok()
        at = (name, run.order.attempt, number)
        work = self._work.get(at)
        while work is not None and work.task.cancelling():
            await asyncio.wait([work.task])
            work = self._work.get(at)
        if work is None:
            work = self._work[at] = _Work(asyncio.get_running_loop().create_task(self._sampled(run, number)))
            work.task.add_done_callback(lambda _: self._work.pop(at))
        work.waiters += 1
        try:
            await asyncio.wait([work.task])
        finally:
            work.waiters -= 1
            if not work.waiters and not work.task.done() and not work.task.cancelling():
                work.task.cancel()
        if run.closing or self.runs.get(name) is not run:
            raise Refused(f"{name} was closed")
        if not work.task.cancelled() and (error := work.task.exception()) is not None:
            raise error
        if number not in run.answered:
            raise Unavailable(f"call {number} of {name} was not answered")
        return Ok()

    async def _sampled(self, run: Run, number: int) -> None:
        journal = self._journals[run.order.run]
        if number not in run.ended:
            await self._sample(run, number, journal)
            run.ended.add(number)
        await journal.sync()
        run.answered.add(number)

    async def _sample(self, run: Run, number: int, journal: _JournalFile) -> None:
        parts = run.sampled.setdefault(number, [])
        call = CallId(f"{run.order.run}/{run.order.attempt}/{number}")

        def recorded(part: Stretch) -> None:
            parts.append(part)
            journal.append(
                CallSampled(call, part.token_ids.tobytes(), part.logprobs.tobytes(), part.versions.tobytes())
            )

        generation = Generation(
            call=call,
            run=run.order.run,
            group=run.order.group,
            prompt=lambda: PROMPT,
            prompt_tokens=LINEAGE_TOKENS,
            prompt_text=PROMPT_TEXT,
            sampling=SAMPLING,
            engines=self.engines,
            decode=lambda _: "",
            block_tokens=BLOCK_TOKENS,
            cached=None,
            marks=(),
            so_far=run.so_far(number),
            recorded=recorded,
        )
        try:
            await generation.sample(WAIT_S)
        except Fault as fault:
            raise Unavailable(str(fault)) from fault
        self.calls += 1
        self.sampled += len(generation.output)
