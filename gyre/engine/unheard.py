"""Connections that end when the other side has not been heard of for long: left to itself TCP takes a quarter of an hour.

Both sides of a request have it: an engine that is cut off samples for nobody no longer than that, and the gateway waits no
longer for an answer that cannot come.
"""

from __future__ import annotations

import socket

UNHEARD_S = 8.0
_PROBE_S = 2


def end_unheard(connection: socket.socket, after_s: float = UNHEARD_S) -> None:
    """Of a listening socket: every connection that it accepts."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * after_s))
