"""Actors across processes: `serve` one here, `connect` to it there; the reference has the same tell and ask.

    async with serve(gateway_ref, f"unix:{job_dir}/gateway.sock", secret) as server:
        print(server.address)

    async with connect(address, secret) as gateway:
        await gateway.ready(10.0)
        report = await gateway.ask(DrainEngine(cell, True, ""), 5.0, DrainReport)

Addresses are `unix:/path` (the socket is its owner's only, mode 0600) and `tcp:host:port` (loopback; port 0 lets the
system choose). Messages are declared records (gyre.wire). Both sides prove the shared secret (gyre.actors.frames).

What it promises: a message arrives at most once, and messages of one reference arrive in order. Nothing is sent a
second time by itself: an ask whose connection broke raises Unavailable, and the next use connects anew. The deadline
of an ask travels with it. An error arrives as what it was: Refused, BadInput, Unavailable, MailboxFull, ActorFailed …
`incarnation` tells one life of the served actor's process from the next.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from gyre.actors import frames
from gyre.actors.address import Address, UnixAddress, listen, parse
from gyre.actors.frames import ANSWER, ASK, ERROR, TELL, Broken, Frame
from gyre.actors.runtime import ActorFailed, MailboxFull, Ref
from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.wire import pack_any, unpack_any

log = logging.getLogger(__name__)

R = TypeVar("R")

_WRITE_S = 30.0
"""For the other side to take what is written; one that does not is cut off."""
_IN_FLIGHT = 1000
"""Asks of one connection being handled at a time, and messages of one reference waiting to be sent."""
_RETRY_S = 0.05


# ------------------------------------------------------------------------------------------------ the serving side


def serve(ref: Ref, address: str, secret: str) -> Server:
    """Let those who know `secret` reach `ref` at `address`, while the returned server is entered (or started)."""
    _check_secret(secret)
    return Server(ref, parse(address), secret)


class Server:
    """One served actor. `address` has the real port once started."""

    def __init__(self, ref: Ref, place: Address, secret: str) -> None:
        self.incarnation = secrets.token_hex(8)
        self._ref = ref
        self._place = place
        self._secret = secret
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return str(self._place)

    async def start(self) -> None:
        """Listen. Refused when another process does so at the address."""
        self._server, self._place = await listen(self._place, self._accepted)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is None:
            return
        if isinstance(self._place, UnixAddress):
            self._place.path.unlink(missing_ok=True)
        self._server.close()
        connections = tuple(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.timeout(frames.HANDSHAKE_S):
                await frames.greet(reader, writer, self._secret, self.incarnation)
            await _Conversation(self._ref, reader, writer).run()
        except (Broken, TimeoutError, ConnectionError) as error:
            log.warning("a connection to %s is closed: %s", self._ref.name, error or "it did not greet in time")
        except asyncio.CancelledError:
            return  # only close() cancels; asyncio, whose task this is, would report it as an error
        finally:
            self._connections.discard(task)
            writer.close()


class _Conversation:
    """The server's side of one connection that has been let in."""

    def __init__(self, ref: Ref, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ref = ref
        self._reader = reader
        self._writer = writer
        self._asks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_IN_FLIGHT)
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Until the client closes. Raises Broken."""
        try:
            while (frame := await frames.receive(self._reader)) is not None:
                if frame.kind == ASK:
                    await self._room.acquire()
                    ask = asyncio.get_running_loop().create_task(self._answer(frame), name=f"answer {frame.number}")
                    self._asks.add(ask)
                    ask.add_done_callback(self._asks.discard)
                    await asyncio.sleep(0)  # it is in the mailbox before the next message is looked at
                elif frame.kind == TELL:
                    self._tell(frame.body)
                else:
                    raise Broken(f"no client sends a frame of kind {frame.kind!r}")
        finally:
            asks = tuple(self._asks)
            for ask in asks:  # nobody waits for the answers any more
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)

    def _tell(self, body: bytes) -> None:
        try:
            self._ref.tell(unpack_any(body))
        except GyreError as error:
            log.warning("a message to %s is dropped: %s", self._ref.name, error)

    async def _answer(self, asked: Frame) -> None:
        try:
            result = await self._ref.ask(unpack_any(asked.body), asked.left_s, object)
            frame = Frame(ANSWER, asked.number, 0.0, _packed(result))
        except GyreError as error:
            frame = Frame(ERROR, asked.number, 0.0, frames.pack_error(error))
        except TypeError as error:  # the answer is no declared record
            log.exception("the answer of %s cannot be sent", self._ref.name)
            failed = ActorFailed(f"the answer of {self._ref.name} cannot be sent: {error}")
            frame = Frame(ERROR, asked.number, 0.0, frames.pack_error(failed))
        finally:
            self._room.release()
        try:
            async with self._writing, asyncio.timeout(_WRITE_S):
                await frames.send(self._writer, frame)
        except (TimeoutError, ConnectionError):
            self._writer.transport.abort()  # the reading side sees it, and the conversation ends


# ------------------------------------------------------------------------------------------------ the asking side


def connect(address: str, secret: str, incarnation: str = "") -> RemoteRef:
    """A reference to what is served at `address`. Nothing is connected before its first use.

    With `incarnation`, another life of the peer than that one is refused.
    """
    _check_secret(secret)
    return RemoteRef(parse(address), secret, incarnation)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    number: int
    body: bytes
    until_s: float
    answer: asyncio.Future[bytes] | None


class RemoteRef:
    """The reference to an actor of another process. It owns its connection: `close` it, or enter it."""

    def __init__(self, place: Address, secret: str, incarnation: str) -> None:
        self._place = place
        self._secret = secret
        self._expected = incarnation
        self._numbers = itertools.count(1)
        self._outbox: deque[_Outgoing] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._link: _Link | None = None
        self._linking = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"RemoteRef({self.name!r})"

    @property
    def name(self) -> str:
        return str(self._place)

    @property
    def incarnation(self) -> str:
        """Which life of the peer the connection leads to; empty while there is none."""
        return self._link.incarnation if self._link is not None and self._link.open else ""

    async def ready(self, deadline_s: float) -> str:
        """Wait until the peer can be reached; returns its incarnation. Refused at once when it will not have us."""
        last: GyreError | None = None
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        return (await self._linked()).incarnation
                    except Unavailable as error:
                        last = error
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise last or Unavailable(f"{self.name} could not be reached within {deadline_s:g} s") from None

    def tell(self, message: object) -> None:
        """Send and forget; at most once. Raises MailboxFull when too much waits to be sent."""
        self._post(_Outgoing(next(self._numbers), _packed(message), float("inf"), None))

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R:
        """As of Ref; Unavailable also when the peer cannot be reached or the connection breaks before the answer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        number = next(self._numbers)
        self._post(_Outgoing(number, _packed(message), loop.time() + deadline_s, answer))
        try:
            async with asyncio.timeout(deadline_s):
                got = unpack_any(await answer)
        except TimeoutError:
            raise Unavailable(f"{self.name} did not answer {type(message).__name__} within {deadline_s:g} s") from None
        finally:
            if self._link is not None:
                self._link.waiting.pop(number, None)
        if not isinstance(got, reply):
            raise BadInput(
                f"the answer of {self.name} to {type(message).__name__}", got, f"a {reply.__name__} is expected"
            )
        return got

    async def close(self) -> None:
        """End the connection; what waits gets Unavailable."""
        self._closed = True
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
            await asyncio.wait((sender,))
        self._refuse_all(Unavailable(f"the reference to {self.name} was closed"))
        if self._link is not None:
            await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    # ------------------------------------------------------------------ sending

    def _post(self, outgoing: _Outgoing) -> None:
        if self._closed:
            raise Unavailable(f"the reference to {self.name} was closed")
        if len(self._outbox) >= _IN_FLIGHT:
            raise MailboxFull(f"{len(self._outbox)} messages to {self.name} are waiting to be sent")
        self._outbox.append(outgoing)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send_all(), name=f"send to {self.name}")

    async def _send_all(self) -> None:
        """Ends when the outbox is empty. The next message starts another."""
        while self._outbox:
            try:
                link = await self._linked()
            except GyreError as error:
                self._refuse_all(error)
                return
            await link.send(self._outbox.popleft())

    def _refuse_all(self, error: GyreError) -> None:
        while self._outbox:
            answer = self._outbox.popleft().answer
            if answer is None:
                log.warning("a message to %s is dropped: %s", self.name, error)
            elif not answer.done():
                answer.set_exception(error)

    async def _linked(self) -> _Link:
        """The open connection, made anew where there is none."""
        async with self._linking:
            if self._link is None or not self._link.open:
                if self._link is not None:
                    await self._link.close()
                self._link = await _link(self._place, self._secret, self._expected)
            return self._link


class _Link:
    """The client's side of one connection: whoever waits on it for an answer."""

    def __init__(self, name: str, incarnation: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.incarnation = incarnation
        self.waiting: dict[int, asyncio.Future[bytes]] = {}
        self.open = True
        self._name = name
        self._reader = reader
        self._writer = writer
        self._listener = asyncio.get_running_loop().create_task(self._listen(), name=f"listen to {name}")

    async def send(self, outgoing: _Outgoing) -> None:
        left_s = outgoing.until_s - asyncio.get_running_loop().time()
        if outgoing.answer is None:
            frame = Frame(TELL, outgoing.number, 0.0, outgoing.body)
        elif outgoing.answer.done() or left_s <= 0:
            return  # the asker has given up
        else:
            frame = Frame(ASK, outgoing.number, left_s, outgoing.body)
            self.waiting[outgoing.number] = outgoing.answer
        try:
            async with asyncio.timeout(_WRITE_S):
                await frames.send(self._writer, frame)
        except (TimeoutError, ConnectionError) as error:
            self._break(f"it could not be written to ({error or 'it takes nothing'})")

    async def close(self) -> None:
        self._break("it was closed")
        self._listener.cancel()
        await asyncio.wait((self._listener,))

    async def _listen(self) -> None:
        try:
            while (frame := await frames.receive(self._reader)) is not None:
                answer = self.waiting.pop(frame.number, None)
                if answer is None or answer.done():
                    continue
                if frame.kind == ANSWER:
                    answer.set_result(frame.body)
                elif frame.kind == ERROR:
                    answer.set_exception(frames.unpack_error(frame.body))
                else:
                    raise Broken(f"no server sends a frame of kind {frame.kind!r}")
            self._break("the peer closed it")
        except Broken as error:
            self._break(str(error))

    def _break(self, reason: str) -> None:
        self.open = False
        self._writer.close()
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(Unavailable(f"the connection to {self._name} broke before the answer: {reason}"))
        self.waiting.clear()


async def _link(place: Address, secret: str, expected_incarnation: str) -> _Link:
    try:
        async with asyncio.timeout(frames.HANDSHAKE_S):
            reader, writer = await place.connect()
            try:
                incarnation = await frames.introduce(reader, writer, secret)
            except BaseException:
                writer.close()
                raise
    except Refused as error:
        raise Refused(f"{place} refused us: {error}") from None
    except (OSError, Broken, TimeoutError) as error:
        reason = "it does not greet in time" if isinstance(error, TimeoutError) else error
        raise Unavailable(f"{place} cannot be reached: {reason}") from error
    if expected_incarnation not in ("", incarnation):
        writer.close()
        raise Refused(f"{place} is incarnation {incarnation}, and {expected_incarnation} is wanted")
    return _Link(str(place), incarnation, reader, writer)


def _packed(message: object) -> bytes:
    body = pack_any(message)
    frames.check_size(body)
    return body


def _check_secret(secret: str) -> None:
    if not secret:
        raise BadInput("secret", secret, "a shared secret must not be empty")
