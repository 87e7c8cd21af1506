"""A gateway in a process of its own, to be killed: `python gateway_process.py CONFIG_JSON`.

Orders come as JSON over a second port: POST /<method> with the order's fields; the answer is the report's fields.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from gyre.actors.messages import CloseRun, EngineRoute, GatewayStatus, OpenRun, SetRoutes
from gyre.proxy.gateway import Gateway, GatewayConfig
from gyre.wire import to_plain


async def main(config: dict[str, Any]) -> None:
    ready = Path(config.pop("ready"))
    folders = {name: Path(config.pop(name)) for name in ("journal_dir", "trajectories_dir", "model_dir")}
    gateway = Gateway(GatewayConfig(**folders, **config))
    await gateway.start()

    async def order(request: web.Request) -> web.Response:
        body = await request.json()
        answer: Any = None
        match request.match_info["method"]:
            case "set_routes":
                routes = tuple(EngineRoute(**route) for route in body["engines"])
                await gateway.set_routes(SetRoutes(body["version"], routes))
            case "open_run":
                await gateway.open_run(OpenRun(**body))
            case "close_run":
                answer = to_plain(await gateway.close_run(CloseRun(**body)))
            case "status":
                status: GatewayStatus = gateway.status()
                answer = to_plain(status)
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/{method}", order)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    draft = ready.with_suffix(".draft")
    draft.write_text(json.dumps({"base_url": gateway.base_url, "control": runner.addresses[0][1], "pid": os.getpid()}))
    draft.rename(ready)
    await stopped.wait()
    await gateway.stop()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
