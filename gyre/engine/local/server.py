"""The local engine's HTTP surface: SGLang's paths and shapes for what Gyre uses, and two of our own for KV blocks.

Streams are incremental: a message holds only the tokens that came since the one before. A client that goes away has its
request aborted. With a key, whoever does not send it is told no more than that the engine is up: other processes of the
machine, a run's own commands among them, reach the socket as well.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from gyre.engine.local.core import EngineCore
from gyre.engine.local.kv_exchange import KvExchange
from gyre.engine.local.requests import Output, SampleRequest, merge, read_request, token_ids
from gyre.engine.local.thread import EngineThread
from gyre.engine.records import PauseMode
from gyre.errors import BadInput, GyreError, Refused
from gyre.kv_migrate.orders import lack_answer, pull_order, pulled_answer

_LONGEST_BODY_BYTES = 64 * 1024 * 1024
_FENCE_S = 1.0
_PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """Handles requests for `core`. `application()` is what a runner serves; `close` ends all streams and the thread.

    With a `key`, all but `GET /health` want `Authorization: Bearer <key>`, as with SGLang's `--api-key`.
    """

    def __init__(self, core: EngineCore, exchange: KvExchange | None, key: bytes = b"") -> None:
        self._core = core
        self._key = key
        self._streams: dict[str, asyncio.Queue[Output]] = {}
        self.thread = EngineThread(core, self._deliver)
        self._exchange = exchange
        if exchange is not None:
            exchange.serve(self.thread)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_LONGEST_BODY_BYTES, middlewares=[self._guard, _errors])
        post = app.router.add_post
        post("/generate", self._generate)
        post("/abort_request", self._abort)
        post("/pause_generation", self._pause)
        post("/continue_generation", self._continue)
        post("/update_weights_from_disk", self._update_weights)
        post("/update_weight_version", self._update_version)
        post("/flush_cache", self._flush)
        post("/release_memory_occupation", self._release)
        post("/resume_memory_occupation", self._resume)
        post("/kv/lack", self._kv_lack)
        post("/kv/pull", self._kv_pull)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/health", self._health)
        return app

    async def close(self) -> None:
        """End every request with what it has, so that no stream is cut in the middle."""
        if not self.thread.failed.done():
            await self.thread.call(lambda core: core.abort_all())
            await self.thread.stop()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Before anything of the request is read."""
        open_to_all = request.method == "GET" and request.path == "/health"
        if not self._key or open_to_all or _bears(request, self._key):
            return await handler(request)
        return web.json_response(
            {"error": {"message": "Unauthorized"}}, status=401, headers={"WWW-Authenticate": "Bearer"}
        )

    # ------------------------------------------------------------------------------------------ sampling

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        sampling = read_request(await _body(request), uuid.uuid4().hex)
        if sampling.rid in self._streams:
            raise BadInput("rid", sampling.rid, "it must not be that of a live request")
        self._streams[sampling.rid] = asyncio.Queue()
        started_s = time.monotonic()
        try:
            await self.thread.call(lambda core: core.submit(sampling))
            if sampling.stream:
                return await self._stream(request, sampling, started_s)
            whole: Output | None = None
            async for output in self._outputs(sampling):
                whole = output if whole is None else merge(whole, output)
            assert whole is not None
            return web.json_response(_message(whole, started_s))
        finally:
            del self._streams[sampling.rid]
            # Of a request that ended this is nothing; of one whose client went away it frees the batch.
            self.thread.send(lambda core: core.abort(sampling.rid))

    async def _stream(self, request: web.Request, sampling: SampleRequest, started_s: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        async for output in self._outputs(sampling):
            data = json.dumps(_message(output, started_s), separators=(",", ":"))
            end = "data: [DONE]\n\n" if output.finish is not None else ""
            await response.write(f"data: {data}\n\n{end}".encode())
        await response.write_eof()
        return response

    async def _outputs(self, sampling: SampleRequest) -> AsyncGenerator[Output]:
        """The request's outputs up to its finish; what has gathered while the last was sent comes as one."""
        stream = self._streams[sampling.rid]
        least = 1  # the first token is not waited for behind others
        while True:
            output = await stream.get()
            while not stream.empty() or (output.finish is None and len(output.token_ids) < least):
                output = merge(output, await stream.get())
            yield output
            if output.finish is not None:
                return
            least = sampling.stream_interval

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.rid)
            if stream is not None:
                stream.put_nowait(output)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if body.get("abort_all"):
            await self.thread.call(lambda core: core.abort_all())
        else:
            rid = _text(body, "rid")
            await self.thread.call(lambda core: core.abort(rid))
        return web.Response()

    # ------------------------------------------------------------------------------------------ control

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await _body(request)).get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise BadInput("mode", mode, f"it must be one of {', '.join(_PAUSE_MODES)}")
        await self.thread.call(lambda core: core.pause(mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await _body(request)
        await self.thread.call(lambda core: core.resume())
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await _body(request)
        path = Path(_text(body, "model_path"))
        label = body.get("weight_version")
        version = None if label is None else _version("weight_version", label)
        flush = bool(body.get("flush_cache", True))
        abort_first = bool(body.get("abort_all_requests", False))

        def update(core: EngineCore) -> None:
            if abort_first:
                core.abort_all()
            core.update_weights(path, core.version if version is None else version, flush=flush)

        try:
            await self.thread.call(update)
        except GyreError as error:
            return web.json_response({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        return web.json_response(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def _update_version(self, request: web.Request) -> web.Response:
        body = await _body(request)
        version = _version("new_version", body.get("new_version"))
        abort_first = bool(body.get("abort_all_requests", True))

        def relabel(core: EngineCore) -> None:
            if abort_first:
                core.abort_all()
            core.relabel(version)

        await self.thread.call(relabel)
        return web.json_response({"success": True, "message": "Weight version updated.", "new_version": str(version)})

    async def _flush(self, request: web.Request) -> web.Response:
        await _body(request)
        await self.thread.call(lambda core: core.flush())
        return web.Response(text="Cache flushed.\n")

    async def _release(self, request: web.Request) -> web.Response:
        weights, kv = _tags(await _body(request))
        if self._exchange is not None:
            # The peer that took the blocks says so a moment after it has them; a frozen one does not hold us up.
            await self._exchange.fence(_FENCE_S)
        await self.thread.call(lambda core: core.release_memory(weights=weights, kv=kv))
        return web.json_response(None)

    async def _resume(self, request: web.Request) -> web.Response:
        _, kv = _tags(await _body(request))
        await self.thread.call(lambda core: core.resume_memory(kv=kv))
        return web.json_response(None)

    async def _model_info(self, _: web.Request) -> web.Response:
        core = self._core
        return web.json_response(
            {
                "model_path": str(core.model_path),
                "weight_version": str(core.version),
                "is_generation": True,
                "kv": {
                    "address": "" if self._exchange is None else self._exchange.address,
                    "layout": core.store.layout,
                    "block_tokens": core.store.block_tokens,
                    "model": core.store.model,
                    "epoch": 0 if self._exchange is None else self._exchange.epoch,
                    "carrier": "" if self._exchange is None else self._exchange.carrier,
                },
            }
        )

    async def _loads(self, _: web.Request) -> web.Response:
        load = await self.thread.call(lambda core: core.load)
        return web.json_response(
            {"loads": [{"dp_rank": 0, "num_running_reqs": load.running, "num_waiting_reqs": load.waiting}]}
        )

    async def _health(self, _: web.Request) -> web.Response:
        # Through the thread: a health answer says that the engine steps, not only that the socket is open.
        await self.thread.call(lambda core: None)
        return web.Response()

    # ------------------------------------------------------------------------------------------ KV blocks

    async def _kv_lack(self, request: web.Request) -> web.Response:
        body = await _body(request)
        ids = token_ids("token_ids", body.get("token_ids"))
        exchange = self._exchanges()
        lack = await exchange.lack(ids, _whole_version(body))
        return web.json_response(lack_answer(lack))

    async def _kv_pull(self, request: web.Request) -> web.Response:
        body = await _body(request)
        exchange = self._exchanges()
        return web.json_response(pulled_answer(await exchange.pull(*pull_order(body))))

    def _exchanges(self) -> KvExchange:
        if self._exchange is None:
            raise Refused("this engine moves no KV: it was started without a secret file")
        return self._exchange


def _message(output: Output, started_s: float) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": output.rid,
        "finish_reason": None if output.finish is None else output.finish.to_json(),
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        "weight_version": str(output.version),
        "num_retractions": output.retractions,
        "output_token_logprobs": [
            [lp, token, None] for lp, token in zip(output.logprobs, output.token_ids, strict=True)
        ],
    }
    if output.finish is not None:
        meta["weight_versions"] = [{"version": str(v), "start": start, "end": end} for v, start, end in output.spans]
        meta["e2e_latency"] = time.monotonic() - started_s
    return {"text": "", "output_ids": list(output.token_ids), "meta_info": meta}


def _bears(request: web.Request, key: bytes) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key)


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadInput as error:
        return _error(400, error)
    except Refused as error:
        # SGLang answers 400 when it cannot flush; a client has one rule for both.
        return _error(400 if request.path == "/flush_cache" else 409, error)
    except GyreError as error:
        return _error(503, error)


def _error(status: int, error: GyreError) -> web.Response:
    return web.json_response({"error": {"message": str(error)}}, status=status)


async def _body(request: web.Request) -> dict[str, Any]:
    data = await request.read()
    if not data:
        return {}
    try:
        body = json.loads(data)
    except ValueError as error:
        raise BadInput("body", data[:60], "it must be JSON") from error
    if not isinstance(body, dict):
        raise BadInput("body", body, "a JSON object is expected")
    return cast("dict[str, Any]", body)


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise BadInput(key, value, "a string is expected")
    return value


def _version(key: str, value: object) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 18:
        return int(value)
    raise BadInput(key, value, "a version is a decimal number in a string")


def _whole_version(body: dict[str, Any]) -> int:
    value = body.get("version")
    if type(value) is not int or value < 0:
        raise BadInput("version", value, "a whole number is expected")
    return value


def _tags(body: dict[str, Any]) -> tuple[bool, bool]:
    tags = body.get("tags") or ["weights", "kv_cache"]
    if not isinstance(tags, list) or any(
        tag not in ("weights", "kv_cache", "cuda_graph") for tag in cast("list[Any]", tags)
    ):
        raise BadInput("tags", tags, "a list of weights, kv_cache and cuda_graph is expected")
    return "weights" in tags, "kv_cache" in tags
