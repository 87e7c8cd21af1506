"""Ports for a process that cannot take a free one by itself, and needs it a minute later.

They lie below those that the kernel gives to connections (`net.ipv4.ip_local_port_range`): nothing takes one meanwhile but a
program that was told to.
"""

from __future__ import annotations

import random
import socket

from gyre.errors import Unavailable

_FIRST, _END = 18000, 32000
_TRIES = 1000


def free_port(host: str, count: int = 1) -> int:
    """The first of `count` free ones in a row. Raises Unavailable when there are none."""
    for _ in range(_TRIES):
        first = random.randrange(_FIRST, _END - count)
        if all(_is_free(host, first + place) for place in range(count)):
            return first
    raise Unavailable(f"no {count} free ports in a row on {host} from {_FIRST} to {_END}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError:
            return False
        return True
