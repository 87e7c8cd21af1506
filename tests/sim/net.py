"""The simulated network, and references that send over it with what gyre.actors.remote promises.

A message arrives at most once, messages of one reference in order. An ask ends with an answer, at its deadline, or
with Unavailable when the connection breaks or the peer dies; whether it was handled is then unknown. While two places
are cut off, what is sent waits, as TCP has it, and arrives when they are together again. A stream is one connection: its ends
learn of each other's end by what comes over it, or by themselves when nothing does for long.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from gyre.actors.supervision import ActorFailed
from gyre.engine.unheard import UNHEARD_S
from gyre.errors import BadInput, GyreError, Unavailable

from .loop import Process, SimLoop

R = TypeVar("R")

NEAR_S = 0.0008
FAR_S = 0.004


@dataclass(frozen=True)
class Target:
    """Whom a reference leads to at the moment: a living process at a place, and how it takes messages."""

    place: str
    process: Process
    serve: Callable[[object, float], Awaitable[object]]
    tell: Callable[[object], None]


@dataclass
class _Asked:
    places: tuple[str, str]
    process: Process
    answer: asyncio.Future[object]
    source: Process
    serving: asyncio.Task[None] | None = None


class Stream:
    """One connection: what is asked goes there, what is answered comes back piece by piece.

    `heard` is called at the near end with each piece, or with Unavailable when it is lost; `closed` at the far end when
    that has learnt that the near one is gone.
    """

    def __init__(
        self,
        net: Network,
        near: tuple[str, Process],
        far: tuple[str, Process],
        heard: Callable[[object], None],
        closed: Callable[[], None],
    ) -> None:
        self._net = net
        self.near_place, self.near = near
        self.far_place, self.far = far
        self._heard = heard
        self._closed = closed
        net.streams[self] = None
        self.over = False
        """At the near end: nothing is heard any more, and what has not arrived will not."""

    def ask(self, deliver: Callable[[], object]) -> None:
        self._there(lambda: self.over or deliver())

    def answer(self, piece: object) -> None:
        self._back(lambda: self.over or self._heard(piece))

    def close(self) -> None:
        """By the near end."""
        if not self.over:
            self.over = True
            self._there(self.hang_up)

    def lose(self) -> None:
        """The near end learns that it is over."""
        if not self.over:
            self._heard(Unavailable("the connection is lost"))
            self.close()

    def died(self) -> None:
        """The far end's process is gone; its machine says so."""
        self._net.streams.pop(self, None)
        self._back(self.lose)

    def hang_up(self) -> None:
        """The far end learns that it is over."""
        if self._net.streams.pop(self, self) is None:
            self._closed()

    def _there(self, deliver: Callable[[], object]) -> None:
        self._net.post((self, True), self.near_place, self.far_place, self.far, deliver)

    def _back(self, deliver: Callable[[], object]) -> None:
        self._net.post((self, False), self.far_place, self.near_place, self.near, deliver)


class Network:
    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self._rng = rng
        self._cut: dict[tuple[str, str], float] = {}
        self._cut_since_s: dict[tuple[str, str], float] = {}
        self._slow: dict[tuple[str, str], tuple[float, float]] = {}
        self._last_s: dict[tuple[object, object], float] = {}
        self._asked: dict[int, _Asked] = {}
        self._number = 0
        self.streams: dict[Stream, None] = {}
        """Those whose far end is not over, in the order in which they were made."""
        self.repeated_until_s = 0.0

    # ------------------------------------------------------------------ how long it takes

    def cut(self, a: str, b: str, until_s: float) -> None:
        now_s = self.loop.time()
        if self.cut_until(a, b) <= now_s:
            self._cut_since_s[a, b] = now_s
        self._cut[a, b] = max(until_s, self.cut_until(a, b))
        if until_s - now_s > UNHEARD_S:
            self.loop.call_later(UNHEARD_S + 1.0, self._unheard, a, b)

    def _unheard(self, a: str, b: str) -> None:
        """Both ends of a connection on which nothing came through for so long think the other dead."""
        now_s = self.loop.time()
        if self.cut_until(a, b) > now_s >= self._cut_since_s[a, b] + UNHEARD_S:
            for stream in self._between(a, b):
                self.loop.call_soon(stream.lose, context=stream.near.context)
                self.loop.call_soon(stream.hang_up, context=stream.far.context)

    def _between(self, a: str, b: str) -> list[Stream]:
        return [stream for stream in self.streams if {stream.near_place, stream.far_place} == {a, b}]

    def apart_s(self, a: str, b: str) -> float:
        """For how long no connection between the two can be made."""
        return max(0.0, max(self.cut_until(a, b), self.cut_until(b, a)) - self.loop.time())

    def slow(self, a: str, b: str, until_s: float, extra_s: float) -> None:
        self._slow[a, b] = (until_s, extra_s)

    def cut_until(self, a: str, b: str) -> float:
        return self._cut.get((a, b), 0.0) if self._cut else 0.0

    def latency_s(self, a: str, b: str) -> float:
        low_s = NEAR_S if a == b else FAR_S
        taken_s = low_s * (0.5 + self._rng.random() * 2.0)
        if self._rng.random() < 0.02:
            taken_s += self._rng.random() * 0.3
        if self._slow:
            until_s, extra_s = self._slow.get((a, b), (0.0, 0.0))
            if self.loop.time() < until_s:
                taken_s += extra_s * self._rng.random()
        return taken_s

    def arrival_s(self, a: str, b: str) -> float:
        return max(self.loop.time(), self.cut_until(a, b)) + self.latency_s(a, b)

    # ------------------------------------------------------------------ messages

    def post(self, channel: tuple[object, object], a: str, b: str, to: Process, deliver: Callable[[], object]) -> None:
        """One message, behind those of its channel that went before."""
        at_s = max(self.arrival_s(a, b), self._last_s.get(channel, 0.0) + 1e-6)
        self._last_s[channel] = at_s
        self.loop.call_at(at_s, deliver, context=to.context)

    def expect(self, places: tuple[str, str], process: Process, source: Process) -> tuple[int, asyncio.Future[object]]:
        self._number += 1
        self._asked[self._number] = _Asked(places, process, self.loop.create_future(), source)
        return self._number, self._asked[self._number].answer

    def forget(self, number: int) -> None:
        self._asked.pop(number, None)

    def serving(self, number: int, task: asyncio.Task[None]) -> None:
        if number in self._asked:
            self._asked[number].serving = task

    @property
    def waiting(self) -> int:
        return len(self._asked)

    def died(self, process: Process) -> None:
        """What was asked of it gets no answer, and what it has asked is nobody's any more."""
        for number, asked in list(self._asked.items()):
            if asked.source is process:
                del self._asked[number]
            elif asked.process is process:
                self._refuse(asked, f"the connection to {process.name} broke before the answer")
        for stream in list(self.streams):
            if stream.near is process:
                stream.close()
            elif stream.far is process:
                stream.died()

    def break_links(self, a: str, b: str) -> None:
        """Every connection between two places ends; what was asked over it may or may not be carried out."""
        for asked in list(self._asked.values()):
            if set(asked.places) == {a, b}:
                self._refuse(asked, "the connection broke before the answer")
                if asked.serving is not None and self._rng.random() < 0.5:
                    asked.serving.cancel()
        for stream in self._between(a, b):
            self.loop.call_later(self.latency_s(a, b), stream.lose, context=stream.near.context)

    def _refuse(self, asked: _Asked, reason: str) -> None:
        def refuse() -> None:
            if not asked.answer.done():
                asked.answer.set_exception(Unavailable(reason))

        self.loop.call_later(self.latency_s(*asked.places), refuse, context=asked.source.context)

    def twice(self) -> bool:
        return self.loop.time() < self.repeated_until_s and self._rng.random() < 0.3


class SimRef:
    """A reference across the network. `find` says whom it leads to now; None: nobody listens there."""

    def __init__(
        self,
        net: Network,
        source: Process,
        place: str,
        name: str,
        find: Callable[[], Target | None],
        *,
        repeats: bool = False,
    ) -> None:
        self.name = name
        self._net = net
        self._source = source
        self._place = place
        self._find = find
        self._repeats = repeats
        """What is sent here may be repeated, so the network sometimes does."""

    def tell(self, message: object) -> None:
        target = self._find()
        if target is not None:
            channel = (self, target.process)
            self._net.post(channel, self._place, target.place, target.process, lambda: target.tell(message))

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R:
        target = self._find()
        if target is None or not target.process.alive:
            await asyncio.sleep(self._net.latency_s(self._place, self._place))
            raise Unavailable(f"{self.name} cannot be reached")
        number, answer = self._net.expect((self._place, target.place), target.process, self._source)
        copies = 2 if self._repeats and self._net.twice() else 1
        for _ in range(copies):
            self._net.post(
                (self, target.process),
                self._place,
                target.place,
                target.process,
                lambda: self._arrived(target, message, deadline_s, number, answer),
            )

        def give_up() -> None:
            if not answer.done():
                text = f"{self.name} did not answer {type(message).__name__} within {deadline_s:g} s"
                answer.set_exception(Unavailable(text))

        timer = self._net.loop.call_later(deadline_s, give_up)
        try:
            got = await answer
        finally:
            timer.cancel()
            self._net.forget(number)
        if not isinstance(got, reply):
            raise BadInput(f"the answer of {self.name}", got, f"a {reply.__name__} is expected")
        return got

    async def close(self) -> None:
        """There is no connection to end."""

    def _arrived(
        self, target: Target, message: object, left_s: float, number: int, answer: asyncio.Future[object]
    ) -> None:
        work = self._serve(target, message, left_s, answer)
        self._net.serving(number, self._net.loop.create_task(work, name=f"{self.name} serves {type(message).__name__}"))

    async def _serve(self, target: Target, message: object, left_s: float, answer: asyncio.Future[object]) -> None:
        error: GyreError | None = None
        result: object = None
        try:
            result = await target.serve(message, left_s)
        except GyreError as caught:
            error = caught
        except Exception as caught:
            self._net.loop.errors.append(f"{self.name}: {caught!r}")
            error = ActorFailed(f"{self.name}: {caught!r}")

        def arrive() -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self._net.post((target.process, self), target.place, self._place, self._source, arrive)
