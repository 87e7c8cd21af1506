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

from gyre.engine.client import Chunk, EngineGone, EngineRefused, EngineUnreached, GenerateRequest, IdText
from gyre.errors import GyreError
from gyre.ids import CallId, GroupId, RunId
from gyre.kv_migrate.prefix import MoveReport
from gyre.proxy.conversation import Finish
from gyre.proxy.engines import Engines, Seat
from gyre.proxy.faults import Fault, FaultKind
from gyre.proxy.leftovers import LetGo, abort
from gyre.proxy.sampling import Cached, Ending, Sampling, Stretch
from gyre.proxy.stops import StopSearch

STOP_S = 5.0
"""The longest a stop waits for the engine's own end of the stream before the connection is dropped."""
STREAM_INTERVAL = 16
"""Tokens that an engine may send as one event. Nobody is shown a part of an answer, and reading an event costs the same
with one token as with sixteen; an engine that dies takes those along that it had not sent."""
_REPEAT_STOP_S = 0.25
_REFUSALS = 8
"""Refusals in a row without one new token after which a call is given up: the engine would go on to refuse."""
_PASSING = (409, 429, 503)
"""Statuses of an engine that is not ready, or not at this version, yet."""
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
        prompt_text: IdText,
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
        self.prompt_text = prompt_text
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
            self._add(so_far.token_ids, so_far.logprobs, so_far.versions)

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
            said = await abort(seat.client, self._rid)
            if said is LetGo.WITH_ITS_CONNECTION or loop.time() > give_up_s:
                self._lose_patience()
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPEAT_STOP_S):
                    await self._ended.wait()
        return departure

    def _lose_patience(self) -> None:
        """Wait for the engine no more, once."""
        patience, self._patience = self._patience, None
        if patience is not None:
            patience.reschedule(asyncio.get_running_loop().time())

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
            if self._engines.may_be_live(self._rid):
                self._depart(None)
                await self._engines.let_go(self._rid)
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
            if self._engines.is_open(seat) and not self._engines.may_be_live(self._rid):
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
            input_ids=self.prompt_text.grown(self.output),
            max_new_tokens=self._sampling.max_tokens - start,
            temperature=self._sampling.temperature,
            stop_token_ids=self._sampling.stop_token_ids,
            seed=self._sampling.seed,
            version=seat.version,
            # Past a stop sequence, which only the gateway sees, the engine is to sample as little as can be.
            stream_interval=1 if self._sampling.stop else STREAM_INTERVAL,
        )
        over = False
        """Whether the engine has said itself that it samples no more."""
        try:
            async with asyncio.timeout(None) as self._patience, aclosing(seat.client.generate(request)) as chunks:
                async for chunk in chunks:
                    self._take(chunk, seat.version)
                    if chunk.finish is not None:
                        over = True
                        self._close(chunk, seat, start)
                    elif self.finish is not None and await abort(seat.client, self._rid) is LetGo.WITH_ITS_CONNECTION:
                        break  # what it goes on to say is of no use
        except (EngineUnreached, EngineRefused):
            over = True
            raise
        except TimeoutError:
            _log.warning("call %s: cell %s did not say its end and was left", self.call, seat.cell)
        finally:
            self._patience = None
            try:
                if not over:
                    await self._engines.leave(seat, self._rid)
            finally:
                self._seat = None
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
        made_by = chunk.version if chunk.version >= 0 else version
        self._add(chunk.token_ids, chunk.logprobs, (made_by,) * len(chunk.token_ids))

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        kept = self._up_to_end(token_ids)
        self.output.extend(token_ids[:kept])
        self.logprobs.extend(logprobs[:kept])
        self.versions.extend(versions[:kept])

    def _up_to_end(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens are the answer's, which may end with one of them."""
        room = self._sampling.max_tokens - len(self.output)
        for count, token in enumerate(token_ids, 1):
            if token in self._sampling.stop_token_ids:
                self.finish = Finish.STOP
            elif (stop := self._stops.push(token)) is not None:
                self.finish, self.stop_sequence = Finish.STOP_SEQUENCE, stop
            elif count == room:
                self.finish = Finish.LENGTH
            else:
                continue
            return count
        return len(token_ids)

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
