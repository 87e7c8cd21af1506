"""Where an actor is served: `unix:/path` or `tcp:host:port`.

A Unix socket is its owner's only (mode 0600). TCP is taken on loopback addresses only: what is said there is
authenticated but not encrypted.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import BadInput, Refused

Accepted = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_BUFFER_BYTES = 4 * 1024 * 1024
_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True)
class UnixAddress:
    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.path, limit=_BUFFER_BYTES)

    def bind(self) -> socket.socket:
        """A bound socket. Refused when another process listens there; what a dead one left behind is replaced."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(listening.fileno(), 0o600)  # before it has a name that others could open
            try:
                listening.bind(str(self.path))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                self._remove_dead()
                listening.bind(str(self.path))
        except BaseException:
            listening.close()
            raise
        return listening

    def _remove_dead(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink(missing_ok=True)
                return
            except FileNotFoundError:
                return
            except BlockingIOError:  # it listens, and is busy
                pass
        raise Refused(f"{self} is already served by another process")


@dataclass(frozen=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{self.host}:{self.port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, limit=_BUFFER_BYTES)

    def bind(self) -> socket.socket:
        """A bound socket. Refused when the port is in use."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self.host, self.port))
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                raise Refused(f"{self} is already in use") from None
            raise
        return listening


Address = UnixAddress | TcpAddress


def parse(text: str) -> Address:
    """The address in `text`. Raises BadInput."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest.startswith("/"):
        if len(os.fsencode(rest)) > _SOCKET_PATH_BYTES:
            raise BadInput("address", text, f"a socket's path has at most {_SOCKET_PATH_BYTES} bytes")
        return UnixAddress(Path(rest))
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and port.isdecimal() and int(port) <= 65535:
        if not _is_loopback(host):
            raise BadInput("address", text, "only loopback hosts (127.0.0.1, ::1) are allowed")
        return TcpAddress(host, int(port))
    raise BadInput("address", text, "`unix:/path` and `tcp:host:port` are allowed")


async def listen(address: Address, accepted: Accepted) -> tuple[asyncio.Server, Address]:
    """Listen at `address`; also returns it with the port that the system chose. Raises Refused."""
    bound = address.bind()
    if isinstance(address, UnixAddress):
        return await asyncio.start_unix_server(accepted, sock=bound, limit=_BUFFER_BYTES), address
    server = await asyncio.start_server(accepted, sock=bound, limit=_BUFFER_BYTES)
    return server, TcpAddress(address.host, bound.getsockname()[1])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
