"""A cell's two processes, engine and replica: started or adopted, reached, and told what a stage of a switch needs.

One method an effect; which one comes when is the role machine's decision (gyre.sched.role). Each raises GyreError when
it could not be done, and returns when it is.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.actors.engine_process import read_ready, start
from gyre.actors.messages import Ok, Ping
from gyre.actors.messages_replica import LoadSnapshot, Offload, Ready
from gyre.actors.remote import RemoteRef
from gyre.actors.site import Site
from gyre.children import Child, ChildSpec, ExitStatus
from gyre.engine.access import http_key
from gyre.errors import GyreError, Unavailable
from gyre.ids import CellId
from gyre.store.records import Role

if TYPE_CHECKING:
    from gyre.engine.client import EngineClient

REPLICA_START_S = 300.0
REPLICA_S = 600.0
ADOPT_S = 60.0
"""For an adopted replica to end the micro-step that it is at."""
POLL_S = 0.05
END_GRACE_S = 5.0

_SERVING = frozenset({Role.ROLLOUT, Role.DRAINING})
_RELEASED = frozenset({Role.LOADING, Role.TRAIN, Role.UNLOADING})


@dataclass(frozen=True)
class AdoptedEngine:
    """An engine that an earlier gyred left. `version` is -1 when it holds no weights."""

    version: int
    released: bool


class CellProcesses:
    """The engine and the replica of `cell`."""

    def __init__(self, site: Site, cell: CellId) -> None:
        self._site = site
        self.cell = cell
        self.engine: Child | None = None
        self.replica: Child | None = None
        self.engine_url = ""
        self.kv_carrier = ""
        """As the engine said when it began, or was adopted: it is decided once."""
        self._client: EngineClient | None = None
        self._remote: RemoteRef = site.connect(self.replica_name)
        self._ended: deque[int] = deque(maxlen=8)
        """The pids whose end was told."""

    @property
    def engine_name(self) -> str:
        return f"engine-{self.cell}"

    @property
    def replica_name(self) -> str:
        return f"replica-{self.cell}"

    @property
    def replica_ref(self) -> RemoteRef:
        return self._remote

    async def close(self) -> None:
        """Let go of both; they live on."""
        await self._remote.close()
        await self._forget_client()

    async def _end(self, name: str) -> None:
        """By the record of it, which also finds what an end or a start that was cut short has left."""
        left = self._site.children.adopt().get(name)
        if left is not None:
            status = await left.end(END_GRACE_S)
            if not status.ok and status.signal != signal.SIGTERM:  # it was dying by itself, or would not end for us
                self.say_ended(left, status)

    def say_ended(self, child: Child, status: ExitStatus) -> None:
        """Once a process: its end may be heard of twice, by who waits for it and by who ends what is left of it."""
        if child.pid not in self._ended:
            self._ended.append(child.pid)
            self._site.say(f"{child.name} (pid {child.pid}) ended: {status}")

    # ------------------------------------------------------------------------------------------ engine

    @property
    def _ready_file(self) -> Path:
        return self._site.job.state / f"{self.engine_name}.json"

    @property
    def client(self) -> EngineClient:
        if self._client is None:
            raise Unavailable(f"the engine of {self.cell} is not up")
        return self._client

    async def _forget_client(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def adopt_engine(self, observed: Role) -> AdoptedEngine | None:
        """The engine that is there, when it is in a state that can be known; else None: it must be started."""
        child = self._site.children.adopt().get(self.engine_name)
        if child is None or not child.alive:
            return None
        self.engine = child
        try:
            url = read_ready(self._ready_file)
            client = self._connect(url)
            info = await client.info()
        except (OSError, ValueError, KeyError, GyreError):
            return None
        if observed not in _SERVING | _RELEASED | {Role.PENDING_WEIGHTS}:
            await client.close()
            return None
        self.engine_url, self._client, self.kv_carrier = url, client, info.kv_carrier
        self._site.say(f"adopted {self.engine_name} (pid {child.pid})")
        # One that was about to load weights may name a version that it does not hold.
        return AdoptedEngine(info.version if observed in _SERVING else -1, observed in _RELEASED)

    async def start_engine(self, version: int) -> None:
        """End what is left of the engine and start it with snapshot `version`."""
        site = self._site
        await self.stop_engine()
        place, ready_file = site.cells.index(self.cell), self._ready_file
        async with site.held.held(version) as model:
            self.engine, self.engine_url = await start(site, self.engine_name, place, model, version, ready_file)
        self._client = self._connect(self.engine_url)
        self.kv_carrier = (await self._client.info()).kv_carrier
        if self.kv_carrier:
            site.say(f"{self.engine_name}: KV blocks move over {self.kv_carrier}")

    def _connect(self, url: str) -> EngineClient:
        return self._site.outside.engine(url, http_key(self._site.secret), self._site.spec.engine.kind)

    async def stop_engine(self) -> None:
        """End the engine, if there is one. Its end is no news to anybody: it is forgotten first."""
        await self._forget_client()
        self.engine, self.kv_carrier = None, ""
        await self._end(self.engine_name)

    async def end_requests(self) -> None:
        """End what a gateway that cannot be reached has left in the engine; it goes on with it elsewhere."""
        await self.client.abort_all()

    async def release_engine(self) -> None:
        await self.client.release_memory()

    async def resume_engine(self) -> None:
        await self.client.resume_memory()

    async def load_weights(self, version: int) -> int:
        """The engine takes the snapshot's weights; the version that it then reports."""
        async with self._site.held.held(version) as snapshot:
            await self.client.update_weights(str(snapshot), version)
        return (await self.client.info()).version

    # ------------------------------------------------------------------------------------------ replica

    async def adopt_replica(self) -> bool:
        child = self._site.children.adopt().get(self.replica_name)
        if child is None or not child.alive:
            return False
        self.replica = child
        try:
            await self._remote.ask(Ping(), 5.0, Ok)
            # What it had claimed is unknown to us, and its memory may be the engine's now.
            await self._remote.ask(Offload(), ADOPT_S, Ok)
        except GyreError:
            return False
        self._site.say(f"adopted {self.replica_name} (pid {child.pid})")
        return True

    async def start_replica(self) -> None:
        """End what is left of the replica and start it; it holds no parameters yet."""
        site, spec = self._site, self._site.spec
        await self.stop_replica()
        config = {
            "model_dir": str(site.model_dir),
            "loss": spec.loss.model_dump(mode="json"),
            "optimizer": spec.optimizer.model_dump(mode="json"),
            "checkpoint": spec.checkpoint.model_dump(mode="json"),
            "checkpoints_dir": str(site.checkpoints),
            "staging_dir": str(site.job.staging) if self.cell == site.core_cell else "",
            "temperature": spec.sampling.temperature,
            "micro_batch_tokens": spec.batch.micro_step_tokens,
            "threads": spec.cells.threads,
            "sums_dtype": spec.batch.sums_dtype,
            "ranks": spec.cells.train_ranks,
            "first_device": spec.engine.first_gpu(site.cells.index(self.cell)),
            "far": site.far(self.replica_name),
        }
        address = site.child_address(self.replica_name)
        argv = (
            sys.executable,
            "-m",
            "gyre.actors.replica_process",
            address,
            str(site.job.secret_file),
            json.dumps(config),
        )
        log = site.job.logs / f"{self.replica_name}.log"
        self.replica = child = await site.children.start(ChildSpec(self.replica_name, argv, log=log))
        try:
            async with asyncio.timeout(REPLICA_START_S):
                while True:
                    try:
                        await self._remote.ask(Ping(), 5.0, Ok)
                        return
                    except Unavailable:
                        if not child.alive:
                            raise Unavailable(f"the replica ended while it started; see {log}") from None
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(f"the replica was not ready within {REPLICA_START_S:g} s; see {log}") from None

    async def stop_replica(self) -> None:
        """End the replica, if there is one, as `stop_engine` does."""
        self.replica = None
        await self._end(self.replica_name)

    async def load_replica(self, version: int) -> int:
        async with self._site.held.held(version, torn=True) as snapshot:
            ready = await self._remote.ask(LoadSnapshot(str(snapshot), version), REPLICA_S, Ready)
        return ready.version

    async def offload_replica(self) -> None:
        await self._remote.ask(Offload(), REPLICA_S, Ok)
