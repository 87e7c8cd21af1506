"""The gateway actor: gyred's hold on the gateway process.

It starts the process, or adopts the one a killed gyred left; starts it again on the same port when it dies; and keeps it
told of the engines' routes and the open runs, which it knows whole and sends again after every restart. The cells tell
it their routes; a RouteChanged is answered when the proxy goes by it, so a cell that was told "not accepting" has no
new request coming.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gyre.actors.messages import (
    Authority,
    CloseRun,
    ClusterChanged,
    DrainEngine,
    DrainReport,
    EngineRoute,
    GatewayStatus,
    GetGatewayStatus,
    Ok,
    OpenRun,
    Ping,
    RouteChanged,
    SetRoutes,
)
from gyre.actors.messages_journals import Copies, CopyTo, GetCopies, Taken, TakeOver
from gyre.actors.remote import RemoteRef
from gyre.actors.runtime import Actor, handles
from gyre.actors.site import Site
from gyre.children import Child, ChildSpec
from gyre.errors import GyreError, Refused, Unavailable
from gyre.store.records import SnapshotRecord
from gyre.trajectory.records import RunTrace
from gyre.wire import record

T = TypeVar("T")

CHILD = "gateway"
START_S = 120.0
ASK_S = 30.0
TELL_S = 300.0
"""For what it must know to be told, the gateway's restart included."""
DRAIN_S = 120.0
CLOSE_S = 300.0
RETRY_S = 0.2
RESTART_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
START_TRIES = 5
BAD_INPUT = 2
"""The exit code of a process that was told something it cannot go by: a port in use, a model it cannot read."""


@record("gateway.died")
@dataclass(frozen=True)
class _Died:
    pid: int
    status: str


class GatewayActor(Actor):
    def __init__(self, site: Site) -> None:
        self._site = site
        self._remote: RemoteRef = site.connect(CHILD)
        self._child: Child | None = None
        self._up = asyncio.Event()
        self._deaths = 0
        """In a row, without one life between in which it answered."""
        self._version = -1
        self._telling = asyncio.Lock()
        self._told: tuple[EngineRoute, ...] = ()
        self._unsubscribe: Callable[[], None] = lambda: None

    async def pre_start(self) -> None:
        snapshot = await self._site.store.get(self._site.keys.snapshot, SnapshotRecord)
        assert snapshot is not None
        self._version = snapshot.record.version
        self._unsubscribe = self._site.directory.subscribe(lambda: self.ref.tell(ClusterChanged()))
        child = self._site.children.adopt().get(CHILD)
        if child is not None and child.alive:
            self._site.say(f"adopted the gateway (pid {child.pid})")
            self._follow(child)
        else:
            await self._start()

    async def post_stop(self) -> None:
        self._unsubscribe()
        await self._remote.close()

    # ------------------------------------------------------------------------------------------ the process

    async def _start(self) -> None:
        site, spec = self._site, self._site.spec
        config = {
            "host": spec.server.host,
            "port": spec.server.port,
            "journal_dir": str(site.job.journal),
            "trajectories_dir": str(site.job.trajectories),
            "model_dir": str(site.model_dir),
            "renderer": spec.model.renderer,
            "thinking": spec.model.thinking,
            "context_tokens": spec.model.context_tokens,
            "j_max": spec.batch.j_max,
            "request_bytes": spec.limits.request_bytes,
            "block_tokens": spec.cells.block_tokens,
            "resting_kv_mib_s": spec.cells.resting_kv_mib_s,
            "kv_silence_s": spec.cells.kv_silence_s,
            "fsync": spec.journal.fsync == "call",
            "copies_dir": str(site.job.copies) if site.has_copies else None,
            "node": site.node,
            "far": site.far(CHILD),
        }
        argv = (
            sys.executable,
            "-m",
            "gyre.actors.gateway_process",
            site.child_address(CHILD),
            str(site.job.secret_file),
            json.dumps(config),
        )
        self._follow(await site.children.start(ChildSpec(CHILD, argv, log=site.job.logs / "gateway.log")))

    def _follow(self, child: Child) -> None:
        """Hear of its end, and tell it what it must know as soon as it answers."""
        self._child = child
        self.task(child.wait(), lambda status: _Died(child.pid, str(status)))
        self.task(self._introduce(child))

    async def _introduce(self, child: Child) -> None:
        """Until it answers, then tell it all it must know. One that does not answer is ended: its end is heard of."""
        try:
            async with asyncio.timeout(START_S):
                while True:
                    try:
                        await self._remote.ask(Ping(), ASK_S, Ok)
                        break
                    except Unavailable:
                        if not child.alive:
                            return
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            self._site.say(f"the gateway (pid {child.pid}) did not answer within {START_S:g} s; it is ended")
            child.signal(9)
            return
        self._deaths = 0
        self._up.set()
        try:
            if self._site.routes:  # else it goes by what it was told by an earlier gyred until the cells have spoken
                await self._tell_routes(ASK_S)
            if self._site.copy_to is not None:
                await self._remote.ask(self._site.copy_to, ASK_S, Ok)
            for run in list(self._site.open_runs.values()):
                await self._let_in(run)
        except Unavailable:  # it has died again, which is heard of
            return

    async def _let_in(self, run: OpenRun) -> None:
        try:
            await self._remote.ask(run, ASK_S, Ok)
        except Unavailable:
            raise
        except GyreError as error:  # it was closed just before, or its journal cannot be written: its own actor is told
            self._site.say(f"{run.run}: the gateway does not let it in again: {error}")

    @handles(_Died)
    async def on_died(self, message: _Died) -> None:
        self._up.clear()
        self._deaths += 1
        site, log = self._site, self._site.job.logs / "gateway.log"
        if site.stopping:
            return
        if self._child is not None and (status := self._child.exit) is not None and status.code == BAD_INPUT:
            site.fail(f"the gateway cannot run; the end of {log} says why: {last_line(log)}")
            return
        if self._deaths > START_TRIES:
            site.fail(f"the gateway ended {self._deaths} times before it answered ({message.status}); see {log}")
            return
        site.say(f"the gateway (pid {message.pid}) ended: {message.status}; starting it again on the same port")
        await asyncio.sleep(min(LONGEST_PAUSE_S, RESTART_PAUSE_S * 2 ** (self._deaths - 1)))
        await self._start()

    async def _ask(self, message: object, deadline_s: float, reply: type[T]) -> T:
        """Ask the process, again after a restart: every message to it may be repeated."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            left_s = end - loop.time()
            if left_s <= 0:
                raise Unavailable(f"the gateway did not answer {type(message).__name__} within {deadline_s:g} s")
            try:
                async with asyncio.timeout(left_s):
                    await self._up.wait()
                return await self._remote.ask(message, left_s, reply)
            except (TimeoutError, Unavailable):
                await asyncio.sleep(RETRY_S)

    # ------------------------------------------------------------------------------------------ routes

    async def _tell_routes(self, deadline_s: float) -> None:
        """The routes as they are when it is our turn, so that no older ones are told after newer ones."""
        async with self._telling:
            self._told = self._routes()
            await self._ask(SetRoutes(self._version, self._told), deadline_s, Ok)

    def _routes(self) -> tuple[EngineRoute, ...]:
        """As the cells told them; those of a node that is gone are closed until it is back."""
        site, directory = self._site, self._site.directory
        there = {site.node, *directory.nodes}
        return tuple(
            route if directory.node_of(route.cell) in (None, *there) else replace(route, accepting=False)
            for route in site.routes.values()
        )

    @handles(ClusterChanged, concurrent=True)
    async def cluster_changed(self, _: ClusterChanged) -> None:
        if self._routes() != self._told:
            await self._tell_routes(TELL_S)

    @handles(RouteChanged, concurrent=True)
    async def route_changed(self, message: RouteChanged) -> Ok:
        self._site.routes[message.route.cell] = message.route
        await self._tell_routes(TELL_S)
        if message.route.accepting:
            self._site.serving.set()
        return Ok()

    @handles(Authority, concurrent=True)
    async def authority(self, message: Authority) -> None:
        self._version = max(self._version, message.version)
        if self._site.routes:
            await self._tell_routes(TELL_S)

    @handles(DrainEngine, concurrent=True)
    async def drain(self, message: DrainEngine) -> DrainReport:
        return await self._ask(message, DRAIN_S, DrainReport)

    # ------------------------------------------------------------------------------------------ runs

    @handles(OpenRun, concurrent=True)
    async def open_run(self, message: OpenRun) -> Ok:
        answer = await self._ask(message, ASK_S, Ok)
        self._site.open_runs[message.run] = message
        return answer

    @handles(CloseRun, concurrent=True)
    async def close_run(self, message: CloseRun) -> RunTrace:
        """The run's trace; an empty one for an attempt that the gateway has never let in."""
        try:
            return await self._ask(message, CLOSE_S, RunTrace)
        except Refused:
            return RunTrace(message.run, message.attempt, 0, 0, 0, 0, (), 0, 0, 0, 0.0, "")
        finally:
            opened = self._site.open_runs.get(message.run)
            if opened is not None and opened.attempt <= message.attempt:
                del self._site.open_runs[message.run]

    # ------------------------------------------------------------------------------------------ copies of journals

    @handles(CopyTo, concurrent=True)
    async def copy_journals(self, message: CopyTo) -> Ok:
        self._site.copy_to = message
        return await self._ask(message, TELL_S, Ok)

    @handles(GetCopies, concurrent=True)
    async def copies(self, message: GetCopies) -> Copies:
        return await self._ask(message, ASK_S, Copies)

    @handles(TakeOver, concurrent=True)
    async def take_over(self, message: TakeOver) -> Taken:
        return await self._ask(message, ASK_S, Taken)

    @handles(GetGatewayStatus, concurrent=True)
    async def status(self, message: GetGatewayStatus) -> GatewayStatus:
        return await self._ask(message, ASK_S, GatewayStatus)


def last_line(log: Path) -> str:
    """The last line of a log, for people."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as error:
        return str(error)
    return lines[-1] if lines else "(it is empty)"
