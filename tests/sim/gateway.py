"""The gateway: the product's engines, seats and generations, without the HTTP, the tokens' texts and the trees."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field, replace

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
from gyre.engine.records import IdText
from gyre.errors import Refused, Unavailable
from gyre.ids import CallId, RunId
from gyre.proxy.departure import Departure
from gyre.proxy.engines import Engines
from gyre.proxy.faults import Fault
from gyre.proxy.generation import Generation
from gyre.proxy.sampling import Sampling, Stretch
from gyre.trajectory.records import LineageInfo, LineageRole, RunTrace

from .engine import EngineClient
from .machine import Child, Machine, Served
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

    def trace(self) -> RunTrace:
        parts = [part for number in self.answered for part in self.sampled[number]]
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
    """What a gateway has written down: the next one begins with it."""

    runs: dict[RunId, Run] = field(default_factory=dict[RunId, Run])


@dataclass(eq=False)
class _Work:
    """A call that is sampled, for those who wait for its answer."""

    task: asyncio.Task[None]
    waiters: int = 0


class Gateway(Served):
    def __init__(self, machine: Machine, child: Child) -> None:
        super().__init__(machine, child)
        self.runs = machine.journal.runs
        self.engines = Engines(WAIT_S, self._client)
        self._work: dict[tuple[RunId, int, int], _Work] = {}
        self._routing = asyncio.Lock()
        self._closing = asyncio.Lock()
        self.sampled = 0
        self.calls = 0
        for run in self.runs.values():
            run.closing = False
        if any(run.closed is None and len(run.sampled) > len(run.answered) for run in self.runs.values()):
            self.engines.inherit()

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
                return await self._open(message)
            case CloseRun():
                async with self._closing:
                    return await self._close(message)
            case GetLineages():
                run = self.runs.get(message.run)
                if run is None or run.closed is None or run.order.attempt != message.attempt:
                    raise Refused(f"attempt {message.attempt} of {message.run} is not closed here")
                return Lineages(())
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
        self.runs[order.run] = Run(order)
        if known is not None:
            await self._end(known)
        return Ok()

    async def _close(self, message: CloseRun) -> RunTrace:
        run = self.runs.get(message.run)
        if run is None or message.attempt != run.order.attempt:
            raise Refused(f"attempt {message.attempt} of {message.run} is not known")
        if run.closed is None:
            run.closing = True
            await self._end(run)
            run.closed = run.trace()
        return run.closed

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
        parts = run.sampled.setdefault(number, [])
        generation = Generation(
            call=CallId(f"{run.order.run}/{run.order.attempt}/{number}"),
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
            recorded=parts.append,
        )
        try:
            await generation.sample(WAIT_S)
        except Fault as fault:
            raise Unavailable(str(fault)) from fault
        run.answered.add(number)
        self.calls += 1
        self.sampled += len(generation.output)
