"""The actor that tests reach across a connection, and its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gyre.actors.runtime import Actor, LocalRef, handles
from gyre.errors import BadInput, GyreError, NotLoaded, Refused, StorageFull, Unavailable
from gyre.wire import record


@record("test_remote.echo")
@dataclass(frozen=True)
class Echo:
    """-> Echo."""

    data: bytes
    after_s: float = 0.0


@record("test_remote.wait")
@dataclass(frozen=True)
class Wait:
    """-> Wait, when the gate opens; other messages are taken meanwhile."""

    number: int


@record("test_remote.block")
@dataclass(frozen=True)
class Block:
    """Like Wait, but nothing else is taken meanwhile."""


@record("test_remote.keep")
@dataclass(frozen=True)
class Keep:
    """-> Kept."""

    number: int


@record("test_remote.kept")
@dataclass(frozen=True)
class Kept:
    numbers: tuple[int, ...]


@record("test_remote.fail")
@dataclass(frozen=True)
class Fail:
    kind: str


@record("test_remote.undeclared")
@dataclass(frozen=True)
class AnswerOddly:
    """Answered with something that is no record."""


@dataclass(frozen=True)
class Undeclared:
    pass


class EngineDown(Unavailable):
    """A kind of error that the other side's process does not know."""


ERRORS: dict[str, Callable[[], Exception]] = {
    "Refused": lambda: Refused("the token is stale"),
    "BadInput": lambda: BadInput("port", 0, "1 to 65535 are allowed"),
    "Unavailable": lambda: Unavailable("no engine"),
    "NotLoaded": lambda: NotLoaded("no parameters are loaded"),
    "StorageFull": lambda: StorageFull("the disk is full"),
    "GyreError": lambda: GyreError("something"),
}


class Gate:
    """What messages to the peer wait at."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.reached = asyncio.Event()

    def open(self) -> None:
        self.opened.set()

    async def block(self, peer: LocalRef) -> None:
        """Have the peer busy until the gate opens."""
        peer.tell(Block())
        await self.reached.wait()


class Peer(Actor):
    def __init__(self, gate: Gate) -> None:
        self.kept: list[int] = []
        self.gate = gate

    @handles(Wait, concurrent=True)
    async def wait(self, message: Wait) -> Wait:
        await self.gate.opened.wait()
        return message

    @handles(Block)
    async def block(self, _: Block) -> None:
        self.gate.reached.set()
        await self.gate.opened.wait()

    @handles(Echo, concurrent=True)
    async def echo(self, message: Echo) -> Echo:
        await asyncio.sleep(message.after_s)
        return message

    @handles(Keep)
    async def keep(self, message: Keep) -> Kept:
        self.kept.append(message.number)
        return Kept(tuple(self.kept))

    @handles(Fail)
    async def fail(self, message: Fail) -> None:
        if message.kind == "ValueError":
            raise ValueError("unforeseen")
        if message.kind == "EngineDown":
            raise EngineDown("the engine is down")
        raise ERRORS[message.kind]()

    @handles(AnswerOddly)
    async def answer_oddly(self, _: AnswerOddly) -> Undeclared:
        return Undeclared()
