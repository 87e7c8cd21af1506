"""The orders about KV blocks over HTTP: which blocks of a prefix does an engine lack, and pull them from there.

    GET  /kv         where peers pull from, and what its blocks are: address, epoch, layout, block_tokens, model, carrier
    POST /kv/lack    {token_ids, version}                 ->  {version, layout, blocks, missing}
    POST /kv/pull    {source, manifest, deadline_s, bytes_s}  ->  {blocks, bytes, damaged, seconds, reason}

The local engine serves them beside the rest of its surface. SGLang's own cannot be added to: there an `OrderServer` of
our plug-in does, and whoever has the key may ask.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any, Protocol, cast

from aiohttp import web

from gyre.engine.records import KvLack, KvPulled
from gyre.errors import BadInput, GyreError, Refused
from gyre.kv_migrate.manifest import Manifest

_LONGEST_BODY_BYTES = 64 << 20


class Exchange(Protocol):
    """What an engine does about its blocks."""

    async def about(self) -> dict[str, Any]: ...

    async def lack(self, token_ids: Sequence[int], version: int) -> KvLack: ...

    async def pull(self, source: str, manifest: Manifest, deadline_s: float, bytes_s: float) -> KvPulled:
        """`bytes_s`: how quickly at most; 0 for what a request waits for, which overtakes the rest."""
        ...


def lack_answer(lack: KvLack) -> dict[str, Any]:
    return {
        "version": lack.version,
        "layout": lack.layout,
        "blocks": lack.blocks,
        "missing": [name.hex() for name in lack.missing],
    }


def pull_order(body: dict[str, Any]) -> tuple[str, Manifest, float, float]:
    """Source, manifest, deadline and rate. Raises BadInput."""
    source, manifest, deadline_s = body.get("source"), body.get("manifest"), body.get("deadline_s", 5.0)
    bytes_s = body.get("bytes_s", 0.0)
    if not isinstance(source, str) or not source:
        raise BadInput("source", source, "a string is expected")
    if not isinstance(manifest, dict):
        raise BadInput("manifest", manifest, "a JSON object is expected")
    if type(deadline_s) not in (int, float) or not 0 < deadline_s <= 600:
        raise BadInput("deadline_s", deadline_s, "seconds, above 0 and up to 600")
    if type(bytes_s) not in (int, float) or not (bytes_s == 0 or 1 <= bytes_s < inf):
        raise BadInput("bytes_s", bytes_s, "bytes a second, 1 or more, or 0 for no bound")
    return source, Manifest.from_json(cast("dict[str, Any]", manifest)), float(deadline_s), float(bytes_s)


def pulled_answer(pulled: KvPulled) -> dict[str, Any]:
    return {
        "blocks": pulled.blocks,
        "bytes": pulled.bytes,
        "damaged": pulled.damaged,
        "seconds": pulled.seconds,
        "reason": pulled.reason,
    }


class OrderServer:
    """Serves the orders, and nothing else, to whoever sends `Authorization: Bearer <key>`."""

    def __init__(self, exchange: Exchange, key: str) -> None:
        self._exchange = exchange
        self._key = f"Bearer {key}".encode()
        app = web.Application(client_max_size=_LONGEST_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/kv", self._about)
        app.router.add_post("/kv/lack", self._lack)
        app.router.add_post("/kv/pull", self._pull)
        self._runner = web.AppRunner(app, access_log=None)

    async def serve(self, host: str, port: int) -> None:
        """Raises BadInput when the port is taken."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise BadInput("orders", f"{host}:{port}", f"it must be free ({error.strerror})") from error

    async def close(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._key):
            return _error(401, "the job's key is expected")
        try:
            return await handler(request)
        except BadInput as error:
            return _error(400, str(error))
        except Refused as error:
            return _error(409, str(error))
        except GyreError as error:
            return _error(503, str(error))

    async def _about(self, _: web.Request) -> web.Response:
        return web.json_response(await self._exchange.about())

    async def _lack(self, request: web.Request) -> web.Response:
        body = await _body(request)
        ids, version = body.get("token_ids"), body.get("version")
        if not isinstance(ids, list) or any(type(token) is not int for token in cast("list[Any]", ids)):
            raise BadInput("token_ids", ids, "a list of token ids is expected")
        if type(version) is not int or version < 0:
            raise BadInput("version", version, "a whole number is expected")
        return web.json_response(lack_answer(await self._exchange.lack(cast("list[int]", ids), version)))

    async def _pull(self, request: web.Request) -> web.Response:
        return web.json_response(pulled_answer(await self._exchange.pull(*pull_order(await _body(request)))))


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        raise BadInput("body", request.path, "JSON is expected") from error
    if not isinstance(body, dict):
        raise BadInput("body", request.path, "a JSON object is expected")
    return cast("dict[str, Any]", body)


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": {"message": text}}, status=status)
