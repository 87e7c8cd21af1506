"""An engine that cannot be reached may sample on: what the gateway does until it knows better."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from gyre.actors.messages import DrainEngine, DrainReport
from gyre.errors import Refused
from gyre.ids import CellId

from .conftest import Proxy, StartProxy, until
from .scripted_engine import ScriptedEngine

ANSWER = "the quick brown fox jumps over the lazy dog"


class Link:
    """The way from the gateway to an engine. While it is cut no byte passes, and neither end hears of the other's end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = asyncio.Event()
        self._open.set()
        self._near: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def cut(self, *, lost: bool = True) -> None:
        """The gateway's connections are `lost` as well; the engine keeps its ends of them."""
        self._open.clear()
        for writer in self._near if lost else ():
            writer.transport.abort()

    def heal(self) -> None:
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        self._near.add(writer)
        await self._open.wait()
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        finally:
            await self._open.wait()  # before that nothing tells the engine
            far_writer.transport.abort()
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass
class CutOff:
    """A call in the middle of its answer on `a`, which is cut off, beside `b`, which is not."""

    proxy: Proxy
    link: Link
    calling: asyncio.Task[dict[str, Any]]

    @property
    def engine(self) -> ScriptedEngine:
        return self.proxy.engines["a"]

    @property
    def other(self) -> ScriptedEngine:
        return self.proxy.engines["b"]


@pytest.fixture
async def cut_off(start_proxy: StartProxy, request: pytest.FixtureRequest) -> AsyncIterator[CutOff]:
    """With `False` for its parameter the gateway's connection is not lost."""
    proxy = await start_proxy(lambda head: ANSWER, cells=("a", "b"), token_s=0.005)
    engine = proxy.engines["a"]
    link = Link(int(engine.url.rpartition(":")[2]))
    engine.url = await link.start()
    await proxy.route()
    await proxy.open("r")
    calling = asyncio.create_task(proxy.chat("r", [user("go")]))
    await proxy.until_sampled("a", 5)
    engine.held.clear()
    link.cut(lost=getattr(request, "param", True))
    yield CutOff(proxy, link, calling)
    link.heal()
    await link.stop()


async def test_a_call_goes_on_elsewhere_only_when_the_engine_that_had_it_has_let_go(cut_off: CutOff) -> None:
    await asyncio.sleep(1.5)  # longer than it takes to see that the engine says nothing
    assert cut_off.engine.live
    assert not cut_off.other.requests
    cut_off.link.heal()
    assert (await cut_off.calling)["content"] == ANSWER
    assert not cut_off.engine.live
    assert len(cut_off.other.requests) == 1
    assert (await cut_off.proxy.close("r")).sampled_tokens == len(ANSWER) + 1


async def test_when_the_engine_must_have_ended_it_by_itself_the_call_goes_on_and_the_engine_gets_nothing(
    cut_off: CutOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.proxy.leftovers.LEFT_S", 0.2)
    proxy = cut_off.proxy
    assert (await cut_off.calling)["content"] == ANSWER
    await proxy.open("s")
    await proxy.route()
    for number in range(4):
        await proxy.chat("s", [user(f"{number}")])
    assert len(cut_off.engine.requests) == 1
    cut_off.link.heal()
    await until(lambda: not cut_off.engine.live)
    cut_off.engine.held.set()
    await proxy.route(closed=("b",))
    await proxy.chat("s", [user("again")])
    assert len(cut_off.engine.requests) == 2


async def test_a_cell_is_not_empty_while_its_engine_does_not_say_so(
    cut_off: CutOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.proxy.leftovers.LEFT_S", 0.2)
    monkeypatch.setattr("gyre.proxy.engines.EMPTY_S", 0.3)
    await cut_off.calling
    with pytest.raises(Refused, match="may still sample"):
        await cut_off.proxy.gateway.drain(DrainEngine(CellId("a"), False))
    assert cut_off.engine.live
    monkeypatch.setattr("gyre.proxy.engines.EMPTY_S", 30.0)
    draining = asyncio.create_task(cut_off.proxy.gateway.drain(DrainEngine(CellId("a"), False)))
    cut_off.link.heal()
    await draining
    assert not cut_off.engine.live


@pytest.mark.parametrize("cut_off", [False], indirect=True)
async def test_a_cell_that_is_to_leave_while_its_engine_says_nothing_is_told_so(
    cut_off: CutOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.proxy.generation.STOP_S", 0.3)
    monkeypatch.setattr("gyre.proxy.leftovers.LEFT_S", 0.2)
    monkeypatch.setattr("gyre.proxy.engines.EMPTY_S", 0.3)
    drains: list[asyncio.Task[DrainReport]] = []
    for _ in range(3):  # an order may be repeated
        drains.append(asyncio.create_task(cut_off.proxy.gateway.drain(DrainEngine(CellId("a"), False))))
        await asyncio.sleep(0.4)
    for drain in drains:
        with pytest.raises(Refused, match="may still sample"):
            await drain
    assert (await cut_off.calling)["content"] == ANSWER


async def test_an_engine_that_was_cut_off_is_forgotten_when_routes_name_another_in_its_place(cut_off: CutOff) -> None:
    proxy, before = cut_off.proxy, cut_off.engine
    proxy.engines["a"] = proxy.engines.pop("b")  # the cell has ended the one before
    await proxy.route()
    assert (await cut_off.calling)["content"] == ANSWER
    assert len(proxy.engines["a"].requests) == 1
    assert before.live  # as nothing else told it
    await proxy.gateway.drain(DrainEngine(CellId("a"), False))
