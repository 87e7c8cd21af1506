"""Where an actor is served: `unix:/path` or `tcp:host:port` on one machine, `tls:host:port` between machines.

A Unix socket is its owner's only (mode 0600). What is said over `tcp:` is authenticated but not encrypted, so it is taken
on loopback addresses only. `tls:` is for gyre.actors.peers, which brings the certificates.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyre.actors.pipe import Pipe
from gyre.errors import BadInput, Refused

_SOCKET_PATH_BYTES = 107
_SILENT_S = 20
"""After so long without a sign of the other machine's kernel a connection is taken for dead."""
_PROBES = 4


@dataclass(frozen=True)
class UnixAddress:
    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"

    async def connect(self) -> Pipe:
        _, pipe = await asyncio.get_running_loop().create_unix_connection(Pipe, str(self.path))
        return pipe

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
    kind: str = "tcp"
    """tcp or tls."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.kind}:{host}:{self.port}"

    async def connect(self) -> Pipe:
        _, pipe = await asyncio.get_running_loop().create_connection(Pipe, self.host, self.port)
        keep_alive(pipe.socket)
        return pipe

    def bind(self) -> socket.socket:
        """A bound socket. Refused when the port is in use or the address is not this machine's."""
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise Refused(f"{self} cannot be listened at: {error.strerror}") from None
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                raise Refused(f"{self} is already in use") from None
            raise Refused(f"{self} cannot be listened at: {error.strerror}") from None
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
    host = host.removeprefix("[").removesuffix("]")
    if kind in ("tcp", "tls") and host and port.isdecimal() and int(port) <= 65535:
        if kind == "tcp" and not _is_loopback(host):
            raise BadInput("address", text, "only loopback hosts (127.0.0.1, ::1) are allowed")
        return TcpAddress(host, int(port), kind)
    raise BadInput("address", text, "`unix:/path`, `tcp:host:port` and `tls:host:port` are allowed")


async def listen(address: Address, pipe: Callable[[], Pipe]) -> tuple[asyncio.Server, Address]:
    """Listen at `address`; also returns it with the port that the system chose. Raises Refused."""
    bound = address.bind()
    loop = asyncio.get_running_loop()
    if isinstance(address, UnixAddress):
        return await loop.create_unix_server(pipe, sock=bound), address
    server = await loop.create_server(pipe, sock=bound)
    return server, TcpAddress(address.host, bound.getsockname()[1], address.kind)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other machine has gone or is cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S // _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_S // _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_S * 1000)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
