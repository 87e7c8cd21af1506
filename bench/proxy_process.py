"""The two processes that bench_proxy.py measures between: `python proxy_process.py engine|gateway READY_FILE [FOLDER MODEL URL]`.

The engine answers at once: it samples nothing, and has all the tokens that it is asked for in its first event; but those
of an answer of `STREAMED_TOKENS` come one by one, as a model samples them. The gateway is the real one, on one core.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

from aiohttp import web

from gyre.actors.messages import EngineRoute, OpenRun, SetRoutes
from gyre.ids import CellId, GroupId, RunId
from gyre.proxy.collector import calm_collector
from gyre.proxy.gateway import Gateway, GatewayConfig

TOKEN = 40
"""Any token that is text."""
CONTEXT_TOKENS = 1_000_000
RUNS = 500
STREAMED_TOKENS = 256
TOKEN_S = 0.005
_INTERVAL = re.compile(rb'"stream_interval": ?(\d+)')
_COUNT = re.compile(rb'"max_new_tokens": ?(\d+)')


async def engine(ready: Path) -> None:
    answers: dict[int, bytes] = {}

    async def generate(request: web.Request) -> web.StreamResponse:
        # Behind the ids: reading a million of them is the engine's cost, and not what is measured.
        end = (await request.read())[-600:]
        found = _COUNT.search(end)
        assert found is not None
        count = int(found[1])
        if count == STREAMED_TOKENS:
            interval = _INTERVAL.search(end)
            return await _stream(request, count, int(interval[1]) if interval else 1)
        data = answers.get(count) or answers.setdefault(count, _answer(count))
        return web.Response(body=data, headers={"Content-Type": "text/event-stream"})

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/generate", generate)
    await _serve(app, ready)


async def _stream(request: web.Request, count: int, interval: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    sent = 0
    for made in range(1, count + 1):
        await asyncio.sleep(TOKEN_S)
        if made in (1, count) or made % interval == 0:
            await response.write(_event(made - sent, made, whole=made == count))
            sent = made
    await response.write_eof(b"data: [DONE]\n\n")
    return response


def _answer(count: int) -> bytes:
    return _event(count, count, whole=True) + b"data: [DONE]\n\n"


def _event(new: int, made: int, *, whole: bool) -> bytes:
    meta = {
        "finish_reason": {"type": "length", "length": made} if whole else None,
        "prompt_tokens": 1,
        "completion_tokens": made,
        "cached_tokens": 0,
        "weight_version": "0",
        "output_token_logprobs": [[-0.5, TOKEN, None]] * new,
    }
    event = json.dumps({"text": "", "output_ids": [TOKEN] * new, "meta_info": meta})
    return f"data: {event}\n\n".encode()


async def gateway(ready: Path, folder: Path, model: Path, url: str) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    config = GatewayConfig(folder / "journal", folder / "trajectories", model, CONTEXT_TOKENS, fsync=False)
    served = Gateway(config)
    await served.start()
    calm_collector()
    await served.set_routes(SetRoutes(0, (EngineRoute(CellId("c0"), url, 0, accepting=True, slots=RUNS),)))
    for place in range(RUNS):
        run, group = RunId(f"r{place}"), GroupId(f"g{place // 16}")
        await served.open_run(OpenRun(run, group, 1, "key", "scripted", 1.0, 1000))
    app = web.Application()
    app.router.add_get("/cpu", lambda _: _said(str(sum(os.times()[:2]))))
    await _serve(app, ready, served.base_url)
    await served.stop()


async def _said(text: str) -> web.Response:
    return web.Response(text=text)


async def _serve(app: web.Application, ready: Path, base_url: str = "") -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    own = f"http://127.0.0.1:{runner.addresses[0][1]}"
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    draft = ready.with_suffix(".draft")
    draft.write_text(json.dumps({"url": own, "base_url": base_url}))
    draft.rename(ready)
    await ended.wait()
    await runner.cleanup()


if __name__ == "__main__":
    part, ready, *rest = sys.argv[1:]
    if part == "engine":
        asyncio.run(engine(Path(ready)))
    else:
        asyncio.run(gateway(Path(ready), Path(rest[0]), Path(rest[1]), rest[2]))
