"""A gateway with scripted engines: what a test says the policy says, through the real proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre.actors.messages import CloseRun, EngineRoute, OpenRun, SetRoutes
from gyre.ids import CellId, GroupId, RunId
from gyre.proxy.gateway import Gateway, GatewayConfig
from gyre.proxy.session import Session
from gyre.trajectory.records import RunTrace

from .model_folder import write_model_folder
from .scripted_engine import Script, ScriptedEngine


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model") / "byte-qwen")


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait until the condition holds; the test fails when it does not come to."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@dataclass
class Proxy:
    """A gateway in this process, its engines, and a plain HTTP client."""

    gateway: Gateway
    engines: dict[str, ScriptedEngine]
    http: aiohttp.ClientSession
    version: int = 0
    slots: int = 64
    keys: dict[str, str] = field(default_factory=dict)

    async def route(self, *, closed: tuple[str, ...] = (), versions: dict[str, int] | None = None) -> None:
        routes = tuple(
            EngineRoute(
                CellId(cell), engine.url, (versions or {}).get(cell, self.version), cell not in closed, self.slots
            )
            for cell, engine in self.engines.items()
        )
        await self.gateway.set_routes(SetRoutes(self.version, routes))

    async def open(self, run: str, attempt: int = 1, **settings: Any) -> str:
        """Open a run; returns its base URL."""
        key = self.keys[run] = f"key-{run}-{attempt}"
        order = OpenRun(
            run=RunId(run),
            group=GroupId(settings.pop("group", "g")),
            attempt=attempt,
            key=key,
            profile=settings.pop("profile", "scripted"),
            temperature=settings.pop("temperature", 1.0),
            max_tokens=settings.pop("max_tokens", 200),
        )
        await self.gateway.open_run(order)
        return self.base(run)

    def base(self, run: str) -> str:
        return f"{self.gateway.base_url}/run/{run}/{self.keys[run]}"

    async def close(self, run: str, attempt: int = 1) -> RunTrace:
        return await self.gateway.close_run(CloseRun(RunId(run), attempt))

    def session(self, run: str) -> Session:
        return self.gateway._runs[RunId(run)].session

    async def chat(self, run: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """One OpenAI call; returns the assistant's message."""
        answer = await self.post(run, "chat/completions", {"model": "m", "messages": messages, **fields})
        assert answer[0] == 200, answer
        return answer[1]["choices"][0]["message"]

    async def until_sampled(self, cell: str, tokens: int, requests: int = 1) -> None:
        """Until so many requests are live on the cell, and each has been sent so many tokens."""
        engine = self.engines[cell]
        await until(lambda: sum(engine.made.get(rid, 0) >= tokens for rid in engine.live) >= requests)

    async def post(self, run: str, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.http.post(f"{self.base(run)}/v1/{path}", json=body, headers=headers) as response:
            return response.status, await response.json()


StartProxy = Callable[..., Awaitable[Proxy]]


@pytest.fixture
async def start_proxy(tmp_path: Path, model_dir: Path) -> AsyncIterator[StartProxy]:
    """Starts a proxy over engines that follow `script`; keyword settings go to the gateway's configuration."""
    async with AsyncExitStack() as stack:

        async def start(
            script: Script, cells: tuple[str, ...] = ("a",), *, token_s: float = 0.0, **settings: Any
        ) -> Proxy:
            engines: dict[str, ScriptedEngine] = {}
            for cell in cells:
                engines[cell] = ScriptedEngine(script, token_s=token_s)
                await engines[cell].start()
                stack.push_async_callback(engines[cell].stop)
            defaults: dict[str, Any] = {"context_tokens": 100_000, "block_tokens": 4}
            config = GatewayConfig(
                journal_dir=tmp_path / "journal",
                trajectories_dir=tmp_path / "trajectories",
                model_dir=model_dir,
                **{**defaults, **settings},
            )
            gateway = Gateway(config)
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            proxy = Proxy(gateway, engines, http)
            await proxy.route()
            return proxy

        yield start
