"""The actor runtime: a mailbox, a reference, supervision, timers and owned tasks.

    class Greeter(Actor):
        def __init__(self, greeting: str) -> None:
            self.greeting = greeting
            self.greeted = 0

        async def pre_start(self) -> None:
            self.after(60, ForgetCount())  # to itself; a timer ends with the actor

        @handles(Greet)
        async def greet(self, message: Greet) -> Greeting:
            self.greeted += 1
            return Greeting(f"{self.greeting}, {message.name}")

        @handles(ForgetCount)
        async def forget(self, _: ForgetCount) -> None:
            self.greeted = 0
            self.task(write_report(), on_done=lambda path: ReportWritten(path))  # long work; its result is a message

        @handles(WaitForDawn, concurrent=True)
        async def wait_for_dawn(self, message: WaitForDawn) -> Ok:  # beside the other handlers
            await dawn(message.day)
            return Ok()

    async with ActorSystem.running("example") as system:
        greeter = system.spawn("greeter", lambda: Greeter("hello"), restart=Backoff(initial_s=0.1))
        greeter.tell(ForgetCount())
        answer = await greeter.ask(Greet("Ada"), 5.0, Greeting)

What it promises:

- An actor takes one message at a time, in the order they came from each sender. Handlers marked `concurrent` run
  beside that, as tasks of the actor. What the actor sends itself (timers, results of tasks) goes first.
- A mailbox is bounded. A message that finds it full is not taken: tell and ask raise MailboxFull at once.
- An ask ends by its deadline. One whose asker has given up before its turn is not handled at all.
- A GyreError that a handler raises in an ask is the answer, raised again at the asker; the actor lives on.
  Any other error, and any error in a tell, a timer or an owned task, is a failure of the actor: it is reported with
  its trace, the actor's tasks, timers and children end, and after a back-off a fresh one from the same factory goes on
  with the same mailbox. The asker gets ActorFailed. Past the limit of restarts its parent fails, and at the top the
  system.
- Time is the event loop's, so the same code runs on a loop with virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Protocol, TypeVar, cast

from gyre.actors.host import Host, LocalRef, spawn_host
from gyre.actors.supervision import NEVER, ActorFailed, ActorStopped, Backoff, Failure, MailboxFull

__all__ = [
    "NEVER",
    "Actor",
    "ActorFailed",
    "ActorStopped",
    "ActorSystem",
    "Backoff",
    "Failure",
    "LocalRef",
    "MailboxFull",
    "Ref",
    "handles",
]

log = logging.getLogger(__name__)

S = TypeVar("S")
M = TypeVar("M")
R = TypeVar("R")
T = TypeVar("T")


class Ref(Protocol):
    """Where messages for one actor go, in this process (LocalRef) or another (gyre.actors.remote.RemoteRef)."""

    @property
    def name(self) -> str: ...

    def tell(self, message: object) -> None:
        """Send and forget; at most once. Raises MailboxFull."""
        ...

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R:
        """Send and wait for the answer, a `reply`.

        Raises Unavailable after `deadline_s`, MailboxFull, ActorStopped, ActorFailed, or the GyreError of the handler.
        """
        ...


def handles(
    message: type[M], *, concurrent: bool = False
) -> Callable[[Callable[[S, M], Awaitable[R]]], Callable[[S, M], Awaitable[R]]]:
    """Mark an `async def` method as the handler of one type of message. What it returns answers an ask."""

    def mark(method: Callable[[S, M], Awaitable[R]]) -> Callable[[S, M], Awaitable[R]]:
        vars(method)["__handles__"] = (message, concurrent)
        return method

    return mark


class Actor:
    """Subclass it, and mark a method for each type of message with `@handles`. Made by a factory given to `spawn`."""

    _handlers: ClassVar[dict[type[Any], tuple[Callable[..., Awaitable[object]], bool]]] = {}
    _host: Host

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own: dict[type[Any], tuple[Callable[..., Awaitable[object]], bool]] = {}
        for method in vars(cls).values():
            marked = getattr(method, "__handles__", None)
            if marked is not None:
                message, concurrent = cast(tuple[type[Any], bool], marked)
                if message in own:
                    raise TypeError(f"{cls.__qualname__} handles {message.__qualname__} twice")
                own[message] = (method, concurrent)
        cls._handlers = {**cls._handlers, **own}

    # ------------------------------------------------------------------ for the subclass to say

    async def pre_start(self) -> None:
        """Before the first message, of every fresh instance."""

    async def post_stop(self) -> None:
        """After the last message, also of an instance that failed. Its tasks, timers and children have ended."""

    # ------------------------------------------------------------------ for the subclass to use, from pre_start on

    @property
    def ref(self) -> LocalRef:
        return self._host.ref

    @property
    def name(self) -> str:
        return self._host.name

    @property
    def now_s(self) -> float:
        """The event loop's clock."""
        return asyncio.get_running_loop().time()

    def spawn(
        self, name: str, factory: Callable[[], Actor], *, restart: Backoff | None = None, mailbox_messages: int = 1000
    ) -> LocalRef:
        """Start a child. It ends with this instance; past its limit of restarts it fails this actor."""
        return self._host.spawn(name, factory, restart or Backoff(), mailbox_messages)

    def after(self, s: float, message: object) -> asyncio.TimerHandle:
        """Send `message` to this actor in `s` seconds. The handle's `cancel()` takes it back."""
        return self._host.after(s, message)

    def task(
        self,
        work: Coroutine[Any, Any, T],
        on_done: Callable[[T], object | None] | None = None,
        on_error: Callable[[Exception], object | None] | None = None,
    ) -> asyncio.Task[None]:
        """Run `work` beside the handlers. It is cancelled when the actor ends.

        What `on_done(result)` or `on_error(error)` returns is sent to this actor (None: nothing is).
        Without `on_error`, an error is a failure of the actor.
        """
        return self._host.work(work, on_done, on_error)

    def stop(self) -> None:
        """End this actor for good after the message in hand."""
        self._host.stop()


class ActorSystem:
    """All actors of one program; the tasks of all are in its task group."""

    def __init__(self, name: str, group: asyncio.TaskGroup, on_failure: Callable[[Failure], None] | None) -> None:
        self.name = name
        self.group = group
        self._on_failure = on_failure
        self.roots: dict[str, Host] = {}

    @classmethod
    @asynccontextmanager
    async def running(
        cls, name: str, *, on_failure: Callable[[Failure], None] | None = None, stop_s: float = 10.0
    ) -> AsyncGenerator[ActorSystem]:
        """At the end of the block all actors stop, last one first. ActorFailed ends the block when a root gives up.

        `on_failure` gets each report; it is logged in any case.
        """
        try:
            async with asyncio.TaskGroup() as group:
                system = cls(name, group, on_failure)
                try:
                    yield system
                finally:
                    for host in reversed(list(system.roots.values())):
                        await host.ref.stop(stop_s)
        except BaseExceptionGroup as errors:
            if len(errors.exceptions) == 1:
                raise errors.exceptions[0] from errors.exceptions[0].__cause__
            raise

    def spawn(
        self, name: str, factory: Callable[[], Actor], *, restart: Backoff | None = None, mailbox_messages: int = 1000
    ) -> LocalRef:
        """Start an actor at the top. Past its limit of restarts the system ends with ActorFailed."""
        return spawn_host(self, None, self.roots, name, factory, restart or Backoff(), mailbox_messages)

    def report(self, failure: Failure) -> None:
        after = "gives up" if failure.restart_in_s is None else f"starts again in {failure.restart_in_s:g} s"
        log.error("%s failed in %s and %s: %s\n%s", failure.actor, failure.during, after, failure.error, failure.trace)
        if self._on_failure is not None:
            self._on_failure(failure)
