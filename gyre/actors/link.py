"""One open connection between two processes that have greeted: both ask over it, and both answer.

What it promises: an ask is handed to its actor at most once; one whose asker has given up is not handed on. Asks of the
peer in hand are bounded, and while the peer does not take our answers no more are begun. When the connection ends,
whoever waits here for an answer gets Unavailable, and the peer's asks that wait in mailboxes are given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gyre.actors import frames
from gyre.actors.frames import ANSWER, BYE, ERROR, FORGET, WATCH, Frame
from gyre.actors.handshake import Party
from gyre.actors.pipe import Broken, Pipe
from gyre.actors.reference import Served
from gyre.actors.supervision import ActorFailed, MailboxFull
from gyre.actors.watches import Watches
from gyre.errors import GyreError, NotLetIn, Unavailable
from gyre.wire import pack_any, unpack_any

log = logging.getLogger(__name__)

IN_FLIGHT = 1000
"""Asks of one side that the other has in hand."""
_HELD_BYTES = 64 * 1024 * 1024
"""Of asks that wait until the peer takes answers again."""
_SLACK = 2
"""The answering side notices later than the asker that an ask has been given up."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way: to which actor of the peer, in which life of it ("" for any)."""

    kind: str
    number: int
    actor: str
    incarnation: str
    body: bytes
    until_s: float
    answer: asyncio.Future[bytes] | None

    def refuse(self, name: str, error: GyreError) -> None:
        if self.answer is None:
            log.warning("a message to %s is dropped: %s", name, error)
        elif not self.answer.done():
            self.answer.set_exception(error)


class Link:
    """`find` gives the local actor that the peer names; it raises GyreError."""

    def __init__(self, pipe: Pipe, name: str, peer: Party, find: Callable[[str], Served]) -> None:
        self.peer = peer
        self.open = True
        self.opened_s = asyncio.get_running_loop().time()
        self.on_lost: Callable[[str], None] = lambda _: None
        self._pipe = pipe
        self._name = name
        self._find = find
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._watching: dict[int, asyncio.Future[bytes]] = {}
        self._room = asyncio.Event()
        self._asked: dict[int, tuple[asyncio.Future[object], asyncio.TimerHandle]] = {}
        self._held: deque[tuple[Frame, float]] = deque()
        self._held_bytes = 0
        self._watched: Watches[int] = Watches()
        self._ended = asyncio.Event()
        pipe.take_over(self, frames.MAX_FRAME_BYTES)

    # ------------------------------------------------------------------ asking

    @property
    def has_room(self) -> bool:
        """Whether the next message can go now."""
        return self._pipe.can_write and len(self._waiting) < IN_FLIGHT

    async def room(self) -> None:
        """Until there is room, or the connection has ended; it ends when the peer takes nothing."""
        while self.open and not self.has_room:
            self._room.clear()
            await self._room.wait()

    def send(self, outgoing: Outgoing) -> None:
        number, answer = outgoing.number, outgoing.answer
        if outgoing.incarnation not in ("", self.peer.incarnation):
            outgoing.refuse(self._name, wrong_incarnation(self._name, self.peer.incarnation, outgoing.incarnation))
            return
        left_s = 0.0
        if answer is not None:
            if answer.done():
                return
            if outgoing.kind == WATCH:
                self._watching[number] = answer
            else:
                left_s = outgoing.until_s - self._loop.time()
                if left_s <= 0:
                    return  # the asker has given up
                self._waiting[number] = answer
        self._pipe.send(frames.pack_frame(Frame(outgoing.kind, number, left_s, outgoing.actor, outgoing.body)))

    def forget(self, number: int) -> None:
        """The asker, or the watcher, does not wait any more."""
        known = self._waiting.pop(number, None) or self._watching.pop(number, None)
        self._room.set()
        if known is not None and self.open and self._pipe.can_write:
            self._pipe.send(frames.pack_frame(Frame(FORGET, number, 0.0, "", b"")))

    async def close(self, reason: str) -> None:
        """End the connection, and wait until it has."""
        self.drop(reason)
        await self._ended.wait()

    def drop(self, reason: str) -> None:
        """End the connection, and tell the peer why."""
        if self.open:
            self._pipe.send(frames.pack_frame(Frame(BYE, 0, 0.0, "", reason.encode())))
            self._pipe.close(reason)
            self._end(reason)

    # ------------------------------------------------------------------ called by the pipe

    def blob(self, data: bytearray) -> None:
        frame = frames.unpack_frame(data)
        match frame.kind:
            case "ask":
                self._on_ask(frame)
            case "answer" | "error":
                self._on_answer(frame)
            case "tell":
                self._on_tell(frame)
            case "watch":
                self._on_watch(frame)
            case "forget":
                self._on_forget(frame.number)
            case "bye":
                reason = frame.body.decode(errors="replace")[:500]
                self._pipe.close(reason)
                self._end(f"the peer closed it: {reason}")
            case _:
                raise Broken(f"nobody sends a frame of kind {frame.kind[:20]!r}")

    def broken(self, reason: str) -> None:
        log.warning("the connection with %s is closed: %s", self._name, reason)
        self.drop(reason)

    def lost(self, reason: str) -> None:
        self._end(reason)
        self._ended.set()

    def writable(self) -> None:
        self._room.set()
        now_s = self._loop.time()
        while self._held and self._pipe.can_write:
            frame, came_s = self._held.popleft()
            self._held_bytes -= len(frame.body)
            self._begin(frame, frame.left_s - (now_s - came_s))

    def _end(self, reason: str) -> None:
        if not self.open:
            return
        self.open = False
        broke = f"the connection to {self._name} broke before the answer: {reason}"
        gone = f"the connection to {self._name} ended: {reason}"
        for waiting, why in ((self._waiting, broke), (self._watching, gone)):
            for answer in waiting.values():
                if not answer.done():
                    answer.set_exception(Unavailable(why))
            waiting.clear()
        for asked, timer in self._asked.values():  # nobody waits for the answers any more
            timer.cancel()
            asked.cancel()
        self._watched.end_all()
        self._held.clear()
        self._room.set()
        self.on_lost(reason)

    # ------------------------------------------------------------------ answering

    def _on_tell(self, frame: Frame) -> None:
        try:
            self._find(frame.actor).tell(unpack_any(frame.body))
        except GyreError as error:
            log.warning("a message from %s to %r is dropped: %s", self._name, frame.actor, error)

    def _on_ask(self, frame: Frame) -> None:
        if frame.number in self._asked or len(self._asked) + len(self._held) >= _SLACK * IN_FLIGHT:
            raise Broken(f"more than {IN_FLIGHT} asks at a time, or two with one number")
        if self._pipe.can_write:
            self._begin(frame, frame.left_s)
        elif self._held and self._held_bytes + len(frame.body) > _HELD_BYTES:
            full = MailboxFull(f"{len(self._held)} asks ({self._held_bytes} bytes) wait until answers are taken again")
            self._reply(ERROR, frame.number, frames.pack_error(full))
        else:
            self._held.append((frame, self._loop.time()))
            self._held_bytes += len(frame.body)

    def _begin(self, frame: Frame, left_s: float) -> None:
        if left_s <= 0:
            return
        number = frame.number
        try:
            answer = self._find(frame.actor).request(unpack_any(frame.body), left_s)
        except GyreError as error:
            self._reply(ERROR, number, frames.pack_error(error))
            return
        self._asked[number] = (answer, self._loop.call_later(left_s, answer.cancel))
        answer.add_done_callback(partial(self._answered, number, frame.actor))

    def _answered(self, number: int, actor: str, answer: asyncio.Future[object]) -> None:
        _, timer = self._asked.pop(number)
        timer.cancel()
        if answer.cancelled():
            return
        error = answer.exception()
        try:
            if error is not None:
                raise error
            kind, body = ANSWER, frames.check_size(pack_any(answer.result()))
        except GyreError as told:
            kind, body = ERROR, frames.pack_error(told)
        except TypeError as unsendable:
            log.exception("the answer of %r cannot be sent", actor)
            kind, body = ERROR, frames.pack_error(ActorFailed(f"the answer cannot be sent: {unsendable}"))
        self._reply(kind, number, body)

    def _on_watch(self, frame: Frame) -> None:
        number = frame.number
        if number in self._watched or len(self._watched) >= _SLACK * IN_FLIGHT:
            raise Broken(f"{len(self._watched)} watches are kept for it, and one more cannot be")

        try:
            ref = self._find(frame.actor)
        except GyreError as error:
            self._reply(ERROR, number, frames.pack_error(error))
        else:
            self._watched.begin(number, ref, lambda reason: self._reply(ANSWER, number, reason.encode()))

    def _on_forget(self, number: int) -> None:
        if number in self._asked:
            self._asked[number][0].cancel()
        self._watched.end(number)

    def _reply(self, kind: str, number: int, body: bytes) -> None:
        if self.open:
            self._pipe.send(frames.pack_frame(Frame(kind, number, 0.0, "", body)))

    # ------------------------------------------------------------------ answered

    def _on_answer(self, frame: Frame) -> None:
        answer = self._waiting.pop(frame.number, None) or self._watching.pop(frame.number, None)
        if answer is None or answer.done():
            return
        self._room.set()
        if frame.kind == ANSWER:
            answer.set_result(frame.body)
        else:
            answer.set_exception(frames.unpack_error(frame.body))


def wrong_incarnation(name: str, found: str, wanted: str) -> NotLetIn:
    return NotLetIn(f"{name} is incarnation {found}, and {wanted} is wanted")
