"""The life of one actor: its reference, mailbox, message loop, restarts and end. Used through gyre.actors.runtime.

A host is what stays the same while instances of the actor come and go. What it promises is said in runtime.
"""

# An actor and its host are two halves of one thing.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gyre.actors.supervision import ActorFailed, ActorStopped, Backoff, Failure, MailboxFull
from gyre.errors import BadInput, GyreError, Unavailable

if TYPE_CHECKING:
    from gyre.actors.runtime import Actor, ActorSystem

log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")

_TURN_MESSAGES = 100
"""Handled in a row before others on the event loop have their turn."""


@dataclass(frozen=True, slots=True)
class _Envelope:
    message: object
    answer: asyncio.Future[object] | None
    """Where an asker waits; done when it has given up."""


@dataclass(frozen=True)
class _Broken:
    """What an owned task or a child reports instead of a message: the actor has failed."""

    during: str
    error: BaseException


class _Failing(Exception):
    """Carries the error of a handler, and which one it was, up to the host."""

    def __init__(self, during: str, error: BaseException) -> None:
        super().__init__(during)
        self.during = during
        self.error = error


class LocalRef:
    """The reference to an actor of this process. It stays good through restarts of the actor."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __repr__(self) -> str:
        return f"LocalRef({self.name!r})"

    @property
    def name(self) -> str:
        return self._host.name

    def tell(self, message: object) -> None:
        try:
            self._host.put(_Envelope(message, None))
        except ActorStopped:
            log.info("%s has ended; %s is dropped", self.name, type(message).__name__)

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._host.put(_Envelope(message, answer))
        try:
            async with asyncio.timeout(deadline_s):
                got = await answer
        except TimeoutError:
            raise Unavailable(f"{self.name} did not answer {type(message).__name__} within {deadline_s:g} s") from None
        if not isinstance(got, reply):
            raise BadInput(
                f"the answer of {self.name} to {type(message).__name__}", got, f"a {reply.__name__} is expected"
            )
        return got

    async def stop(self, deadline_s: float = 10.0) -> None:
        """End the actor for good after the message in hand, which is cancelled at the deadline."""
        self._host.stop()
        try:
            async with asyncio.timeout(deadline_s):
                await self._host.done.wait()
        except TimeoutError:
            log.warning("%s did not stop within %g s and is cancelled", self.name, deadline_s)
            self._host.cancel()
            await self._host.done.wait()

    async def stopped(self) -> None:
        """Until the actor has ended for good."""
        await self._host.done.wait()


class Host:
    """What stays the same through an actor's restarts: its name, mailbox, factory and children's records."""

    def __init__(
        self,
        system: ActorSystem,
        parent: Host | None,
        name: str,
        factory: Callable[[], Actor],
        restart: Backoff,
        mailbox_messages: int,
    ) -> None:
        self.name = name
        self.ref = LocalRef(self)
        self.done = asyncio.Event()
        self._system = system
        self._parent = parent
        self._factory = factory
        self._restart = restart
        self._limit = mailbox_messages
        self._messages: deque[_Envelope] = deque()
        self._own: deque[_Envelope | _Broken] = deque()
        self._arrived = asyncio.Event()
        self._stopping = asyncio.Event()
        self._timers: set[asyncio.TimerHandle] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._children: dict[str, Host] = {}
        self._concurrent = 0
        self._turn = 0
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ from others

    def start(self) -> None:
        self._task = self._system.group.create_task(self._run(), name=self.name)

    def put(self, envelope: _Envelope) -> None:
        if self.done.is_set() or self._stopping.is_set():
            raise ActorStopped(f"{self.name} has ended")
        if len(self._messages) >= self._limit:
            raise MailboxFull(f"{self.name} has {self._limit} messages waiting and takes no more")
        self._messages.append(envelope)
        self._arrived.set()

    def put_own(self, item: _Envelope | _Broken) -> None:
        self._own.append(item)
        self._arrived.set()

    def stop(self) -> None:
        self._stopping.set()
        self._arrived.set()

    def cancel(self) -> None:
        """End at once all that is under way here and in the children; an end that has begun is cut short."""
        for child in self._children.values():
            child.cancel()
        for task in self._tasks:
            task.cancel()
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------------ from the actor

    def spawn(self, name: str, factory: Callable[[], Actor], restart: Backoff, mailbox_messages: int) -> LocalRef:
        return spawn_host(self._system, self, self._children, name, factory, restart, mailbox_messages)

    def after(self, s: float, message: object) -> asyncio.TimerHandle:
        def fire() -> None:
            self._timers.discard(timer)
            self.put_own(_Envelope(message, None))

        timer = asyncio.get_running_loop().call_later(s, fire)
        self._timers = {known for known in self._timers if not known.cancelled()} | {timer}
        return timer

    def work(
        self,
        work: Coroutine[Any, Any, T],
        on_done: Callable[[T], object | None] | None,
        on_error: Callable[[Exception], object | None] | None,
    ) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                try:
                    result = await work
                except Exception as error:
                    if on_error is None:
                        raise
                    message = on_error(error)
                else:
                    message = None if on_done is None else on_done(result)
            except asyncio.CancelledError as error:
                if _being_cancelled():
                    raise
                self.put_own(_Broken(f"task {work.__qualname__}", error))
            except Exception as error:
                self.put_own(_Broken(f"task {work.__qualname__}", error))
            else:
                if message is not None:
                    self.put_own(_Envelope(message, None))

        task = self._own_task(run(), f"{self.name}: {work.__qualname__}")
        task.add_done_callback(lambda _: work.close())  # it may be cancelled before its first step
        return task

    def _own_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._system.group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------------ the actor's life

    async def _run(self) -> None:
        failed_at_s: deque[float] = deque()
        try:
            while (failing := await self._live()) is not None:
                now_s = asyncio.get_running_loop().time()
                failed_at_s.append(now_s)
                while failed_at_s[0] < now_s - self._restart.window_s:
                    failed_at_s.popleft()
                delay_s = self._restart.delay_s(len(failed_at_s))
                self._report(failing, delay_s)
                if delay_s is None:
                    self._escalate(failing)
                    return
                if await self._stopped_within(delay_s):
                    return
        finally:
            self._close()

    async def _live(self) -> _Failing | None:
        """One instance from start to end; None when it was asked to stop."""
        actor: Actor | None = None
        try:
            actor = self._factory()
            actor._host = self
            await actor.pre_start()
            while (item := await self._take()) is not None:
                if isinstance(item, _Broken):
                    raise _Failing(item.during, item.error)
                await self._handle(actor, item)
            return None
        except _Failing as failing:
            return failing
        except asyncio.CancelledError as error:
            if _being_cancelled():
                raise
            return _Failing("pre_start", error)
        except Exception as error:
            return _Failing("pre_start", error)
        finally:
            await self._wind_up(actor)

    async def _take(self) -> _Envelope | _Broken | None:
        self._turn += 1
        if self._turn % _TURN_MESSAGES == 0:
            await asyncio.sleep(0)
        while True:
            if self._stopping.is_set():
                return None
            if self._own:
                return self._own.popleft()
            if self._messages and self._concurrent < self._limit:
                return self._messages.popleft()
            self._arrived.clear()
            await self._arrived.wait()

    async def _handle(self, actor: Actor, envelope: _Envelope) -> None:
        message, answer = envelope.message, envelope.answer
        if answer is not None and answer.done():
            return
        method, concurrent = actor._handlers.get(type(message), (None, False))
        if method is None:
            refusal = BadInput(f"message to {self.name}", type(message).__name__, f"{_taken(actor)} are taken")
            if answer is None:
                log.error("%s", refusal)
            else:
                answer.set_exception(refusal)
        elif concurrent:
            self._concurrent += 1
            task = self._own_task(self._beside(actor, method, envelope), f"{self.name}: {type(message).__name__}")
            task.add_done_callback(lambda _: self._ended_beside(envelope))
        else:
            await self._answer(actor, method, envelope)

    async def _beside(self, actor: Actor, method: Callable[..., Awaitable[object]], envelope: _Envelope) -> None:
        try:
            await self._answer(actor, method, envelope)
        except _Failing as failing:
            self.put_own(_Broken(failing.during, failing.error))

    def _ended_beside(self, envelope: _Envelope) -> None:
        self._concurrent -= 1
        self._arrived.set()
        # Only when it was cancelled before its first step is there no answer yet.
        _refuse(envelope.answer, ActorStopped(f"{self.name} ended before it answered"))

    async def _answer(self, actor: Actor, method: Callable[..., Awaitable[object]], envelope: _Envelope) -> None:
        during, answer = type(envelope.message).__name__, envelope.answer
        try:
            result = await method(actor, envelope.message)
        except asyncio.CancelledError as error:
            _refuse(answer, ActorStopped(f"{self.name} ended before it answered {during}"))
            if _being_cancelled():
                raise
            raise _Failing(during, error) from error
        except GyreError as error:
            if answer is None:
                raise _Failing(during, error) from error
            _refuse(answer, error)
        except Exception as error:
            failed = ActorFailed(f"{self.name} failed in {during}: {error!r}")
            failed.__cause__ = error
            _refuse(answer, failed)
            raise _Failing(during, error) from error
        else:
            if answer is not None and not answer.done():
                answer.set_result(result)

    async def _wind_up(self, actor: Actor | None) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        await asyncio.gather(*(child.ref.stop() for child in list(self._children.values())))
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._own.clear()
        if actor is not None and hasattr(actor, "_host"):
            try:
                await actor.post_stop()
            except Exception as error:
                self._report(_Failing("post_stop", error), 0.0)

    async def _stopped_within(self, s: float) -> bool:
        try:
            async with asyncio.timeout(s):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    def _close(self) -> None:
        self.done.set()
        while self._messages:
            _refuse(self._messages.popleft().answer, ActorStopped(f"{self.name} has ended"))
        siblings = self._system.roots if self._parent is None else self._parent._children
        siblings.pop(self.name.rpartition("/")[2], None)

    def _report(self, failing: _Failing, restart_in_s: float | None) -> None:
        error = failing.error
        trace = "".join(traceback.format_exception(error))
        self._system.report(Failure(self.name, failing.during, repr(error), trace, restart_in_s))

    def _escalate(self, failing: _Failing) -> None:
        failed = ActorFailed(f"{self.name} gave up after failing in {failing.during}: {failing.error!r}")
        failed.__cause__ = failing.error
        if self._parent is None:
            raise failed
        self._parent.put_own(_Broken(f"child {self.name}", failed))


def spawn_host(
    system: ActorSystem,
    parent: Host | None,
    siblings: dict[str, Host],
    name: str,
    factory: Callable[[], Actor],
    restart: Backoff,
    mailbox_messages: int,
) -> LocalRef:
    if name in siblings or "/" in name or not name:
        raise ValueError(f"actor name {name!r} must be free, not empty and without '/'")
    path = f"{system.name if parent is None else parent.name}/{name}"
    host = siblings[name] = Host(system, parent, path, factory, restart, mailbox_messages)
    host.start()
    return host.ref


def _being_cancelled() -> bool:
    """Whether a CancelledError is meant for the running task, and does not come out of something it awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _refuse(answer: asyncio.Future[object] | None, error: Exception) -> None:
    if answer is not None and not answer.done():
        answer.set_exception(error)


def _taken(actor: Actor) -> str:
    return ", ".join(sorted(message.__name__ for message in actor._handlers)) or "no messages"
