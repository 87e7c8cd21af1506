"""Actors across processes of one machine: `serve` one here, `connect` to it there; the reference has tell and ask.

    async with serve(gateway_ref, f"unix:{job_dir}/gateway.sock", secret) as server:
        print(server.address)

    async with connect(address, secret) as gateway:
        await gateway.ready(10.0)
        report = await gateway.ask(DrainEngine(cell, move=True), 5.0, DrainReport)

Addresses are `unix:/path` (the socket is its owner's only, mode 0600) and `tcp:host:port` (loopback; port 0 lets the
system choose); between machines see gyre.actors.peers. Messages are declared records (gyre.wire). Both sides prove the
shared secret (gyre.actors.handshake).

What it promises: a message arrives at most once, and messages of one reference arrive in order. Nothing is sent a
second time by itself: an ask whose connection broke raises Unavailable, and the next use connects anew. The deadline
of an ask travels with it. An error arrives as what it was: Refused, BadInput, Unavailable, MailboxFull, ActorFailed …
`incarnation` tells one life of the served actor's process from the next. A watched remote actor has died when it has
ended, or when the connection to its process has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from gyre.actors.address import Address, TcpAddress, UnixAddress, listen, parse
from gyre.actors.channel import Channel
from gyre.actors.frames import ASK, TELL, WATCH, check_size
from gyre.actors.handshake import Party, greet, introduce
from gyre.actors.link import Link, Outgoing
from gyre.actors.pipe import HANDSHAKE_S, Broken, Pipe
from gyre.actors.reference import LocalRef, expected, patience_s
from gyre.deadline import FOREVER_S
from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.wire import pack_any, unpack_any

log = logging.getLogger(__name__)

R = TypeVar("R")


# ------------------------------------------------------------------------------------------------ the serving side


def serve(ref: LocalRef, address: str, secret: str) -> Server:
    """Let those who know `secret` reach `ref` at `address`, while the returned server is entered (or started)."""
    _check_secret(secret)
    return Server(ref, _local(address), secret)


class Server:
    """One served actor. `address` has the real port once started."""

    def __init__(self, ref: LocalRef, place: Address, secret: str) -> None:
        self._me = Party.fresh("")
        self._ref = ref
        self._place = place
        self._secret = secret
        self._server: asyncio.Server | None = None
        self._greeting: set[asyncio.Task[None]] = set()
        self._links: set[Link] = set()

    @property
    def address(self) -> str:
        return str(self._place)

    @property
    def incarnation(self) -> str:
        return self._me.incarnation

    async def start(self) -> None:
        """Listen. Refused when another process does so at the address."""
        self._server, self._place = await listen(self._place, lambda: Pipe(self._accepted))

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is None:
            return
        if isinstance(self._place, UnixAddress):
            self._place.path.unlink(missing_ok=True)
        self._server.close()
        greeting = tuple(self._greeting)
        for task in greeting:
            task.cancel()
        await asyncio.gather(*greeting, return_exceptions=True)
        await asyncio.gather(*(link.close("its server ends") for link in tuple(self._links)))
        await self._server.wait_closed()
        self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    def _accepted(self, pipe: Pipe) -> None:
        task = asyncio.get_running_loop().create_task(self._greet(pipe), name=f"greet a caller of {self._ref.name}")
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, pipe: Pipe) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                peer = await greet(pipe, self._secret, self._me)
        except (Broken, TimeoutError) as error:
            log.warning("a connection to %s is closed: %s", self._ref.name, error or "it did not greet in time")
            pipe.close("it was not let in")
            return
        except asyncio.CancelledError:
            pipe.abort("its server ends")
            raise
        link = Link(pipe, f"a caller of {self._ref.name}", peer, lambda _: self._ref)
        self._links.add(link)
        link.on_lost = lambda _: self._links.discard(link)


# ------------------------------------------------------------------------------------------------ the asking side


def connect(address: str, secret: str, incarnation: str = "") -> RemoteRef:
    """A reference to what is served at `address`. Nothing is connected before its first use.

    With `incarnation`, another life of the peer than that one is refused.
    """
    _check_secret(secret)
    place = _local(address)
    return RemoteRef(Channel(str(place), lambda: _dial(place, secret)), "", incarnation)


async def _dial(place: Address, secret: str) -> Link:
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            pipe = await place.connect()
            try:
                peer = await introduce(pipe, secret, Party.fresh(""))
            except BaseException:
                pipe.close("it was not let in")
                raise
    except Refused as error:
        raise Refused(f"{place} refused us: {error}") from None
    except (OSError, Broken, TimeoutError) as error:
        reason = "it does not greet in time" if isinstance(error, TimeoutError) else error
        raise Unavailable(f"{place} cannot be reached: {reason}") from error
    return Link(pipe, str(place), peer, _nobody)


def _nobody(actor: str) -> LocalRef:
    raise Refused(f"nobody is served here under {actor!r}")


class RemoteRef:
    """The reference to an actor of another process. One from `connect` owns its connection: `close` it, or enter it."""

    def __init__(self, channel: Channel, actor: str, incarnation: str) -> None:
        self._channel = channel
        self._actor = actor
        self._expected = incarnation

    def __repr__(self) -> str:
        return f"RemoteRef({self.name!r})"

    @property
    def name(self) -> str:
        return f"{self._channel.name}/{self._actor}" if self._actor else self._channel.name

    @property
    def incarnation(self) -> str:
        """Which life of the peer the connection leads to; empty while there is none."""
        link = self._channel.open_link
        return link.peer.incarnation if link is not None else ""

    async def ready(self, deadline_s: float) -> str:
        """Wait until the peer can be reached; returns its incarnation. Refused at once when it will not have us."""
        return await self._channel.ready(deadline_s, self._expected)

    def tell(self, message: object) -> None:
        """Send and forget; at most once. Raises MailboxFull when too much waits to be sent."""
        self._post(TELL, _packed(message), FOREVER_S, None)

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R:
        """As of Ref; Unavailable also when the peer cannot be reached or the connection breaks before the answer."""
        loop = asyncio.get_running_loop()
        left_s = patience_s(self.name, message, deadline_s, loop.time())
        answer: asyncio.Future[bytes] = loop.create_future()
        number = self._post(ASK, _packed(message), loop.time() + left_s, answer)
        try:
            async with asyncio.timeout(left_s):
                got = unpack_any(await answer)
        except TimeoutError:
            raise Unavailable(f"{self.name} did not answer {type(message).__name__} within {left_s:g} s") from None
        finally:
            if not answer.done() or answer.cancelled():
                self._channel.forget(number)
        return expected(self.name, message, got, reply)

    def on_end(self, call: Callable[[str], None]) -> Callable[[], None]:
        """As of Ref: the actor has ended, or the connection to its process, or there is none to be had."""

        def ended(answer: asyncio.Future[bytes]) -> None:
            if answer.cancelled():
                return
            error = answer.exception()
            call(str(error) if error is not None else answer.result().decode(errors="replace"))

        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        try:
            number = self._post(WATCH, b"", FOREVER_S, answer)
        except GyreError as error:
            call(str(error))
            return lambda: None
        answer.add_done_callback(ended)

        def take_back() -> None:
            if answer.cancel():
                self._channel.forget(number)

        return take_back

    async def close(self) -> None:
        """End the connection; what waits gets Unavailable."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    def _post(self, kind: str, body: bytes, until_s: float, answer: asyncio.Future[bytes] | None) -> int:
        number = self._channel.next_number()
        self._channel.post(Outgoing(kind, number, self._actor, self._expected, body, until_s, answer))
        return number


def _packed(message: object) -> bytes:
    return check_size(pack_any(message))


def _local(address: str) -> Address:
    place = parse(address)
    if isinstance(place, TcpAddress) and place.kind == "tls":
        raise BadInput(
            "address", address, "`unix:/path` and `tcp:host:port` are allowed between processes of a machine"
        )
    return place


def _check_secret(secret: str) -> None:
    if not secret:
        raise BadInput("secret", secret, "a shared secret must not be empty")
