"""The proxy's front door: HTTP in the harness's dialect, one base URL a run.

`/run/<run>/<key>` is what a harness is given as its API's address; behind it stand the paths of the dialects. Every
answer that is not one is in the dialect's own form. Nothing of a stream is sent before all of it is safe,
and for how long its headers are held back the harness's profile says (gyre.harness.wire).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from aiohttp import web

from gyre.errors import BadInput
from gyre.harness.wire import Hold
from gyre.proxy.aside import LARGE_BYTES, Aside
from gyre.proxy.bodies import body_encodings, json_body, read_body, unpacked
from gyre.proxy.connections import Connections, raise_file_limit, while_answering
from gyre.proxy.conversation import Conversation, Reply, ToolForm, request_digest
from gyre.proxy.dialects.dialect import Dialect
from gyre.proxy.dialects.spoken import Spoken
from gyre.proxy.faults import Fault, FaultKind, too_long
from gyre.proxy.json_text import clean
from gyre.proxy.live_run import LiveRun, ModelRequest
from gyre.proxy.metering import CONTENT_TYPE
from gyre.proxy.session import Call

_MODEL = re.compile(r"models/(.+)")
_LETTERS_A_TOKEN = 32
"""A prompt with more letters than this for each token of the context is too long, and need not be rendered to know it."""
_LARGE_AT_ONCE = 2
"""Large bodies of one run that are read at the same time."""
WRITE_S = 300.0
"""The longest a client may take to read an answer."""
_BACKLOG = 1024
_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_JSON = {"Content-Type": "application/json; charset=utf-8"}
_Parse = Callable[[Mapping[str, Any]], Conversation]
_Handler = Callable[[web.Request, LiveRun, Dialect], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)


class Door(Protocol):
    def admit(self, run: str, key: str) -> LiveRun: ...

    def metrics(self, authorization: str) -> bytes | None: ...


@dataclass(frozen=True)
class _Read:
    """A request's body, understood."""

    conversation: Conversation
    body: Mapping[str, Any]
    digest: bytes
    size_bytes: int


@dataclass(frozen=True)
class _Asked:
    """What an answer's form depends on."""

    dialect: Dialect
    stream: bool
    include_usage: bool
    model: str
    forms: Mapping[str, ToolForm]
    max_tokens: int | None


class Front:
    def __init__(
        self, door: Door, spoken: Spoken, model: str, context_tokens: int, request_bytes: int, aside: Aside
    ) -> None:
        self._door = door
        self._spoken = spoken
        self._model = model
        self._context_tokens = context_tokens
        self._request_bytes = request_bytes
        self._aside = aside
        self._large: WeakKeyDictionary[LiveRun, asyncio.Semaphore] = WeakKeyDictionary()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._handlers: dict[tuple[str, str], _Handler] = {
            ("POST", "chat/completions"): self._model_call,
            ("POST", "responses"): self._model_call,
            ("POST", "messages"): self._model_call,
            ("POST", "messages/count_tokens"): self._count_tokens,
            ("GET", "models"): self._models,
            ("HEAD", "api/hello"): self._hello,
            ("GET", "api/hello"): self._hello,
        }
        self.base_url = ""

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        raise_file_limit()
        app = web.Application(client_max_size=self._request_bytes, middlewares=[while_answering])
        app.router.add_route("*", "/run/{run}/{key}/{path:.*}", self._serve)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._elsewhere)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                Connections(self._runner), host, port, reuse_address=True, backlog=_BACKLOG
            )
        except OSError as error:
            await self._runner.cleanup()
            reason = "another process listens there" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise BadInput("server.port", port, f"a free port on {host} is needed: {reason}") from error
        bound = cast("int", self._server.sockets[0].getsockname()[1])
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ------------------------------------------------------------------------------------------ paths

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"].removeprefix("v1/")
        dialect = self._spoken.of(request.path, request.headers)
        try:
            live = self._door.admit(request.match_info["run"], request.match_info["key"])
            handler = self._handlers.get((request.method, path))
            named = _MODEL.fullmatch(path)
            if named is not None and request.method == "GET":
                # Every name that a harness asks for is this model's.
                return _json(dialect.model(named[1]))
            if handler is None:
                raise Fault(FaultKind.NOT_FOUND, f"{request.method} {path}: no such endpoint")
            return await handler(request, live, dialect)
        except Fault as fault:
            status, body = dialect.fault(fault)
            # Some harnesses give up at once where nothing says when to come again.
            headers = {"Retry-After": "1"} if fault.kind is FaultKind.UNAVAILABLE else {}
            return _json(body, status, headers)

    async def _elsewhere(self, request: web.Request) -> web.StreamResponse:
        fault = Fault(FaultKind.UNAUTHORIZED, "a run's own address is /run/<run>/<key>/…")
        status, body = self._spoken.of(request.path, request.headers).fault(fault)
        return _json(body, status)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        body = self._door.metrics(request.headers.get("Authorization", ""))
        if body is None:
            return await self._elsewhere(request)  # a run learns nothing of the others
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _hello(self, request: web.Request, live: LiveRun, dialect: Dialect) -> web.StreamResponse:
        return web.Response(text="")

    async def _models(self, request: web.Request, live: LiveRun, dialect: Dialect) -> web.StreamResponse:
        return _json(dialect.models(self._model))

    async def _count_tokens(self, request: web.Request, live: LiveRun, dialect: Dialect) -> web.StreamResponse:
        live, read = await self._read(request, live, dialect, self._spoken.anthropic.parse_count)
        return _json({"input_tokens": await live.count_tokens(read.conversation, read.size_bytes)})

    async def _read(
        self, request: web.Request, live: LiveRun, dialect: Dialect, parse: _Parse
    ) -> tuple[LiveRun, _Read]:
        """What the request says, and its run as it is by then."""
        encodings = body_encodings(request)
        small = not encodings and request.content_length is not None and request.content_length < LARGE_BYTES
        async with nullcontext() if small else self._large.setdefault(live, asyncio.Semaphore(_LARGE_AT_ONCE)):
            data = await read_body(request, self._request_bytes)
            size_bytes = LARGE_BYTES if encodings else len(data)  # how much is packed, nobody knows yet
            read = await self._aside.run(size_bytes, lambda: self._understood(data, encodings, dialect, parse))
        return self._door.admit(request.match_info["run"], request.match_info["key"]), read

    def _understood(self, data: bytes, encodings: Sequence[str], dialect: Dialect, parse: _Parse) -> _Read:
        data = unpacked(data, encodings, self._request_bytes)
        body = json_body(data, self._context_tokens)
        conversation = parse(body)
        if len(data) > _LETTERS_A_TOKEN * self._context_tokens:
            letters = sum(
                len(part)
                for message in conversation.messages
                for part in (message.text, message.reasoning, *(call.arguments for call in message.tool_calls))
            )
            if letters > _LETTERS_A_TOKEN * self._context_tokens:
                raise too_long(letters // 4, self._context_tokens)
        return _Read(conversation, body, request_digest(dialect.name, body), len(data))

    # ------------------------------------------------------------------------------------------ calls

    async def _model_call(self, request: web.Request, live: LiveRun, dialect: Dialect) -> web.StreamResponse:
        live, call, asked = await self._begun(request, live, dialect)
        if asked.stream:
            return await self._streamed(request, live, call, asked)
        await live.answer(call)
        response = _json(dialect.body(_reply(live, call, asked)))
        return await _written(request, response, live, call)

    async def _begun(self, request: web.Request, live: LiveRun, dialect: Dialect) -> tuple[LiveRun, Call, _Asked]:
        """The request's call. Nothing of its body is kept while the answer is waited for."""
        live, read = await self._read(request, live, dialect, dialect.parse)
        headers = {name.lower(): value for name, value in request.headers.items()}
        said = read.conversation
        call = await live.begin(ModelRequest(dialect, said, read.body, headers, read.digest, read.size_bytes))
        return live, call, _Asked(dialect, said.stream, said.include_usage, said.model, said.forms, said.max_tokens)

    async def _streamed(self, request: web.Request, live: LiveRun, call: Call, asked: _Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers=_EVENTS)
        hold = live.session.wire.hold
        answering = asyncio.get_running_loop().create_task(live.answer(call))
        try:
            await self._held(request, response, answering, hold, asked.dialect)
            await answering
        except Fault as fault:
            if not response.prepared:
                raise
            await response.write_eof(asked.dialect.fault_event(fault))
            return response
        finally:
            if not answering.done():
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
        events = b"".join(asked.dialect.events(_reply(live, call, asked), include_usage=asked.include_usage))
        if not response.prepared:
            # The answer came before its headers were due: all of it is one write.
            return await _written(request, web.Response(body=events, headers=_EVENTS), live, call)
        return await _written(request, response, live, call, events)

    async def _held(
        self,
        request: web.Request,
        response: web.StreamResponse,
        answering: asyncio.Task[None],
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


def _reply(live: LiveRun, call: Call, asked: _Asked) -> Reply:
    return live.session.reply(call, asked.model, asked.forms, asked.max_tokens)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> web.Response:
    return web.Response(body=clean(value), status=status, headers={**_JSON, **headers})


async def _written(
    request: web.Request, response: web.StreamResponse, live: LiveRun, call: Call, events: bytes = b""
) -> web.StreamResponse:
    """Write the answer out, and only then count it as delivered."""
    try:
        async with asyncio.timeout(WRITE_S):
            if not response.prepared:
                await response.prepare(request)
            await response.write_eof(events)
    except TimeoutError:
        _log.warning("call %s: its client did not read the answer in %.0f s", call.id, WRITE_S)
        if request.transport is not None:
            request.transport.abort()
        return response
    await live.delivered(call)
    return response
