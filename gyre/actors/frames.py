"""Frames on a connection between two processes: their shape, their limit, and the handshake that opens it.

A frame is a length (4 bytes, big-endian) and that many bytes of msgpack. The handshake proves on both sides that the
shared secret is known, without sending it: each side answers the other's nonce with an HMAC.

    server -> client   [protocol, incarnation, nonce]
    client -> server   [protocol, nonce, hmac("client", both nonces)]
    server -> client   [hmac("server", both nonces)]

After it: ask, tell (client to server) and answer, error (server to client), each as `Frame`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from gyre.actors.supervision import ActorFailed, ActorStopped, MailboxFull
from gyre.errors import BadInput, GyreError, Refused, StorageFull, Unavailable

PROTOCOL = 1
MAX_FRAME_BYTES = 256 * 1024 * 1024
HANDSHAKE_S = 10.0
_MAX_HANDSHAKE_BYTES = 1024
_LENGTH_BYTES = 4
_AROUND_BODY_BYTES = 64
"""More than kind, number, time left and their msgpack headers take."""

ASK, TELL, ANSWER, ERROR = "ask", "tell", "answer", "error"


@dataclass(frozen=True, slots=True)
class Frame:
    """`number` pairs an ask with its answer; `left_s` is the time the asker still waits (not a clock's reading)."""

    kind: str
    number: int
    left_s: float
    body: bytes


class Broken(Exception):
    """The other side does not keep to the protocol; the connection has to end."""


def check_size(body: bytes) -> None:
    """BadInput when the body would make a frame over the limit."""
    if len(body) > MAX_FRAME_BYTES - _AROUND_BODY_BYTES:
        raise BadInput(
            "message size in bytes", len(body), f"at most {MAX_FRAME_BYTES - _AROUND_BODY_BYTES} are allowed"
        )


async def send(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Write one frame, and wait while the other side is slow. The caller sees to it that only one writes at a time."""
    data = cast(bytes, msgpack.packb((frame.kind, frame.number, frame.left_s, frame.body), use_bin_type=True))
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big"))
    writer.write(data)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None when the other side has closed. Raises Broken."""
    data = await _receive_bytes(reader, MAX_FRAME_BYTES)
    if data is None:
        return None
    match _plain(data):
        case [str(kind), int(number), float(left_s), bytes(body)] if 0 <= left_s < 1e9:
            return Frame(kind, number, left_s, body)
        case _:
            raise Broken("a frame has a wrong shape")


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, incarnation: str) -> None:
    """The server's part of the handshake. Raises Broken when the other side fails it."""
    nonce = secrets.token_bytes(16)
    _send_plain(writer, [PROTOCOL, incarnation, nonce])
    match await _receive_plain(reader):
        case [int(protocol), bytes(their_nonce), bytes(proof)]:
            if not hmac.compare_digest(proof, _proof(secret, "client", nonce, their_nonce)):
                refusal = "the shared secrets differ"
            elif protocol != PROTOCOL:
                refusal = f"the peer speaks protocol {PROTOCOL}, we speak {protocol}"
            else:
                _send_plain(writer, [_proof(secret, "server", nonce, their_nonce)])
                return
        case None:
            raise Broken("the peer left without a greeting")
        case _:
            raise Broken("the peer's greeting has a wrong shape")
    _send_plain(writer, ["refused", refusal])
    await writer.drain()
    raise Broken(f"the peer was refused: {refusal}")


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> str:
    """The client's part of the handshake; returns the server's incarnation. Raises Broken, or Refused."""
    nonce = secrets.token_bytes(16)
    match await _receive_plain(reader):
        case [int(protocol), str(incarnation), bytes(their_nonce)]:
            if protocol != PROTOCOL:
                raise Refused(f"the peer speaks protocol {protocol}, we speak {PROTOCOL}")
        case None:
            raise Broken("the peer closed before its greeting")
        case _:
            raise Broken("the peer's greeting has a wrong shape")
    _send_plain(writer, [PROTOCOL, nonce, _proof(secret, "client", their_nonce, nonce)])
    match await _receive_plain(reader):
        case [bytes(proof)] if hmac.compare_digest(proof, _proof(secret, "server", their_nonce, nonce)):
            return incarnation
        case ["refused", str(reason)]:
            raise Refused(reason)
        case None:
            raise Broken("the peer closed during the greeting")
        case _:
            raise Refused("the peer does not know the shared secret")


def _proof(secret: str, side: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), side.encode() + server_nonce + client_nonce, hashlib.sha256)


def _send_plain(writer: asyncio.StreamWriter, plain: list[Any]) -> None:
    data = cast(bytes, msgpack.packb(plain, use_bin_type=True))
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


async def _receive_plain(reader: asyncio.StreamReader) -> Any:
    data = await _receive_bytes(reader, _MAX_HANDSHAKE_BYTES)
    return None if data is None else _plain(data)


async def _receive_bytes(reader: asyncio.StreamReader, limit_bytes: int) -> bytes | None:
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > limit_bytes:
            raise Broken(f"a frame of {length} bytes is over the limit of {limit_bytes}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _plain(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise Broken("a frame is not msgpack") from error


# ------------------------------------------------------------------------------------------------ errors as bodies

_ERRORS: dict[str, type[GyreError]] = {
    kind.__name__: kind
    for kind in (GyreError, BadInput, Refused, Unavailable, StorageFull, MailboxFull, ActorStopped, ActorFailed)
}


def pack_error(error: GyreError) -> bytes:
    """The error as the nearest of the kinds that every process knows."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
    told = [repr(error.value)[:200], error.field, error.allowed] if isinstance(error, BadInput) else []
    return cast(bytes, msgpack.packb([kind, str(error), *told], use_bin_type=True))


def unpack_error(data: bytes) -> GyreError:
    match _plain(data):
        case ["BadInput", str(text), str(value), str(field), str(allowed)]:
            error = BadInput(field, value, allowed)
            error.args = (text,)
            return error
        case [str(kind), str(text)]:
            return _ERRORS.get(kind, GyreError)(text)
        case _:
            return GyreError("the peer reported an error in a shape that we do not know")
