"""How two processes greet: who each is, which of its lives, which protocol, and that both know the shared secret.

    server -> client   [protocol, name, incarnation, nonce]
    client -> server   [protocol, name, incarnation, nonce, hmac("client", both nonces)]
    server -> client   [hmac("server", both nonces)]

In place of its part either side may send ["refused", reason]. The secret itself is never sent. Between machines the
connection is under TLS before, names are those of the certificates, and the secret is empty.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from gyre.actors.frames import plain
from gyre.actors.pipe import Broken, Pipe
from gyre.errors import Refused

PROTOCOL = 2


@dataclass(frozen=True)
class Party:
    """One side of a connection. `incarnation` tells one life of its process from the next."""

    name: str
    incarnation: str

    @staticmethod
    def fresh(name: str) -> Party:
        return Party(name, secrets.token_hex(8))


def anyone(_: Party) -> str:
    """Refuses nobody."""
    return ""


async def greet(pipe: Pipe, secret: str, me: Party, refusal: Callable[[Party], str] = anyone) -> Party:
    """The server's part. Raises Broken when the other side fails it, or when there is a `refusal` of it."""
    nonce = secrets.token_bytes(16)
    _send(pipe, [PROTOCOL, me.name, me.incarnation, nonce])
    match await _receive(pipe):
        case ["refused", str(reason)]:
            raise Broken(f"the peer refuses us: {reason}")
        case [int(protocol), *_] if protocol != PROTOCOL:
            why = f"the peer speaks protocol {PROTOCOL}, we speak {protocol}"
            _refuse(pipe, why, f"the peer speaks protocol {protocol}, we speak {PROTOCOL}")
        case [int(), str(name), str(incarnation), bytes(their_nonce), bytes(proof)]:
            if not hmac.compare_digest(proof, _proof(secret, "client", nonce, their_nonce)):
                _refuse(pipe, "the shared secrets differ")
            peer = Party(name, incarnation)
            if why := refusal(peer):
                _refuse(pipe, why)
            _send(pipe, [_proof(secret, "server", nonce, their_nonce)])
            return peer
        case None:
            raise Broken(f"the peer left without a greeting ({pipe.reason})")
        case _:
            _refuse(pipe, "the greeting has a wrong shape")
    raise AssertionError


async def introduce(pipe: Pipe, secret: str, me: Party, refusal: Callable[[Party], str] = anyone) -> Party:
    """The client's part. Raises Broken, or Refused when one of the two will not have the other."""
    nonce = secrets.token_bytes(16)
    match await _receive(pipe):
        case [int(protocol), *_] if protocol != PROTOCOL:
            _send(pipe, ["refused", f"the peer speaks protocol {PROTOCOL}, we speak {protocol}"])
            raise Refused(f"the peer speaks protocol {protocol}, we speak {PROTOCOL}")
        case [int(), str(name), str(incarnation), bytes(their_nonce)]:
            peer = Party(name, incarnation)
        case None:
            raise Broken(f"the peer closed before its greeting ({pipe.reason})")
        case _:
            raise Broken("the peer's greeting has a wrong shape")
    if why := refusal(peer):
        _send(pipe, ["refused", why])
        raise Refused(why)
    _send(pipe, [PROTOCOL, me.name, me.incarnation, nonce, _proof(secret, "client", their_nonce, nonce)])
    match await _receive(pipe):
        case [bytes(proof)] if hmac.compare_digest(proof, _proof(secret, "server", their_nonce, nonce)):
            return peer
        case ["refused", str(reason)]:
            raise Refused(reason)
        case None:
            raise Broken(f"the peer closed during the greeting ({pipe.reason})")
        case _:
            raise Refused("the peer does not know the shared secret")


def _refuse(pipe: Pipe, to_peer: str, to_us: str = "") -> None:
    _send(pipe, ["refused", to_peer])
    raise Broken(f"the peer was refused: {to_us or to_peer}")


def _proof(secret: str, side: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), side.encode() + server_nonce + client_nonce, hashlib.sha256)


def _send(pipe: Pipe, parts: list[Any]) -> None:
    pipe.send(cast(bytes, msgpack.packb(parts, use_bin_type=True)))


async def _receive(pipe: Pipe) -> Any:
    data = await pipe.receive()
    return None if data is None else plain(data)
