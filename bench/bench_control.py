"""The light parts: gyred's import and size, the scheduler's plan for 1,000 cells, the actors' messages (DESIGN §9)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time

from row import Row

from gyre.actors.remote import connect, serve
from gyre.actors.runtime import Actor, ActorSystem, handles
from gyre.ids import CellId
from gyre.sched.policy import CellView, ClusterView, PolicyParams, decide
from gyre.store.records import Role
from gyre.wire import record

NAMES = ("gyred_import_s", "gyred_import_mb", "plan_1000_cells_ms", "local_tells_per_s", "remote_asks_per_s")

REPEATS = 5
TELLS = 50_000
ASKS = 5_000
ASKERS = 50


def rows() -> Iterable[Row]:
    seconds, megabytes = imported()
    yield Row("gyred_import_s", seconds, "s", "<= 0.5", seconds <= 0.5)
    yield Row("gyred_import_mb", megabytes, "MB", "<= 80", megabytes <= 80)
    plan_ms = median(plan_seconds() for _ in range(REPEATS)) * 1000
    yield Row("plan_1000_cells_ms", plan_ms, "ms", "<= 10", plan_ms <= 10)
    speed = TELLS / median(asyncio.run(tell_seconds()) for _ in range(REPEATS))
    yield Row("local_tells_per_s", speed, "1/s", ">= 50000", speed >= 50_000)
    speed = ASKS / median(asyncio.run(ask_seconds()) for _ in range(REPEATS))
    yield Row("remote_asks_per_s", speed, "1/s", ">= 5000", speed >= 5_000)


def imported() -> tuple[float, float]:
    """Seconds and resident megabytes of `import gyre.cli.gyred` in a fresh interpreter, the best of a few.

    Its bytecode is there, as on a machine that has started it before. VmHWM begins with the program; what getrusage
    tells begins with the process that started it.
    """
    program = (
        "import time; began = time.perf_counter(); import gyre.cli.gyred; took_s = time.perf_counter() - began; "
        "status = dict(line.split(':', 1) for line in open('/proc/self/status')); "
        "print(took_s, int(status['VmHWM'].split()[0]) / 1024)"
    )
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = folder
        runs = [
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, check=True, text=True, env=environment
            ).stdout.split()
            for _ in range(REPEATS)
        ]
    return min(float(seconds) for seconds, _ in runs), min(float(size) for _, size in runs)


def plan_seconds() -> float:
    cells = tuple(
        CellView(CellId(f"c{n}"), n == 0, Role.TRAIN if n % 3 == 0 else Role.ROLLOUT, Role.ROLLOUT, 48, n % 50)
        for n in range(1000)
    )
    view = ClusterView(
        cells, 9000, 20000, 4000, 4000 * 70_000, 0, False, False, 16_000, 1, 1440.0, 1440.0, 7e4, 4e4, 12.0
    )
    began = perf_counter()
    decide(view, PolicyParams())
    return perf_counter() - began


@record("bench.count")
@dataclass(frozen=True)
class Count:
    last: bool


class Counter(Actor):
    def __init__(self, done: asyncio.Event) -> None:
        self.done = done

    @handles(Count)
    async def count(self, message: Count) -> Count:
        if message.last:
            self.done.set()
        return message


async def tell_seconds() -> float:
    """Seconds of one core until an actor has handled `TELLS` messages."""
    async with ActorSystem.running("bench") as system:
        done = asyncio.Event()
        counter = system.spawn("counter", lambda: Counter(done), mailbox_messages=TELLS)
        began = process_time()
        for number in range(TELLS):
            counter.tell(Count(number == TELLS - 1))
        await done.wait()
        return process_time() - began


async def ask_seconds() -> float:
    """Seconds of one core, which both sides share, until `ASKS` asks over a Unix socket have their answers."""
    async with ActorSystem.running("bench") as system:
        counter = system.spawn("counter", lambda: Counter(asyncio.Event()))
        with tempfile.TemporaryDirectory() as folder:
            address = f"unix:{folder}/counter.sock"
            async with serve(counter, address, "bench"), connect(address, "bench") as remote:
                await remote.ready(10.0)

                async def ask() -> None:
                    for _ in range(ASKS // ASKERS):
                        await remote.ask(Count(False), 60.0, Count)

                began = process_time()
                await asyncio.gather(*(ask() for _ in range(ASKERS)))
                return process_time() - began
