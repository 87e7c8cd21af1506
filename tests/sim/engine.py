"""The engine of a cell, and the client that its cell and the gateway have of it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.actors.messages import Ok
from gyre.engine.records import (
    Chunk,
    EngineAbsent,
    EngineGone,
    EngineInfo,
    EngineRefused,
    EngineUnreached,
    Finish,
    GenerateRequest,
)
from gyre.errors import Unavailable
from gyre.ids import CellId

from .loop import Process
from .machine import Child, Machine, Served
from .net import Stream
from .runs import LINEAGE_TOKENS

if TYPE_CHECKING:
    from .world import World

TOKEN_S = 0.1
CHUNK_TOKENS = 2
"""Tokens that come at once."""
CONNECT_S = 5.0
CONTROL_S = 120.0


@dataclass(eq=False)
class Sampling:
    """A request at an engine, and the connection that it came by."""

    rid: str
    tokens: int
    stream: Stream
    made: int = 0

    @property
    def call(self) -> str:
        """What it is an attempt at."""
        return self.rid.rpartition("-")[0]


class Engine(Served):
    def __init__(self, machine: Machine, child: Child, cell: CellId, version: int, ready: Path) -> None:
        super().__init__(machine, child)
        self.cell = cell
        self.version = version
        self.released = False
        self.loading = False
        self.live: dict[str, Sampling] = {}
        self._ready = ready

    async def run(self) -> None:
        self.world.watch.engine_memory(self.cell, self)
        await super().run()
        self._ready.write_text(json.dumps({"url": f"sim:{self.machine.name}/{self.child.name}/{self.child.pid}"}))

    def died(self) -> None:
        self.live.clear()
        self.world.watch.engine_gone(self)

    def take(self, request: GenerateRequest, stream: Stream) -> None:
        """A request has arrived."""
        sampling = Sampling(request.rid, request.max_new_tokens, stream)
        if self.released or self.loading:
            near, here = stream.near_place, self.machine.name
            # A gateway whose node the cell's did not see when it drained may live on; the engine says no to it.
            if near == here or not self.world.troubled(near, here):
                self.world.watch.violated(f"{sampling.rid} was sent to {self.child.name}, which holds no weights")
            stream.answer(EngineRefused(503, "it holds no weights"))
            return
        self.world.watch.began(self, sampling)
        self.live[sampling.rid] = sampling
        self._later(sampling)

    def let_go(self, rid: str) -> None:
        """End a request with what it has. One that is not known is no error."""
        sampling = self.live.get(rid)
        if sampling is not None:
            self._end(sampling)
            sampling.stream.answer(self._chunk(0, Finish("abort")))

    def _later(self, sampling: Sampling) -> None:
        self.world.loop.call_later(CHUNK_TOKENS * TOKEN_S, self._sample, sampling, context=self.child.process.context)

    def _sample(self, sampling: Sampling) -> None:
        if self.live.get(sampling.rid) is not sampling:
            return
        count = min(CHUNK_TOKENS, max(0, sampling.tokens - sampling.made))
        sampling.made += count
        if sampling.made < sampling.tokens or sampling.stream.over:  # an answer that nobody hears is a long one
            sampling.stream.answer(self._chunk(count, None))
            self._later(sampling)
        else:
            self._end(sampling)
            sampling.stream.answer(self._chunk(count, Finish("length")))

    def _end(self, sampling: Sampling) -> None:
        del self.live[sampling.rid]
        self.world.watch.ended(self, sampling)

    def _chunk(self, count: int, finish: Finish | None) -> Chunk:
        tokens = tuple(next(self.world.tokens) for _ in range(count))
        return Chunk(tokens, (-0.5,) * count, self.version, finish, LINEAGE_TOKENS, 0)

    async def answer(self, message: object) -> object:
        match message:
            case ("info",):
                return EngineInfo(self.version, "", "", "", 16)
            case ("abort", *rids):
                for rid in rids or list(self.live):
                    self.let_go(str(rid))
                return Ok()
            case ("weights", str(), int(version)):
                await self.world.stage("weights", self.cell)
                if self.live:
                    raise EngineRefused(400, "requests are sampled")
                self.loading = True
                await asyncio.sleep(0.05 + self.world.rng.random() * 0.3)
                self.loading, self.version = False, version
                return Ok()
            case ("release",):
                await self.world.stage("release", self.cell)
                if self.live:
                    self.world.watch.violated(f"{self.child.name} released its memory under {list(self.live)}")
                self.released, self.version = True, -1
                return Ok()
            case ("resume",):
                await self.world.stage("resume", self.cell)
                self.released, self.version = False, -1
                self.world.watch.engine_memory(self.cell, self)
                return Ok()
            case _:
                raise AssertionError(message)


class EngineClient:
    """gyre.engine.client.EngineClient, over the simulated network. `url` is `sim:<node>/<child>/<pid>`."""

    def __init__(self, world: World, source: Process, place: str, url: str) -> None:
        self.url = url
        self._world = world
        self._source = source
        self._place = place
        self._there, self._child, self._pid = url.removeprefix("sim:").split("/")
        self._ref = world.child_ref(source, place, url)
        self._streams: dict[Stream, None] = {}

    async def close(self) -> None:
        for stream in list(self._streams):
            stream.lose()

    async def update_weights(self, path: str, version: int) -> None:
        await self._order("weights", path, version)

    async def release_memory(self) -> None:
        await self._order("release")

    async def resume_memory(self) -> None:
        await self._order("resume")

    async def info(self) -> EngineInfo:
        found = await self._order("info")
        assert isinstance(found, EngineInfo)
        return found

    async def abort(self, rid: str) -> None:
        await self._order("abort", rid)

    async def abort_all(self) -> None:
        await self._order("abort")

    async def kv_lack(self, token_ids: Sequence[int], version: int) -> object:
        raise EngineRefused(404, "it holds no KV blocks")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        engine = await self._reached()
        pieces: deque[object] = deque()
        waiter: asyncio.Future[None] | None = None

        def heard(piece: object) -> None:
            pieces.append(piece)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

        def hung_up() -> None:
            engine.let_go(request.rid)

        near, far = (self._place, self._source), (self._there, engine.child.process)
        stream = Stream(self._world.net, near, far, heard, hung_up)
        self._streams[stream] = None
        stream.ask(lambda: engine.take(request, stream))
        try:
            while True:
                while not pieces:
                    waiter = self._world.loop.create_future()
                    await waiter
                piece = pieces.popleft()
                if isinstance(piece, EngineRefused):
                    raise piece
                if not isinstance(piece, Chunk):
                    raise EngineGone(f"{self.url} was lost: {piece}")
                yield piece
                if piece.finish is not None:
                    return
        finally:
            del self._streams[stream]
            stream.close()

    async def _order(self, *order: object) -> object:
        await self._reached()
        try:
            return await self._ref.ask(order, CONTROL_S, object)
        except Unavailable as error:
            raise EngineGone(str(error)) from error

    async def _reached(self) -> Engine:
        """The engine that listens at the URL, when there is a connection to it."""
        net = self._world.net
        apart_s = net.apart_s(self._place, self._there)
        if apart_s > 0:
            await asyncio.sleep(min(apart_s, CONNECT_S))
            if apart_s > CONNECT_S:
                raise EngineUnreached(f"{self.url}: no connection in {CONNECT_S:g} s")
        served = self._world.nodes[self._there].machine.served.get(self._child)
        if not isinstance(served, Engine) or str(served.child.pid) != self._pid or not served.up:
            await asyncio.sleep(net.latency_s(self._place, self._there))
            raise EngineAbsent(f"{self.url}: nothing listens there")
        return served
