"""The gateway's process: the proxy (gyre.proxy) behind an actor.

    python -m gyre.actors.gateway_process ADDRESS SECRET_FILE CONFIG_JSON

The actor takes the node's orders and hands lineages to the replicas; the proxy serves the harnesses. Exit code 2: what it
was told cannot be gone by (a port in use, a model it cannot read).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from gyre.actors.far import Far, Ways, far_side
from gyre.actors.messages import (
    CloseRun,
    DrainEngine,
    DrainReport,
    GatewayStatus,
    GetGatewayStatus,
    GetLineages,
    Lineages,
    Ok,
    OpenRun,
    Ping,
    SetRoutes,
)
from gyre.actors.messages_journals import (
    AskHeld,
    Copies,
    CopyJournal,
    CopyTo,
    GetCopies,
    Held,
    PutAway,
    Taken,
    TakeOver,
)
from gyre.actors.remote import serve
from gyre.actors.runtime import Actor, ActorSystem, handles
from gyre.engine.access import http_key
from gyre.errors import GyreError, Refused
from gyre.jobdir import key_for
from gyre.proxy.collector import calm_collector
from gyre.proxy.gateway import Gateway, GatewayConfig
from gyre.trajectory.records import RunTrace


class GatewayFront(Actor):
    """The gateway as its node, the replicas and other nodes' gateways reach it."""

    def __init__(self, gateway: Gateway, ways: Callable[[], Ways]) -> None:
        self._gateway = gateway
        self._ways = ways

    @handles(Ping, concurrent=True)
    async def ping(self, _: Ping) -> Ok:
        return Ok()

    @handles(SetRoutes)
    async def set_routes(self, message: SetRoutes) -> Ok:
        await self._gateway.set_routes(message)
        return Ok()

    @handles(DrainEngine, concurrent=True)
    async def drain(self, message: DrainEngine) -> DrainReport:
        if self._gateway.accepts(message.cell):  # a cell that is to be drained has said before that it takes none
            raise Refused(f"{message.cell} has opened again: the order to drain it was held up")
        return await self._gateway.drain(message)

    @handles(OpenRun, concurrent=True)
    async def open_run(self, message: OpenRun) -> Ok:
        await self._gateway.open_run(message)
        return Ok()

    @handles(CloseRun, concurrent=True)
    async def close_run(self, message: CloseRun) -> RunTrace:
        return await self._gateway.close_run(message)

    @handles(GetLineages, concurrent=True)
    async def lineages(self, message: GetLineages) -> Lineages:
        return self._gateway.lineages(message)

    @handles(GetGatewayStatus, concurrent=True)
    async def status(self, _: GetGatewayStatus) -> GatewayStatus:
        return self._gateway.status()

    # ------------------------------------------------------------------------------------------ copies of journals

    @handles(CopyTo)
    async def copy_to(self, message: CopyTo) -> Ok:
        self._gateway.copies.copy_to(message, None if message.place is None else self._ways().to(message.place))
        return Ok()

    @handles(GetCopies, concurrent=True)
    async def copies_status(self, _: GetCopies) -> Copies:
        return self._gateway.copies.status()

    @handles(TakeOver, concurrent=True)
    async def take_over(self, message: TakeOver) -> Taken:
        return await self._gateway.copies.take_over(message)

    @handles(AskHeld, concurrent=True)
    async def held(self, message: AskHeld) -> Held:
        return await self._gateway.copies.hold(message)

    @handles(CopyJournal, concurrent=True)
    async def copy(self, message: CopyJournal) -> Held:
        return await self._gateway.copies.hold(message)

    @handles(PutAway, concurrent=True)
    async def put_away(self, message: PutAway) -> Held:
        return await self._gateway.copies.hold(message)


async def run(address: str, secret_file: Path, config: dict[str, Any]) -> None:
    """Serve until SIGTERM."""
    secret = secret_file.read_text(encoding="ascii").strip()
    metrics_key = _metrics_key(secret, secret_file.with_name("metrics.key"))
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    folders = {name: Path(config.pop(name)) for name in ("journal_dir", "trajectories_dir", "model_dir")}
    if (copies_dir := config.pop("copies_dir")) is not None:
        folders["copies_dir"] = Path(copies_dir)
    far = Far(**plain) if (plain := config.pop("far")) else None
    async with AsyncExitStack() as stack:
        gateway = Gateway(GatewayConfig(**folders, **config, engine_key=http_key(secret), metrics_key=metrics_key))
        await gateway.start()
        calm_collector()
        stack.push_async_callback(gateway.stop)
        system = await stack.enter_async_context(ActorSystem.running("gateway"))
        front = system.spawn("front", lambda: GatewayFront(gateway, lambda: ways))
        ways = Ways(secret, await stack.enter_async_context(far_side(far, front)))
        stack.push_async_callback(ways.close)
        await stack.enter_async_context(serve(front, address, secret))
        await stopped.wait()


def _metrics_key(secret: str, file: Path) -> str:
    """The key of `/metrics`, left in `file` for who collects them."""
    key = key_for(secret, "metrics")
    with os.fdopen(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="ascii") as out:
        out.write(key)
    return key


def main() -> int:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    address, secret_file, config = sys.argv[1:]
    try:
        asyncio.run(run(address, Path(secret_file), json.loads(config)))
    except GyreError as error:
        print(f"gyre.gateway: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
