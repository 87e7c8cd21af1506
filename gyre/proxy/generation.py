"""One call's sampling, on one engine after another where it must be.

A generation holds the prompt and the tokens so far; each stretch on an engine adds to them. Stopped at a token boundary
(its cell leaves, the weights change, the engine dies) it goes on elsewhere as prompt + tokens so far, its KV moved
ahead where that is possible. To whoever waits for the answer that is only slower; how much slower is measured here.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress

from gyre.engine.client import Chunk, EngineClient, EngineGone, EngineRefused, GenerateRequest, IdText
from gyre.errors import GyreError
from gyre.ids import CallId, GroupId, RunId
from gyre.kv_migrate.prefix import MoveReport
from gyre.proxy.conversation import Finish
from gyre.proxy.engines import Engines, Seat
from gyre.proxy.faults import Fault, FaultKind
from gyre.proxy.id_texts import joined, text_of
from gyre.proxy.sampling import Cached, Ending, Sampling, Stretch
from gyre.proxy.stops import StopSearch

STOP_S = 5.0
"""The longest a stop waits for the engine's own end of the stream before the connection is dropped."""
_REPEAT_STOP_S = 0.25
_ABORT_S = 1.0
_REFUSALS = 8
"""Refusals in a row without one new token after which a call is given up: the engine would go on to refuse."""
_PASSING = (409, 429, 503)
"""Statuses of an engine that is not ready, or not at this version, yet."""
_UNKNOWN = (404, 405, 501)
"""Statuses of what stands for an engine and does not take this order."""
_log = logging.getLogger(__name__)


class Generation:
    """`prompt` gives the prompt's ids, which are seldom needed, and `prompt_text` is what `IdTexts` has of them. `cached` is
    where the call's base was computed, `marks` are those of a prompt whose beginning another run may have had,
    `block_tokens` is the engines' KV block.

    `so_far` is what was sampled before a gateway died. `recorded` is given each stretch as it ends; what it raises ends
    the generation.
    """

    def __init__(
        self,
        call: CallId,
        run: RunId,
        group: GroupId,
        prompt: Callable[[], array[int]],
        prompt_tokens: int,
        prompt_text: bytes,
        sampling: Sampling,
        engines: Engines,
        decode: Callable[[Sequence[int]], str],
        block_tokens: int,
        cached: Cached | None,
        marks: tuple[bytes, ...],
        so_far: Stretch | None,
        recorded: Callable[[Stretch], None],
    ) -> None:
        self.call = call
        self.run = run
        self.group = group
        self.asked = engines.next_asked()
        self.prompt_tokens = prompt_tokens
        self._prompt = prompt
        self._prompt_text = prompt_text
        self.output = array("i")
        self.logprobs = array("f")
        self.versions = array("i")
        self.finish: Finish | None = None
        self.stop_sequence = ""
        self.cached = cached
        self.marks = marks
        self.cached_tokens = 0
        """Of the prompt, on the first engine that computed it."""
        self.continued = False
        self.recomputed_tokens = 0
        self.max_silence_s = 0.0
        self._sampling = sampling
        self._engines = engines
        self._block_tokens = block_tokens
        self._recorded = recorded
        self._stops = StopSearch(decode, sampling.stop)
        self._attempts = 0
        self._rid = ""
        self._taken: Seat | None = None
        """From when it is ours; `_seat` from when the engine is asked."""
        self._seat: Seat | None = None
        self._rerouted = False
        """Whether its prefix was computed elsewhere or before, so that the engine should have it."""
        self._computed = False
        self._ended = asyncio.Event()
        self._patience: asyncio.Timeout | None = None
        self._stopping = False
        self._last_token_s = 0.0
        self._silent_since_s: float | None = None
        self._departures: list[asyncio.Future[MoveReport | None]] = []
        if so_far is not None:
            for token, logprob, version in zip(so_far.token_ids, so_far.logprobs, so_far.versions, strict=True):
                self._add(token, logprob, version)

    # ------------------------------------------------------------------------------------------ the whole call

    async def sample(self, wait_s: float) -> None:
        """Sample until the call has its finish. May be cancelled, and called again: it goes on where it was.

        Raises Fault(UNAVAILABLE) when for `wait_s` no engine gives one token.
        """
        loop = asyncio.get_running_loop()
        self._last_token_s, refusals = loop.time(), 0
        try:
            while self.finish is None:
                seat = await self._next_seat()
                before = len(self.output)
                trouble: GyreError | None = None
                try:
                    await self._stretch(seat)
                except (EngineGone, EngineRefused) as error:
                    trouble = error
                    _log.warning("call %s was left by the engine of cell %s: %s", self.call, seat.cell, error)
                    self._engines.suspect(seat.cell)
                    refusals += isinstance(error, EngineRefused) and error.status not in _PASSING
                if self.finish is None and not self._stopping:
                    self._silent_since_s = self._silent_since_s or self._last_token_s
                if len(self.output) > before:
                    refusals = 0
                elif refusals >= _REFUSALS or loop.time() - self._last_token_s > wait_s:
                    raise Fault(
                        FaultKind.UNAVAILABLE, f"no engine could answer this call ({trouble or 'all stopped it'})"
                    )
                elif self.finish is None:
                    await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self._silent_since_s = None  # nobody waits for the answer now
            raise
        finally:
            self._depart(None)

    def ending(self) -> Ending:
        """Of a generation that has its finish."""
        assert self.finish is not None
        return Ending(
            finish=self.finish,
            stop_sequence=self.stop_sequence,
            cached=self.cached,
            cached_tokens=self.cached_tokens,
            continued=self.continued,
            recomputed_tokens=self.recomputed_tokens,
            max_silence_s=self.max_silence_s,
        )

    async def stop(self) -> asyncio.Future[MoveReport | None]:
        """Stop at a token boundary, to go on elsewhere. Returns once the engine has stopped.

        The future's result comes when the call has been seated elsewhere and its KV has moved, or None as soon as
        there is nothing to move or nowhere to go.
        """
        loop = asyncio.get_running_loop()
        departure: asyncio.Future[MoveReport | None] = loop.create_future()
        self._departures.append(departure)
        seat = self._seat
        if seat is None:
            if self._taken is None:
                self._depart(None)
            return departure  # on its way to an engine it finds, once there, that this one leaves
        self._stopping = True
        self._silent_since_s = self._silent_since_s or loop.time()
        give_up_s = loop.time() + STOP_S
        while self._seat is seat:
            heard = await _abort(seat.client, self._rid)
            if (not heard or loop.time() > give_up_s) and self._patience is not None:
                self._patience.reschedule(loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPEAT_STOP_S):
                    await self._ended.wait()
        return departure

    # ------------------------------------------------------------------------------------------ one stretch

    @property
    def at_rest(self) -> bool:
        """Neither with an engine nor on its way to one: its prefix is nobody's to take along but a departure's."""
        return self._taken is None

    def token_ids(self, tokens: int) -> array[int]:
        """The first `tokens` of its prompt and of what was sampled so far."""
        return (self._prompt() + self.output)[:tokens]

    def rests_at(self, known: Cached, now: Cached) -> None:
        """Its prefix, that was where `known` says, has been moved, if nothing has happened to it meanwhile."""
        if self.cached is known:
            self.cached = now

    async def _next_seat(self) -> Seat:
        """A seat, and the KV of what was computed elsewhere moved there, whatever the reason for leaving."""
        while True:
            asked = self._engines.ask(self)
            if not asked.done():
                self._depart(None)
                self._silent_since_s = self._silent_since_s or asyncio.get_running_loop().time()
            seat = self._taken = await self._engines.seated(self, asked)
            try:
                report = await self._take_along(seat)
            except BaseException:
                self._give_back(seat)
                raise
            if self._engines.is_open(seat):
                self._depart(report)
                return seat
            self._give_back(seat)

    async def _take_along(self, seat: Seat) -> MoveReport | None:
        known = self.cached
        if known is None or known.version != seat.version:
            self._rerouted = False
            return None
        self._rerouted = self._rerouted or known.cell != seat.cell or len(self.output) > 0
        if known.cell == seat.cell:
            return None
        token_ids = self.token_ids(known.tokens)
        report = await self._engines.move(known.cell, seat.cell, token_ids, seat.version)
        if report is None:
            return None
        if report.reason:
            _log.warning("call %s goes on without all of its KV: %s", self.call, report.reason)
        else:
            self.cached = Cached(seat.cell, seat.version, known.tokens)
        return report

    def _give_back(self, seat: Seat) -> None:
        self._taken = None
        self._engines.release(seat)

    async def _stretch(self, seat: Seat) -> None:
        start = len(self.output)
        self._attempts += 1
        self.continued = self.continued or start > 0
        self._rid = f"{self.call}-{self._attempts}"
        self._seat = seat
        self._stopping = False
        self._ended.clear()
        request = GenerateRequest(
            rid=self._rid,
            input_ids=IdText(joined(self._prompt_text, text_of(self.output))),
            max_new_tokens=self._sampling.max_tokens - start,
            temperature=self._sampling.temperature,
            stop_token_ids=self._sampling.stop_token_ids,
            seed=self._sampling.seed,
            version=seat.version,
        )
        whole = False
        try:
            async with asyncio.timeout(None) as self._patience, aclosing(seat.client.generate(request)) as chunks:
                async for chunk in chunks:
                    self._take(chunk, seat.version)
                    if chunk.finish is not None:
                        whole = True
                        self._close(chunk, seat, start)
                    elif self.finish is not None and not await _abort(seat.client, self._rid):
                        break  # what it goes on to say is of no use; its connection's end ends it
        except TimeoutError:
            _log.warning("call %s: cell %s did not say its end and was left", self.call, seat.cell)
        finally:
            try:
                if not whole:
                    await _abort(seat.client, self._rid)
            finally:
                self._seat = self._patience = None
                self._ended.set()
                if len(self.output) > start:  # else it was stopped before its prompt was computed
                    self.cached = Cached(seat.cell, seat.version, self.prompt_tokens + len(self.output))
                    self._engines.computed(seat)
                self._give_back(seat)
                if len(self.output) > start:
                    self._recorded(Stretch(self.output[start:], self.logprobs[start:], self.versions[start:]))

    def _take(self, chunk: Chunk, version: int) -> None:
        """Add the chunk's tokens, up to the one that ends the answer."""
        if not chunk.token_ids or self.finish is not None:
            return
        self._last_token_s = asyncio.get_running_loop().time()
        if self._silent_since_s is not None and not self._stopping:
            self.max_silence_s = max(self.max_silence_s, self._last_token_s - self._silent_since_s)
            self._silent_since_s = None
        for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            self._add(token, logprob, chunk.version if chunk.version >= 0 else version)
            if self.finish is not None:
                return

    def _add(self, token: int, logprob: float, version: int) -> None:
        self.output.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self._sampling.stop_token_ids:
            self.finish = Finish.STOP
        elif (stop := self._stops.push(token)) is not None:
            self.finish, self.stop_sequence = Finish.STOP_SEQUENCE, stop
        elif len(self.output) >= self._sampling.max_tokens:
            self.finish = Finish.LENGTH

    def _close(self, chunk: Chunk, seat: Seat, start: int) -> None:
        """Take over what the engine says at its end: each token's version, its cache, and a finish of its own."""
        for span in chunk.version_spans:
            if span.version >= 0:
                for place in range(start + span.start, min(start + span.end, len(self.versions))):
                    self.versions[place] = span.version
        if len(self.output) > start:  # else it was stopped before its prompt was computed, or looked up
            if not self._computed:
                self._computed = True
                self.cached_tokens = min(chunk.cached_tokens, self.prompt_tokens)
            if self._rerouted and self.cached is not None:
                whole_blocks = (self.cached.tokens - 1) // self._block_tokens * self._block_tokens
                self.recomputed_tokens += max(0, whole_blocks - chunk.cached_tokens)
        assert chunk.finish is not None
        if self.finish is None and chunk.finish.kind != "abort":
            self.finish = Finish.STOP if chunk.finish.kind == "stop" else Finish.LENGTH

    def _depart(self, report: MoveReport | None) -> None:
        departures, self._departures = self._departures, []
        for departure in departures:
            if not departure.done():
                departure.set_result(report)


async def _abort(client: EngineClient, rid: str) -> bool:
    """Ask the engine to let go of a request; one that cannot be reached holds none.

    False when it does not know what is asked of it (a router does not): then only its connection's end ends the request.
    """
    try:
        async with asyncio.timeout(_ABORT_S):
            await client.abort(rid)
    except EngineRefused as error:
        return error.status not in _UNKNOWN
    except (GyreError, TimeoutError):
        pass
    return True
