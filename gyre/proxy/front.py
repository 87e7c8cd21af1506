"""The proxy's front door: HTTP in the harness's dialect, one base URL a run.

`/run/<run>/<key>` is what a harness is given as its API's address; behind it stand the paths of the dialects. Every
answer that is not one is in the dialect's own form. Nothing of a stream is sent before all of it is safe (`delivery`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gyre.errors import BadInput
from gyre.proxy.delivery import Hold, hold_of
from gyre.proxy.dialects.anthropic_messages import AnthropicMessages
from gyre.proxy.dialects.dialect import Dialect
from gyre.proxy.dialects.openai_chat import OpenAIChat
from gyre.proxy.faults import Fault, FaultKind, bad_request
from gyre.proxy.live_run import LiveRun, ModelRequest
from gyre.proxy.metering import CONTENT_TYPE
from gyre.proxy.session import Call

_OF_ANTHROPIC = re.compile(r"/messages(/count_tokens|/batches(/.*)?)?/*$")
_OF_OPENAI = re.compile(r"/chat/completions/*$")
_DEEPEST = 200
"""Levels that a body may be nested: more than any schema has, and far from where Python's recursion ends."""
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Encodings of a body that are read, with zlib's name for each."""
READ_S = 300.0
"""The longest a request's body may take to arrive. The server says nothing when a body breaks off in a broken chunk."""
WRITE_S = 300.0
"""The longest a client may take to read an answer."""
_log = logging.getLogger(__name__)


class Door(Protocol):
    def admit(self, run: str, key: str) -> LiveRun: ...

    def metrics(self) -> bytes: ...


class Front:
    def __init__(
        self, door: Door, openai: OpenAIChat, anthropic: AnthropicMessages, model: str, request_bytes: int
    ) -> None:
        self._door = door
        self._openai = openai
        self._anthropic = anthropic
        self._model = model
        self._request_bytes = request_bytes
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        app = web.Application(client_max_size=self._request_bytes)
        app.router.add_route("*", "/run/{run}/{key}/{path:.*}", self._serve)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._elsewhere)
        # A body is decoded by `_decoded`: what the server itself cannot decode it answers in no dialect's form.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, auto_decompress=False
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            reason = "another process listens there" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise BadInput("server.port", port, f"a free port on {host} is needed: {reason}") from error
        bound = cast("int", self._runner.addresses[0][1])
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        return bound

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ------------------------------------------------------------------------------------------ paths

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"].removeprefix("v1/")
        dialect = self._dialect(request)
        handlers: dict[tuple[str, str], Callable[[web.Request, LiveRun, Dialect], Awaitable[web.StreamResponse]]] = {
            ("POST", "chat/completions"): self._model_call,
            ("POST", "messages"): self._model_call,
            ("POST", "messages/count_tokens"): self._count_tokens,
            ("GET", "models"): self._models,
            ("HEAD", "api/hello"): self._hello,
            ("GET", "api/hello"): self._hello,
        }
        try:
            live = self._door.admit(request.match_info["run"], request.match_info["key"])
            handler = handlers.get((request.method, path))
            if handler is None:
                raise Fault(FaultKind.NOT_FOUND, f"{request.method} {path}: no such endpoint")
            return await handler(request, live, dialect)
        except Fault as fault:
            status, body = dialect.fault(fault)
            return web.json_response(body, status=status)

    def _dialect(self, request: web.Request) -> Dialect:
        """By the path's end; where that is no dialect's own, by the header in which a client shows its key."""
        if _OF_ANTHROPIC.search(request.path):
            return self._anthropic
        if _OF_OPENAI.search(request.path):
            return self._openai
        return self._anthropic if "x-api-key" in request.headers else self._openai

    async def _elsewhere(self, request: web.Request) -> web.StreamResponse:
        status, body = self._dialect(request).fault(
            Fault(FaultKind.UNAUTHORIZED, "a run's own address is /run/<run>/<key>/…")
        )
        return web.json_response(body, status=status)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._door.metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def _hello(self, request: web.Request, live: LiveRun, dialect: Dialect) -> web.StreamResponse:
        return web.Response(text="")

    async def _models(self, request: web.Request, live: LiveRun, dialect: Dialect) -> web.StreamResponse:
        model = {
            "id": self._model,
            "object": "model",
            "type": "model",
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "gyre",
            "display_name": self._model,
        }
        body = {"object": "list", "data": [model], "has_more": False, "first_id": self._model, "last_id": self._model}
        return web.json_response(body)

    async def _count_tokens(self, request: web.Request, live: LiveRun, dialect: Dialect) -> web.StreamResponse:
        conversation = self._anthropic.parse_count(await _json_body(request, self._request_bytes))
        return web.json_response({"input_tokens": live.count_tokens(conversation)})

    # ------------------------------------------------------------------------------------------ calls

    async def _model_call(self, request: web.Request, live: LiveRun, dialect: Dialect) -> web.StreamResponse:
        body = await _json_body(request, self._request_bytes)
        conversation = dialect.parse(body)
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = ModelRequest(dialect, conversation, body, headers)
        if conversation.stream:
            return await self._streamed(request, live, asked)
        call = await live.answer(asked)
        reply = live.session.reply(call, conversation.model)
        response = web.json_response(dialect.body(reply))
        return await _written(request, response, live, call)

    async def _streamed(self, request: web.Request, live: LiveRun, asked: ModelRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        hold = hold_of(live.session.opened.profile)
        answering = asyncio.get_running_loop().create_task(live.answer(asked))
        try:
            await self._held(request, response, answering, hold, asked.dialect)
            call = await answering
        except Fault as fault:
            if not response.prepared:
                raise
            await response.write(asked.dialect.fault_event(fault))
            await response.write_eof()
            return response
        finally:
            if not answering.done():
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
        reply = live.session.reply(call, asked.conversation.model)
        events = asked.dialect.events(reply, include_usage=asked.conversation.include_usage)
        return await _written(request, response, live, call, b"".join(events))

    async def _held(
        self,
        request: web.Request,
        response: web.StreamResponse,
        answering: asyncio.Task[Call],
        hold: Hold,
        dialect: Dialect,
    ) -> None:
        """Wait for the answer; after a while with the headers sent, and heartbeats behind them."""
        await asyncio.wait([answering], timeout=hold.headers_s)
        while not answering.done():
            if not response.prepared:
                await response.prepare(request)
            await response.write(dialect.heartbeat())
            await asyncio.wait([answering], timeout=hold.heartbeat_s)


async def _json_body(request: web.Request, most_bytes: int) -> dict[str, Any]:
    try:
        async with asyncio.timeout(READ_S):
            data = await request.read()
    except TimeoutError as error:
        raise bad_request(f"the body did not arrive whole in {READ_S:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(most_bytes) from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise bad_request(f"the body cannot be read: {_line(error)}") from error
    for encoding in reversed(request.headers.getall("Content-Encoding", [])):
        for name in reversed(encoding.split(",")):
            data = _decoded(data, name.strip().lower(), most_bytes)
    try:
        body = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {_line(error)}") from error
    if not isinstance(body, dict):
        raise bad_request("the body is not a JSON object")
    _check_depth(body)
    return cast("dict[str, Any]", body)


def _decoded(data: bytes, encoding: str, most_bytes: int) -> bytes:
    """The body without one encoding. Never more than `most_bytes`, however well it was packed."""
    if encoding in ("", "identity"):
        return data
    window = _WINDOWS.get(encoding)
    if window is None:
        raise bad_request(f"Content-Encoding: {encoding[:40]!r} is not allowed; one of gzip, deflate, identity")
    if encoding == "deflate" and data and data[0] & 0xF != 8:
        window = -zlib.MAX_WBITS  # without zlib's header, as many clients have it
    stream = zlib.decompressobj(window)
    try:
        plain = stream.decompress(data, most_bytes + 1)
    except zlib.error as error:
        raise bad_request(f"the body is not {encoding}: {_line(error)}") from error
    if len(plain) > most_bytes:
        raise _too_large(most_bytes)
    if not stream.eof or stream.unused_data:
        raise bad_request(f"the body is not {encoding}: it does not end where it should")
    return plain


def _check_depth(body: object) -> None:
    level: list[Any] = [body]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += cast("dict[str, Any]", value).values()
            elif isinstance(value, list):
                inner += cast("list[Any]", value)
        if not inner:
            return
        level = inner
    raise bad_request(f"the body is nested too deeply; at most {_DEEPEST} levels")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no value of JSON")


def _too_large(most_bytes: int) -> Fault:
    return Fault(FaultKind.TOO_LARGE, f"the request is too large: at most {most_bytes} bytes are taken")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


async def _written(
    request: web.Request, response: web.StreamResponse, live: LiveRun, call: Call, events: bytes = b""
) -> web.StreamResponse:
    """Write the answer out, and only then count it as delivered."""
    try:
        async with asyncio.timeout(WRITE_S):
            if not response.prepared:
                await response.prepare(request)
            if events:
                await response.write(events)
            await response.write_eof()
    except TimeoutError:
        _log.warning("call %s: its client did not read the answer in %.0f s", call.id, WRITE_S)
        if request.transport is not None:
            request.transport.abort()
        return response
    live.delivered(call)
    return response
