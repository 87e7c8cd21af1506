"""A run while it is open: its session, its journal, and the calls that are being sampled for it.

Whoever asks for an answer waits here; equal requests wait for the same call. When the last one that waits goes away the
engine is told to stop, and the tokens so far are kept for the retry. A journal that cannot be written stops the run,
and only this run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from gyre.errors import StorageFull
from gyre.ids import CallId, CellId
from gyre.proxy.aside import LARGE_BYTES, Aside
from gyre.proxy.conversation import Conversation
from gyre.proxy.departure import Resting
from gyre.proxy.dialects.dialect import Dialect
from gyre.proxy.engines import Engines
from gyre.proxy.faults import Fault, FaultKind
from gyre.proxy.generation import Generation
from gyre.proxy.id_texts import IdTexts
from gyre.proxy.journal_writer import JournalWriter
from gyre.proxy.metering import Metering
from gyre.proxy.prefix_index import marks_of
from gyre.proxy.rendering import Rendering
from gyre.proxy.sampling import Cached, Sampling, Stretch
from gyre.proxy.session import Call, Session
from gyre.trajectory.journal import JournalRecord

_ENDS = 4
"""Of a run's threads, those that ended a call last: their prefixes are kept through a cell's leaving."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelRequest:
    """One request of the harness, parsed."""

    dialect: Dialect
    conversation: Conversation
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    """Names in lower case."""
    digest: bytes
    """By which a retry is recognised."""
    size_bytes: int


@dataclass(frozen=True)
class Limits:
    context_tokens: int
    block_tokens: int
    wait_s: float
    """The longest a call goes without a token before it is given up."""


@dataclass(eq=False)
class _Work:
    """A call that is being sampled, and those who wait for it."""

    call: Call
    generation: Generation
    began_s: float
    done: asyncio.Event = field(default_factory=asyncio.Event)
    fault: Fault | None = None
    waiters: int = 0
    task: asyncio.Task[None] | None = None


class LiveRun:
    def __init__(
        self,
        session: Session,
        journal: JournalWriter,
        engines: Engines,
        rendering: Rendering,
        limits: Limits,
        metering: Metering,
        aside: Aside,
    ) -> None:
        self.session = session
        self._metering = metering
        self._journal = journal
        self._engines = engines
        self._rendering = rendering
        self._limits = limits
        self._aside = aside
        self._work: dict[CallId, _Work] = {}
        self._texts = IdTexts(session.tree)
        self._turn = asyncio.Lock()
        """Of whoever changes the session: it may be worked on aside."""
        self._beginnings: set[asyncio.Task[Call]] = set()
        self._over = False

    # ------------------------------------------------------------------------------------------ answering

    async def begin(self, request: ModelRequest) -> Call:
        """The call that the request repeats, or a new one, in the journal. Raises Fault where there can be none."""
        if request.size_bytes < LARGE_BYTES:
            return await self._begun(request)
        # What goes on aside cannot be broken off, and is to be in the journal when it is done.
        beginning = asyncio.get_running_loop().create_task(self._begun(request))
        self._beginnings.add(beginning)
        beginning.add_done_callback(self._beginning_over)
        return await asyncio.shield(beginning)

    async def answer(self, call: Call) -> None:
        """Return when the call has ended and is on disk. Raises Fault where there will be no answer."""
        self._check_open()
        if call.answer is None:
            await self._sampled(call)
        try:
            await self._journal.sync()
        except StorageFull as error:
            raise self.stop(str(error)) from error

    async def delivered(self, call: Call) -> None:
        """The answer was written to the harness, whole."""
        async with self._turn:
            record = self.session.deliver(call.id)
            if record is not None and not self.session.failure:
                self._append([record])

    async def count_tokens(self, conversation: Conversation, size_bytes: int) -> int:
        """Tokens of the prompt that the conversation would have now."""
        async with self._turn:
            self._check_open()
            return await self._aside.run(size_bytes, lambda: self.session.count_tokens(conversation))

    # ------------------------------------------------------------------------------------------ ending

    def stop(self, reason: str) -> Fault:
        """Take no more calls, for `reason`, and end those that wait. Returns what they are told."""
        fault = Fault(FaultKind.CLOSED, f"the run was stopped: {reason}")
        if not self.session.failure:
            _log.error("run %s is stopped: %s", self.session.opened.run, reason)
            self.session.failure = reason
        self._end_waiting(fault)
        return fault

    async def end(self) -> None:
        """End all calls; returns when no engine samples for the run."""
        self._over = True
        await asyncio.gather(*self._beginnings, return_exceptions=True)
        self._end_waiting(Fault(FaultKind.CLOSED, "the run was closed"))
        tasks = [work.task for work in self._work.values() if work.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._work.clear()

    async def close_journal(self, last: JournalRecord | None = None) -> None:
        """Close the journal, with the run's last record where the run is over."""
        try:
            if last is not None:
                self._journal.append(last)
                await self._journal.sync()
        except StorageFull as error:
            _log.warning("run %s is closed, and its journal does not say so: %s", self.session.opened.run, error)
        finally:
            await self._journal.close()

    # ------------------------------------------------------------------------------------------ reading

    @property
    def calls_in_flight(self) -> int:
        return sum(1 for work in self._work.values() if work.task is not None and not work.task.done())

    def resting(self, cell: CellId, version: int) -> list[Resting]:
        """The prefixes on `cell` that the run's next requests will want, where no request holds them now."""
        if self.session.failure:
            return []
        found: list[Resting] = []
        for work in self._work.values():
            known = work.generation.cached
            if work.generation.at_rest and known is not None and (known.cell, known.version) == (cell, version):
                found.append(self._resting_work(work, known))
        continued = {work.call.base for work in self._work.values()}
        for call in self.session.ends()[:_ENDS]:
            known = call.cached
            if call.id not in continued and known is not None and (known.cell, known.version) == (cell, version):
                found.append(self._resting_end(call))
        return found

    def _resting_work(self, work: _Work, known: Cached) -> Resting:
        generation, call = work.generation, work.call

        def token_ids() -> array[int]:
            return generation.token_ids(known.tokens)

        def moved(now: Cached) -> None:
            generation.rests_at(known, now)
            if call.cached is known:  # it has ended meanwhile
                call.cached = now

        return Resting(generation.run, call.id, inf, token_ids, moved)

    def _resting_end(self, call: Call) -> Resting:
        def moved(now: Cached) -> None:
            call.cached = now

        def token_ids() -> array[int]:
            return self.session.tree.history_ids(call.id)

        return Resting(self.session.opened.run, call.id, call.answered_s, token_ids, moved)

    # ------------------------------------------------------------------------------------------ private

    def _check_open(self) -> None:
        if self.session.failure:
            raise Fault(FaultKind.CLOSED, f"the run was stopped: {self.session.failure}")
        if self._over:
            raise Fault(FaultKind.CLOSED, "the run was closed")

    async def _begun(self, request: ModelRequest) -> Call:
        async with self._turn:
            self._check_open()
            call = self.session.find(request.digest, request.headers)
            if call is None or not self.session.serves(call, request.conversation, self._limits.context_tokens):
                call, records = await self._aside.run(request.size_bytes, lambda: self._new_call(request))
                self._append(records)
            return call

    def _new_call(self, request: ModelRequest) -> tuple[Call, list[JournalRecord]]:
        return self.session.begin(
            request.conversation,
            request.body,
            request.digest,
            request.dialect,
            request.headers,
            self._limits.context_tokens,
            time.time(),
        )

    def _beginning_over(self, beginning: asyncio.Task[Call]) -> None:
        self._beginnings.discard(beginning)
        if not beginning.cancelled():
            beginning.exception()  # whoever asked may be gone

    async def _sampled(self, call: Call) -> None:
        """Wait until the call has ended; the last to stop waiting stops the sampling."""
        work = self._work.get(call.id)
        if work is None:
            work = self._work[call.id] = _Work(call, self._generation(call), time.monotonic())
        work.waiters += 1
        try:
            if work.task is not None and work.task.cancelling():
                await asyncio.wait([work.task])  # it was given up a moment ago: let it come to rest first
                self._check_open()
            if work.task is None or work.task.done():
                work.task = asyncio.get_running_loop().create_task(self._sample(work), name=f"sample {call.id}")
            await work.done.wait()
        finally:
            work.waiters -= 1
            if not work.waiters:
                _cancel(work)
        if work.fault is not None:
            raise work.fault

    async def _sample(self, work: _Work) -> None:
        """Owned by those who wait, and by `end`."""
        call = work.call
        try:
            await work.generation.sample(self._limits.wait_s)
            generation = work.generation
            async with self._turn:
                self._append([self.session.end(call, generation.ending())])
                call.answered_s = time.monotonic()
            self._texts.ended(call.id, call.base, generation.prompt_text, generation.output)
            self._metering.ended(
                call.dialect,
                generation.ending(),
                time.monotonic() - work.began_s,
                generation.prompt_tokens,
                len(generation.output),
            )
        except Fault as fault:
            work.fault = work.fault or fault
            if fault.kind is FaultKind.UNAVAILABLE:
                self._failed(work)
        except StorageFull as error:
            work.fault = self.stop(str(error))
        except Exception:
            _log.exception("call %s failed", call.id)
            work.fault = Fault(FaultKind.UNAVAILABLE, "the gateway failed on this call; its log says why")
            self._failed(work)
        self._work.pop(call.id, None)
        work.done.set()

    def _failed(self, work: _Work) -> None:
        self.session.fail(work.call, seen=work.waiters > 0)
        self._metering.failed(work.call.dialect)

    def _generation(self, call: Call) -> Generation:
        opened = self.session.opened
        tokens = len(call.suffix) + (0 if call.base is None else self.session.tree.end_tokens(call.base))
        return Generation(
            call=call.id,
            run=opened.run,
            group=opened.group,
            prompt=lambda: self.session.prompt_of(call),
            prompt_tokens=tokens,
            prompt_text=self._texts.prompt(call.base, call.suffix),
            sampling=Sampling(
                temperature=opened.temperature,
                max_tokens=call.max_tokens,
                stop_token_ids=self._rendering.stop_token_ids,
                stop=call.stop,
                seed=call.seed,
            ),
            engines=self._engines,
            decode=self._rendering.decode,
            block_tokens=self._limits.block_tokens,
            cached=self.session.known_before(call),
            marks=() if call.base is not None else marks_of(call.suffix),
            so_far=Stretch(call.output, call.logprobs, call.versions) if call.output else None,
            recorded=lambda stretch: self._journal.append(self.session.sampled(call, stretch)),
        )

    def _append(self, records: Iterable[JournalRecord]) -> None:
        try:
            for record in records:
                self._journal.append(record)
        except StorageFull as error:
            raise self.stop(str(error)) from error

    def _end_waiting(self, fault: Fault) -> None:
        for work in self._work.values():
            work.fault = work.fault or fault
            work.done.set()
            _cancel(work)


def _cancel(work: _Work) -> None:
    """Once, and from outside: a task that is coming to rest still tells its engine, and is let."""
    task = work.task
    if task is not None and not task.done() and not task.cancelling() and task is not asyncio.current_task():
        task.cancel()
