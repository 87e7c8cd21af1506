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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gyre.actors.messages import (
    Authority,
    CloseRun,
    DrainEngine,
    DrainReport,
    EngineRoute,
    GatewayStatus,
    GetGatewayStatus,
    JobFailed,
    Ok,
    OpenRun,
    Ping,
    RouteChanged,
    SetRoutes,
)
from gyre.actors.remote import RemoteRef, connect
from gyre.actors.runtime import Actor, handles
from gyre.actors.site import Site
from gyre.children import Child, ChildSpec
from gyre.errors import Unavailable
from gyre.ids import CellId, RunId
from gyre.store.records import SnapshotRecord
from gyre.trajectory.records import RunTrace
from gyre.wire import record

T = TypeVar("T")

CHILD = "gateway"
START_S = 120.0
ASK_S = 30.0
DRAIN_S = 120.0
CLOSE_S = 300.0
RETRY_S = 0.2
RESTART_PAUSE_S = 0.2
BAD_INPUT = 2
"""The exit code of a process that was told something it cannot go by: a port in use, a model it cannot read."""


@record("gateway.died")
@dataclass(frozen=True)
class _Died:
    status: str


class GatewayActor(Actor):
    def __init__(self, site: Site) -> None:
        self._site = site
        self._remote: RemoteRef = connect(site.child_address(CHILD), site.secret)
        self._child: Child | None = None
        self._up = asyncio.Event()
        self._version = -1
        self._routes: dict[CellId, EngineRoute] = {}
        self._runs: dict[RunId, OpenRun] = {}
        self._telling = asyncio.Lock()

    async def pre_start(self) -> None:
        snapshot = await self._site.store.get(self._site.keys.snapshot, SnapshotRecord)
        assert snapshot is not None
        self._version = snapshot.record.version
        child = self._site.children.adopt().get(CHILD)
        if child is not None and child.alive:
            self._site.say(f"adopted the gateway (pid {child.pid})")
            self._watch(child)
            await self._introduce()
        else:
            await self._start()

    async def post_stop(self) -> None:
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
        }
        argv = (
            sys.executable,
            "-m",
            "gyre.actors.gateway_process",
            site.child_address(CHILD),
            str(site.job.secret_file),
            json.dumps(config),
        )
        child = await site.children.start(ChildSpec(CHILD, argv, log=site.job.logs / "gateway.log"))
        self._watch(child)
        await self._introduce()

    def _watch(self, child: Child) -> None:
        self._child = child
        self.task(child.wait(), lambda status: _Died(str(status)))

    async def _introduce(self) -> None:
        """Until it answers, then tell it all it must know."""
        try:
            async with asyncio.timeout(START_S):
                while True:
                    try:
                        await self._remote.ask(Ping(), ASK_S, Ok)
                        break
                    except Unavailable:
                        if self._child is not None and not self._child.alive:
                            return  # _Died is on its way
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise Unavailable(
                f"the gateway did not answer within {START_S:g} s; see {self._site.job.logs / 'gateway.log'}"
            ) from None
        self._up.set()
        try:
            await self._tell_routes()
            for run in list(self._runs.values()):
                await self._remote.ask(run, ASK_S, Ok)
        except Unavailable:
            self._up.clear()

    @handles(_Died)
    async def on_died(self, message: _Died) -> None:
        self._up.clear()
        if self._child is not None and (status := self._child.exit) is not None and status.code == BAD_INPUT:
            log = self._site.job.logs / "gateway.log"
            self._site.scheduler.tell(JobFailed(f"the gateway cannot run; the end of {log} says why: {last_line(log)}"))
            return
        self._site.say(f"the gateway ended ({message.status}); starting it again on the same port")
        await asyncio.sleep(RESTART_PAUSE_S)
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

    async def _tell_routes(self) -> None:
        async with self._telling:
            await self._remote.ask(SetRoutes(self._version, tuple(self._routes.values())), ASK_S, Ok)

    @handles(RouteChanged, concurrent=True)
    async def route_changed(self, message: RouteChanged) -> Ok:
        self._routes[message.route.cell] = message.route
        async with self._telling:
            await self._ask(SetRoutes(self._version, tuple(self._routes.values())), ASK_S, Ok)
        if message.route.accepting:
            self._site.serving.set()
        return Ok()

    @handles(Authority, concurrent=True)
    async def authority(self, message: Authority) -> Ok:
        self._version = max(self._version, message.version)
        async with self._telling:
            await self._ask(SetRoutes(self._version, tuple(self._routes.values())), ASK_S, Ok)
        return Ok()

    @handles(DrainEngine, concurrent=True)
    async def drain(self, message: DrainEngine) -> DrainReport:
        return await self._ask(message, DRAIN_S, DrainReport)

    # ------------------------------------------------------------------------------------------ runs

    @handles(OpenRun, concurrent=True)
    async def open_run(self, message: OpenRun) -> Ok:
        self._runs[message.run] = message
        return await self._ask(message, ASK_S, Ok)

    @handles(CloseRun, concurrent=True)
    async def close_run(self, message: CloseRun) -> RunTrace:
        trace = await self._ask(message, CLOSE_S, RunTrace)
        self._runs.pop(message.run, None)
        return trace

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
