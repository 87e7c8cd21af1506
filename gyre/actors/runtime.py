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
  beside that, as tasks of the actor. What the actor sends itself (timers, results of tasks, deaths) goes first, then
  messages whose handlers are marked `control`, then the rest.
- A mailbox is bounded. A message that finds it full is not taken: tell and ask raise MailboxFull at once. With
  `Overflow.DROP_OLDEST` the tell that has waited longest makes room for a new one.
- An ask ends by its deadline, and so does every ask made while it is handled. One whose asker has given up before its
  turn is not handled at all, and counted.
- `watch(ref)` brings `Died` when that actor has ended for good, or its process can no longer be reached.
- `stop` ends an actor after the message in hand; `drain` after all that it has taken.
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

from gyre.actors.host import Host, spawn_host
from gyre.actors.inspection import ActorList, ActorTotals, add
from gyre.actors.reference import LocalRef
from gyre.actors.supervision import (
    NEVER,
    ActorFailed,
    ActorStopped,
    Backoff,
    Died,
    Failure,
    MailboxFull,
    Overflow,
)

__all__ = [
    "NEVER",
    "Actor",
    "ActorFailed",
    "ActorStopped",
    "ActorSystem",
    "Backoff",
    "Died",
    "Failure",
    "LocalRef",
    "MailboxFull",
    "Overflow",
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

    def on_end(self, call: Callable[[str], None]) -> Callable[[], None]:
        """Have `call` told the reason, once, when the actor has ended or cannot be reached. Returns what takes it back."""
        ...


def handles(
    message: type[M], *, concurrent: bool = False, control: bool = False
) -> Callable[[Callable[[S, M], Awaitable[R]]], Callable[[S, M], Awaitable[R]]]:
    """Mark an `async def` method as the handler of one type of message. What it returns answers an ask.

    `concurrent`: beside other handlers. `control`: before other messages; such a handler is short, and not concurrent.
    """
    if concurrent and control:
        raise TypeError(f"the handler of {message.__qualname__} cannot be both concurrent and control")

    def mark(method: Callable[[S, M], Awaitable[R]]) -> Callable[[S, M], Awaitable[R]]:
        vars(method)["__handles__"] = (message, concurrent, control)
        return method

    return mark


class Actor:
    """Subclass it, and mark a method for each type of message with `@handles`. Made by a factory given to `spawn`."""

    _handlers: ClassVar[dict[type[Any], tuple[Callable[..., Awaitable[object]], bool]]] = {}
    _control: ClassVar[frozenset[type[Any]]] = frozenset()
    _host: Host

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own: dict[type[Any], tuple[Callable[..., Awaitable[object]], bool]] = {}
        own_control: set[type[Any]] = set()
        for method in vars(cls).values():
            marked = getattr(method, "__handles__", None)
            if marked is not None:
                message, concurrent, control = cast(tuple[type[Any], bool, bool], marked)
                if message in own:
                    raise TypeError(f"{cls.__qualname__} handles {message.__qualname__} twice")
                own[message] = (method, concurrent)
                if control:
                    own_control.add(message)
        cls._control = (cls._control - own.keys()) | own_control
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
        self,
        name: str,
        factory: Callable[[], Actor],
        *,
        restart: Backoff | None = None,
        mailbox_messages: int = 1000,
        overflow: Overflow = Overflow.REFUSE,
    ) -> LocalRef:
        """Start a child. It ends with this instance; past its limit of restarts it fails this actor."""
        return self._host.spawn(name, factory, restart or Backoff(), mailbox_messages, overflow)

    def watch(self, ref: Ref) -> None:
        """Be sent `Died`, which the class must handle, when the actor ends for good or cannot be reached.

        A watch ends with this instance, and with the death that it was for.
        """
        self._host.watch(ref)

    def unwatch(self, ref: Ref) -> None:
        """Take the watch back. A `Died` that is already on its way still comes."""
        self._host.unwatch(ref)

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
        self._ended: dict[str, ActorTotals] = {}

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
        self,
        name: str,
        factory: Callable[[], Actor],
        *,
        restart: Backoff | None = None,
        mailbox_messages: int = 1000,
        overflow: Overflow = Overflow.REFUSE,
    ) -> LocalRef:
        """Start an actor at the top. Past its limit of restarts the system ends with ActorFailed."""
        return spawn_host(self, None, self.roots, name, factory, restart or Backoff(), mailbox_messages, overflow)

    def actors(self) -> ActorList:
        """Every actor as it is now, parents before their children, and what ended ones have done."""
        infos = (info for host in self.roots.values() for info in host.infos())
        return ActorList(self.name, tuple(infos), tuple(self._ended.values()))

    def note_end(self, totals: ActorTotals) -> None:
        """From a host that has ended."""
        known = self._ended.get(totals.kind)
        self._ended[totals.kind] = totals if known is None else add(known, totals)

    def report(self, failure: Failure) -> None:
        after = "gives up" if failure.restart_in_s is None else f"starts again in {failure.restart_in_s:g} s"
        log.error("%s failed in %s and %s: %s\n%s", failure.actor, failure.during, after, failure.error, failure.trace)
        if self._on_failure is not None:
            self._on_failure(failure)
