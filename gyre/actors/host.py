"""The life of one actor: its message loop, restarts, watches and end. Used through gyre.actors.runtime.

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
from typing import TYPE_CHECKING, Any, TypeVar

from gyre.actors.inspection import ActorInfo
from gyre.actors.mailbox import Broken, Envelope, Mailbox
from gyre.actors.reference import LocalRef
from gyre.actors.supervision import ActorFailed, ActorStopped, Backoff, Died, Failure, Overflow
from gyre.actors.tally import Tally
from gyre.actors.watches import Watchers, Watches
from gyre.deadline import FOREVER_S, handling_until_s, outlive_request
from gyre.errors import BadInput, GyreError

if TYPE_CHECKING:
    from gyre.actors.runtime import Actor, ActorSystem, Ref

log = logging.getLogger(__name__)

T = TypeVar("T")

_TURN_MESSAGES = 100
"""Handled in a row before others on the event loop have their turn."""


class _Failing(Exception):
    """Carries the error of a handler, and which one it was, up to the host."""

    def __init__(self, during: str, error: BaseException) -> None:
        super().__init__(during)
        self.during = during
        self.error = error


class Host:
    """What stays the same through an actor's restarts: its name, mailbox, factory, figures and who watches it."""

    def __init__(
        self,
        system: ActorSystem,
        parent: Host | None,
        name: str,
        factory: Callable[[], Actor],
        restart: Backoff,
        mailbox_messages: int,
        overflow: Overflow,
    ) -> None:
        self.name = name
        self.ref = LocalRef(self)
        self.done = asyncio.Event()
        self.system = system
        self.loop = asyncio.get_running_loop()
        self._parent = parent
        self._factory = factory
        self._restart = restart
        self._mailbox = Mailbox(name, mailbox_messages, overflow)
        self._arrived = asyncio.Event()
        self._stopping = asyncio.Event()
        self._draining = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._children: dict[str, Host] = {}
        self._watched: Watches[Ref] = Watches()
        self._watchers = Watchers()
        self._actor: Actor | None = None
        self._state = "starting"
        self._end = "it was stopped"
        self._tally = Tally()
        self._turn = 0
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ from others

    def start(self) -> None:
        self._task = self.system.group.create_task(self._run(), name=self.name)

    def put(self, envelope: Envelope) -> None:
        """Raises ActorStopped or MailboxFull."""
        if self._draining or self._stopping.is_set() or self.done.is_set():
            raise ActorStopped(f"{self.name} {'has ended' if self.done.is_set() else 'is ending'}")
        self._mailbox.put(envelope)
        self._arrived.set()

    def put_own(self, item: Envelope | Broken) -> None:
        self._mailbox.put_own(item)
        self._arrived.set()

    def stop(self) -> None:
        self._stopping.set()
        self._arrived.set()

    def drain(self) -> None:
        self._draining = True
        self._arrived.set()

    def on_end(self, call: Callable[[str], None]) -> Callable[[], None]:
        """`call` gets the reason, once: when the actor ends for good, or now if it has. Returns what takes it back."""
        return self._watchers.add(call)

    def infos(self) -> list[ActorInfo]:
        """This actor and those under it."""
        state = "stopping" if self._stopping.is_set() else "draining" if self._draining else self._state
        tasks = len(self._tasks) - self._tally.beside
        timers = sum(not timer.cancelled() for timer in self._timers)
        own = self._tally.info(self.name, state, self._mailbox, tasks, timers, self.loop.time())
        return [own, *(info for child in self._children.values() for info in child.infos())]

    def cancel(self) -> None:
        """End at once all that is under way here and in the children; an end that has begun is cut short."""
        for child in self._children.values():
            child.cancel()
        for task in self._tasks:
            task.cancel()
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------------ from the actor

    def spawn(
        self, name: str, factory: Callable[[], Actor], restart: Backoff, mailbox_messages: int, overflow: Overflow
    ) -> LocalRef:
        return spawn_host(self.system, self, self._children, name, factory, restart, mailbox_messages, overflow)

    def watch(self, ref: Ref) -> None:
        assert self._actor is not None
        if Died not in self._actor._handlers:
            raise TypeError(f"{type(self._actor).__qualname__} watches {ref.name} and does not handle Died")

        self._watched.begin(ref, ref, lambda reason: self.put_own(self._to_itself(Died(ref.name, reason))))

    def unwatch(self, ref: Ref) -> None:
        self._watched.end(ref)

    def _to_itself(self, message: object) -> Envelope:
        return Envelope(message, None, FOREVER_S, self.loop.time())

    def after(self, s: float, message: object) -> asyncio.TimerHandle:
        def fire() -> None:
            self._timers.discard(timer)
            self.put_own(self._to_itself(message))

        timer = self.loop.call_later(s, fire)
        self._timers = {known for known in self._timers if not known.cancelled()} | {timer}
        return timer

    def work(
        self,
        work: Coroutine[Any, Any, T],
        on_done: Callable[[T], object | None] | None,
        on_error: Callable[[Exception], object | None] | None,
    ) -> asyncio.Task[None]:
        async def run() -> None:
            outlive_request()
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
                self.put_own(Broken(f"task {work.__qualname__}", error))
            except Exception as error:
                self.put_own(Broken(f"task {work.__qualname__}", error))
            else:
                if message is not None:
                    self.put_own(self._to_itself(message))

        task = self._own_task(run(), f"{self.name}: {work.__qualname__}")
        task.add_done_callback(lambda _: work.close())  # it may be cancelled before its first step
        return task

    def _own_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self.system.group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------------ the actor's life

    async def _run(self) -> None:
        outlive_request()  # it may be spawned while an ask is handled
        failed_at_s: deque[float] = deque()
        try:
            while (failing := await self._live()) is not None:
                now_s = self.loop.time()
                self._tally.failed(failing.during, failing.error)
                failed_at_s.append(now_s)
                while failed_at_s[0] < now_s - self._restart.window_s:
                    failed_at_s.popleft()
                delay_s = self._restart.delay_s(len(failed_at_s))
                self._report(failing, delay_s)
                if delay_s is None:
                    self._end = f"it gave up after failing in {failing.during}: {failing.error!r}"
                    self._escalate(failing)
                    return
                self._state = "waiting to start again"
                if await self._stopped_within(delay_s):
                    return
        finally:
            self._close()

    async def _live(self) -> _Failing | None:
        """One instance from start to end; None when it was asked to stop."""
        actor: Actor | None = None
        try:
            self._state = "starting"
            self._actor = actor = self._factory()
            actor._host = self
            self._tally.kind = type(actor).__qualname__
            self._mailbox.set_control(actor._control)
            await actor.pre_start()
            self._state = "running"
            while (item := await self._take()) is not None:
                if isinstance(item, Broken):
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

    async def _take(self) -> Envelope | Broken | None:
        self._turn += 1
        if self._turn % _TURN_MESSAGES == 0:
            await asyncio.sleep(0)
        while True:
            if self._stopping.is_set():
                return None
            data = self._tally.beside < self._mailbox.limit
            item = self._mailbox.take(data=data)
            if isinstance(item, Envelope) and self._is_late(item):
                self._mailbox.expired += 1
                continue
            if item is not None:
                return item
            if self._draining and data and self._tally.beside == 0:
                return None
            self._arrived.clear()
            await self._arrived.wait()

    def _is_late(self, envelope: Envelope) -> bool:
        answer = envelope.answer
        return answer is not None and (answer.done() or envelope.until_s <= self.loop.time())

    async def _handle(self, actor: Actor, envelope: Envelope) -> None:
        message, answer = envelope.message, envelope.answer
        method, concurrent = actor._handlers.get(type(message), (None, False))
        if method is None:
            refusal = BadInput(f"message to {self.name}", type(message).__name__, f"{_taken(actor)} are taken")
            if answer is None:
                log.error("%s", refusal)
            else:
                answer.set_exception(refusal)
        elif concurrent:
            self._tally.beside += 1
            task = self._own_task(self._beside(actor, method, envelope), f"{self.name}: {type(message).__name__}")
            task.add_done_callback(lambda _: self._ended_beside(envelope))
        else:
            tally = self._tally
            tally.in_hand, tally.in_hand_since_s = envelope, self.loop.time()
            await self._answer(actor, method, envelope)
            tally.in_hand = None

    async def _beside(self, actor: Actor, method: Callable[..., Awaitable[object]], envelope: Envelope) -> None:
        try:
            await self._answer(actor, method, envelope)
        except _Failing as failing:
            self.put_own(Broken(failing.during, failing.error))

    def _ended_beside(self, envelope: Envelope) -> None:
        self._tally.beside -= 1
        self._arrived.set()
        # Only when it was cancelled before its first step is there no answer yet.
        _refuse(envelope.answer, ActorStopped(f"{self.name} ended before it answered"))

    async def _answer(self, actor: Actor, method: Callable[..., Awaitable[object]], envelope: Envelope) -> None:
        during, answer = type(envelope.message).__name__, envelope.answer
        if answer is not None:
            handling_until_s.set(envelope.until_s)
        began_s = self.loop.time()
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
        finally:
            self._tally.took(self.loop.time() - began_s)
            if answer is not None:
                handling_until_s.set(FOREVER_S)

    async def _wind_up(self, actor: Actor | None) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._watched.end_all()
        children = [child.ref for child in self._children.values()]
        await asyncio.gather(*(child.drain() if self._draining else child.stop() for child in children))
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._mailbox.forget_own()
        self._actor = self._tally.in_hand = None
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
        for envelope in self._mailbox.empty():
            _refuse(envelope.answer, ActorStopped(f"{self.name} has ended"))
        siblings = self.system.roots if self._parent is None else self._parent._children
        siblings.pop(self.name.rpartition("/")[2], None)
        self.system.note_end(self._tally.totals(self._mailbox))
        self._watchers.ended(self._end)

    def _report(self, failing: _Failing, restart_in_s: float | None) -> None:
        error = failing.error
        trace = "".join(traceback.format_exception(error))
        self.system.report(Failure(self.name, failing.during, repr(error), trace, restart_in_s))

    def _escalate(self, failing: _Failing) -> None:
        failed = ActorFailed(f"{self.name} gave up after failing in {failing.during}: {failing.error!r}")
        failed.__cause__ = failing.error
        if self._parent is None:
            raise failed
        self._parent.put_own(Broken(f"child {self.name}", failed))


def spawn_host(
    system: ActorSystem,
    parent: Host | None,
    siblings: dict[str, Host],
    name: str,
    factory: Callable[[], Actor],
    restart: Backoff,
    mailbox_messages: int,
    overflow: Overflow,
) -> LocalRef:
    if name in siblings or "/" in name or not name:
        raise ValueError(f"actor name {name!r} must be free, not empty and without '/'")
    path = f"{system.name if parent is None else parent.name}/{name}"
    host = siblings[name] = Host(system, parent, path, factory, restart, mailbox_messages, overflow)
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
