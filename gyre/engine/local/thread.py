"""The thread that owns the core: it steps while there is work, and runs commands from a queue between two steps.

The event loop sends functions of the core and awaits their results; outputs come back to it in small batches. If a
step raises, `failed` is set: the process has to end, for its state is unknown.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from gyre.engine.local.core import EngineCore
from gyre.engine.local.requests import Output
from gyre.errors import Unavailable

T = TypeVar("T")

_EMIT_S = 0.004
"""Outputs are handed over at most this late: tokens of fast steps travel together, which halves the cost of sending."""
_BLOCKED_S = 0.005
"""The wait before the next try when all blocks are held by readers."""

_Command = tuple[Callable[[EngineCore], Any], asyncio.Future[Any]]


class EngineThread:
    """Start it on a running loop; `deliver` is called there with the outputs."""

    def __init__(self, core: EngineCore, deliver: Callable[[list[Output]], None]) -> None:
        self._core = core
        self._deliver = deliver
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def call(self, command: Callable[[EngineCore], T]) -> T:
        """Run `command` between two steps; its outputs are delivered before its result arrives."""
        if self._stopping:
            raise Unavailable("the engine is ending")
        done: asyncio.Future[Any] = self._loop.create_future()
        self._commands.put((command, done))
        return await done

    def send(self, command: Callable[[EngineCore], None]) -> None:
        """Run `command` between two steps; nobody waits for it."""
        done: asyncio.Future[Any] = self._loop.create_future()
        self._commands.put((command, done))

    async def stop(self) -> None:
        """End after the commands that are queued; later ones are refused."""
        self._stopping = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._post(self.failed.set_exception, error)

    def _work(self) -> None:
        emitted_s = time.monotonic()
        pending: list[Output] = []
        progressed = True
        while True:
            if not self._run_commands(pending, wait_s=self._wait_s(progressed, bool(pending))):
                return
            progressed = self._core.step()
            new = self._core.take_outputs()
            pending += new
            now_s = time.monotonic()
            urgent = not self._core.has_work or any(output.finish is not None for output in new)
            if pending and (urgent or now_s - emitted_s >= _EMIT_S):
                self._post(self._deliver, pending)
                pending, emitted_s = [], now_s

    def _wait_s(self, progressed: bool, has_outputs: bool) -> float | None:
        """How long to wait for a command: not at all while stepping, for ever while idle."""
        if not self._core.has_work:
            return 0.0 if has_outputs else None
        return 0.0 if progressed else _BLOCKED_S

    def _run_commands(self, pending: list[Output], wait_s: float | None) -> bool:
        """Run what is queued. False when the thread has to end."""
        while True:
            try:
                item = self._commands.get(timeout=wait_s) if wait_s != 0.0 else self._commands.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            command, done = item
            try:
                result = command(self._core)
            except Exception as error:
                self._post(_fail, done, error)
            else:
                pending += self._core.take_outputs()
                if pending:
                    self._post(self._deliver, list(pending))
                    pending.clear()
                self._post(_finish, done, result)
            wait_s = 0.0

    def _post(self, call: Callable[..., Any], *args: Any) -> None:
        # The loop may be closed already when the process ends; nobody waits for the result then.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)


def _finish(done: asyncio.Future[Any], result: Any) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
