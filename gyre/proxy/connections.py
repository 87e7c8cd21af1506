"""The connections that harnesses hold open, so that no crowd of silent ones takes the gateway's files away.

A connection is silent while no request is being answered on it. There may be many of those, since clients keep theirs
between calls; over the bound the one that has been silent longest is dropped, and every one is after a while.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

SILENT_S = 300.0
"""How long a connection may be silent."""
SILENT_CONNECTIONS = 2048
_LINE_BYTES = 65536
"""Of a request's path, and of a header: harnesses tell much about themselves in theirs."""


class Connections:
    """Makes the protocol of each connection of `runner`'s server."""

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner
        self._silent: dict[_Connection, None] = {}

    def __call__(self) -> web.RequestHandler:
        server = self._runner.server
        assert server is not None
        # A body is unpacked by `read_body`: what the server itself cannot unpack it answers in no dialect's form.
        options: dict[str, Any] = {
            "keepalive_timeout": SILENT_S,
            "access_log": None,
            "auto_decompress": False,
            "max_line_size": _LINE_BYTES,
            "max_field_size": _LINE_BYTES,
        }
        return _Connection(self, server, asyncio.get_running_loop(), options)

    def silent(self, connection: _Connection) -> None:
        self._silent[connection] = None
        while len(self._silent) > SILENT_CONNECTIONS:
            longest = next(iter(self._silent))
            del self._silent[longest]
            longest.force_close()

    def not_silent(self, connection: _Connection) -> None:
        self._silent.pop(connection, None)


class _Connection(web.RequestHandler):
    __slots__ = ("_connections",)

    def __init__(
        self, connections: Connections, server: web.Server, loop: asyncio.AbstractEventLoop, options: dict[str, Any]
    ) -> None:
        super().__init__(server, loop=loop, **options)
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.silent(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.not_silent(self)
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What was no request, or failed in a way that nobody foresaw: in a form that every dialect's client reads."""
        if status >= 500:
            super().handle_error(request, status, exc, message)  # it writes the log
            said, kind = "the gateway failed on this request; its log says why", "api_error"
        else:
            said, kind = " ".join((message or "").split())[:200], "invalid_request_error"
        error = {"type": kind, "message": said, "param": None, "code": None}
        response = web.json_response({"type": "error", "error": error}, status=status)
        response.force_close()
        return response

    def answering(self, yes: bool) -> None:
        if yes or self.transport is None:
            self._connections.not_silent(self)
        else:
            self._connections.silent(self)


@web.middleware
async def while_answering(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Takes a connection for not silent while its request is being answered."""
    connection = request.protocol
    assert isinstance(connection, _Connection)
    connection.answering(True)
    try:
        return await handler(request)
    finally:
        connection.answering(False)


def raise_file_limit() -> None:
    """As many open files as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
