"""What two processes say to each other once they have greeted: frames, their limit, and errors as bodies.

A frame is one blob of a connection (gyre.actors.pipe): msgpack of `[kind, number, seconds left, actor, body]`. Both sides
may ask; `number` is the asking side's.

    ask, tell, watch        to the actor named
    answer, error           to the ask or the watch with that number
    forget                  the asker with that number has given up
    bye                     the connection ends; the body says why
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import msgpack

from gyre.actors.pipe import Broken
from gyre.actors.supervision import ActorFailed, ActorStopped, MailboxFull
from gyre.errors import BadInput, GyreError, NotLoaded, OthersAway, Refused, StorageFull, Unavailable

MAX_FRAME_BYTES = 256 * 1024 * 1024
_AROUND_BODY_BYTES = 512
"""More than everything but the body takes."""

ASK, TELL, WATCH, ANSWER, ERROR, FORGET, BYE = "ask", "tell", "watch", "answer", "error", "forget", "bye"


class Frame(NamedTuple):
    """`left_s` is the time the asker still waits (not a clock's reading); `actor` is "" where only one is served."""

    kind: str
    number: int
    left_s: float
    actor: str
    body: bytes


def check_size(body: bytes) -> bytes:
    """The body; BadInput when it would make a frame over the limit."""
    if len(body) > MAX_FRAME_BYTES - _AROUND_BODY_BYTES:
        raise BadInput(
            "message size in bytes", len(body), f"at most {MAX_FRAME_BYTES - _AROUND_BODY_BYTES} are allowed"
        )
    return body


def pack_frame(frame: Frame) -> bytes:
    return cast(bytes, msgpack.packb(frame, use_bin_type=True))


def unpack_frame(data: bytes | bytearray) -> Frame:
    """Raises Broken."""
    match plain(data):
        case [str(kind), int(number), float(left_s), str(actor), bytes(body)] if 0 <= left_s < 1e9:
            return Frame(kind, number, left_s, actor, body)
        case _:
            raise Broken("a frame has a wrong shape")


def plain(data: bytes | bytearray) -> Any:
    """Raises Broken."""
    try:
        return msgpack.unpackb(data, raw=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise Broken("a frame is not msgpack") from error


# ------------------------------------------------------------------------------------------------ errors as bodies

_ERRORS: dict[str, type[GyreError]] = {
    kind.__name__: kind
    for kind in (
        *(GyreError, BadInput, Refused, NotLoaded, OthersAway, Unavailable, StorageFull),
        *(MailboxFull, ActorStopped, ActorFailed),
    )
}


def pack_error(error: GyreError) -> bytes:
    """The error as the nearest of the kinds that every process knows."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
    told = [repr(error.value)[:200], error.field, error.allowed] if isinstance(error, BadInput) else []
    return cast(bytes, msgpack.packb([kind, str(error), *told], use_bin_type=True))


def unpack_error(data: bytes) -> GyreError:
    """Raises Broken."""
    match plain(data):
        case ["BadInput", str(text), str(value), str(field), str(allowed)]:
            error = BadInput(field, value, allowed)
            error.args = (text,)
            return error
        case [str(kind), str(text)]:
            return _ERRORS.get(kind, GyreError)(text)
        case _:
            return GyreError("the peer reported an error in a shape that we do not know")
