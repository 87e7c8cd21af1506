"""An event loop with virtual time, on which several processes live: each can be stopped, continued and killed.

Time stands still while anything is ready to run, and jumps to the next timer when nothing is. What runs knows its
process by a context variable, which tasks, callbacks and timers inherit. So SIGSTOP is: its callbacks are held back;
and SIGKILL: they never run again, no `finally` of theirs either.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import getitem
from typing import Any, TypeVar

T = TypeVar("T")

_copy = contextvars.copy_context
_process: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class Stuck(Exception):
    """Nothing is ready to run and no timer is set, or the virtual deadline is over."""


@dataclass(eq=False)
class Process:
    """What can be stopped and killed by itself. `on_death` is called once, at its end."""

    name: str
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    alive: bool = True
    stopped: bool = False
    held: list[Handle] = field(default_factory=list["Handle"])
    on_death: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def __post_init__(self) -> None:
        self.context.run(_process.set, self)


def current_process() -> Process:
    return _process.get()


class Handle:
    """A callback that is to run, now or at a time: what asyncio's own handles are, without what nobody looks at here."""

    __slots__ = ("args", "callback", "context", "dropped", "when_s")

    def __init__(
        self, callback: Any, args: tuple[Any, ...], context: contextvars.Context | None, when_s: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = _copy() if context is None else context
        self.when_s = when_s
        self.dropped = False

    def cancel(self) -> None:
        self.dropped = True
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.dropped

    def when(self) -> float:
        return self.when_s


class _Task(asyncio.Task[Any]):
    """Hashed by its number: a set of tasks has the same order in every replay."""

    def __init__(self, number: int, coro: Any, **rest: Any) -> None:
        self.number = number
        super().__init__(coro, **rest)

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.AbstractEventLoop):
    def __init__(self) -> None:
        self._clock = [0.0]
        # What is called most is made of what runs without a line of Python.
        self.time = partial(getitem, self._clock, 0)
        self.create_future = partial(asyncio.Future, loop=self)
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = count(1)
        self._tasks: list[_Task] = []
        self._kept = 256
        self.errors: list[str] = []
        """What no task and no handler has caught."""
        self.turns = 0

    # ------------------------------------------------------------------ what asyncio asks of a loop

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = Handle(callback, args, context, 0.0)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self._clock[0] + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = Handle(callback, args, context, when)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        task = _Task(next(self._numbers), coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) > self._kept:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._kept = 2 * len(self._tasks) + 256
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """There are no threads: it is done here and now."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    get_debug = bool  # type: ignore[assignment]  # called without an argument: False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context.get('message')}: {error!r}")

    # ------------------------------------------------------------------ running

    @property
    def unfinished_tasks(self) -> int:
        return sum(not task.done() for task in self._tasks)

    @property
    def timers(self) -> int:
        return sum(not handle.dropped for _, _, handle in self._timers)

    def start(self, process: Process, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        return self.create_task(work, name=name, context=process.context)

    def run(self, main: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run `main` to its end, in a process of its own. Raises Stuck."""
        events._set_running_loop(self)
        try:
            task = self.start(Process("world"), main, "world")
            ready, timers, clock = self._ready, self._timers, self._clock
            while not task.done():
                while ready:
                    self._turn(ready.popleft())
                if not timers or clock[0] > limit_s:
                    if not task.done():
                        raise Stuck(f"it has not ended after {clock[0]:.1f} s")
                    break
                when_s, _, handle = heapq.heappop(timers)
                if not handle.dropped:
                    if when_s > clock[0]:
                        clock[0] = when_s
                    self._turn(handle)
            return task.result()
        finally:
            self._bury()
            events._set_running_loop(None)

    def _turn(self, handle: Handle) -> None:
        if handle.dropped:
            return
        process = handle.context.get(_process)
        if process is not None:
            if not process.alive:
                return
            if process.stopped:
                process.held.append(handle)
                return
        self.turns += 1
        try:
            handle.context.run(handle.callback, *handle.args)
        except Exception as error:
            self.errors.append(f"in {handle.callback}: {error!r}")

    def _bury(self) -> None:
        """What never ended is closed, so that nothing of it runs or complains later."""
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with suppress(BaseException):
                    task.get_coro().close()  # type: ignore[union-attr]
        self._tasks.clear()
        self._ready.clear()
        self._timers.clear()

    # ------------------------------------------------------------------ signals

    def kill(self, process: Process) -> None:
        if process.alive:
            process.alive = False
            process.held.clear()
            for told in process.on_death:
                told()

    def stop_process(self, process: Process) -> None:
        process.stopped = True

    def continue_process(self, process: Process) -> None:
        process.stopped = False
        self._ready.extend(process.held)
        process.held.clear()
