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
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

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
    held: list[asyncio.Handle] = field(default_factory=list[asyncio.Handle])
    on_death: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def __post_init__(self) -> None:
        self.context.run(_process.set, self)


def current_process() -> Process:
    return _process.get()


class _Task(asyncio.Task[Any]):
    """Hashed by its number: a set of tasks has the same order in every replay."""

    def __init__(self, number: int, coro: Any, **rest: Any) -> None:
        self.number = number
        super().__init__(coro, **rest)

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.AbstractEventLoop):
    def __init__(self) -> None:
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count(1)
        self._tasks: list[_Task] = []
        self._kept = 256
        self.errors: list[str] = []
        """What no task and no handler has caught."""
        self.turns = 0

    # ------------------------------------------------------------------ what asyncio asks of a loop

    def time(self) -> float:
        return self._now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

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

    def get_debug(self) -> bool:
        return False

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
        return sum(not handle.cancelled() for _, _, handle in self._timers)

    def start(self, process: Process, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        return self.create_task(work, name=name, context=process.context)

    def run(self, main: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run `main` to its end, in a process of its own. Raises Stuck."""
        events._set_running_loop(self)
        try:
            task = self.start(Process("world"), main, "world")
            ready, timers = self._ready, self._timers
            while not task.done():
                while ready:
                    self._turn(ready.popleft())
                if not timers or self._now_s > limit_s:
                    if not task.done():
                        raise Stuck(f"it has not ended after {self._now_s:.1f} s")
                    break
                when_s, _, handle = heapq.heappop(timers)
                if not handle._cancelled:  # type: ignore[attr-defined]
                    self._now_s = max(self._now_s, when_s)
                    ready.append(handle)
            return task.result()
        finally:
            self._bury()
            events._set_running_loop(None)

    def _turn(self, handle: asyncio.Handle) -> None:
        if handle._cancelled:  # type: ignore[attr-defined]
            return
        process = handle._context.get(_process)  # type: ignore[attr-defined]
        if process is not None:
            if not process.alive:
                return
            if process.stopped:
                process.held.append(handle)
                return
        self.turns += 1
        handle._run()

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
