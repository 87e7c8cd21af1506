"""The way to one peer: one connection, made when it is needed and made anew when it broke, and what waits to be sent.

Nothing is sent a second time. Where the peer cannot be reached, all that waits is refused with the reason; with a
`pause`, so is what comes before the next try.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable

from gyre.actors.link import IN_FLIGHT, Link, Outgoing, wrong_incarnation
from gyre.actors.supervision import Backoff, MailboxFull
from gyre.errors import GyreError, NotLetIn, Unavailable

_OUTBOX_BYTES = 256 * 1024 * 1024
_RETRY_S = 0.05

NO_PAUSE = Backoff(0.0, 0.0)


class Channel:
    """`dial` makes a connection, or raises GyreError."""

    def __init__(self, name: str, dial: Callable[[], Awaitable[Link]], pause: Backoff = NO_PAUSE) -> None:
        self.name = name
        self.link: Link | None = None
        self._dial = dial
        self._pause = pause
        self._numbers = itertools.count(1)
        self._outbox: deque[Outgoing] = deque()
        self._outbox_bytes = 0
        self._sender: asyncio.Task[None] | None = None
        self._linking = asyncio.Lock()
        self._linked_now = asyncio.Event()
        self._failures = 0
        self._last: GyreError | None = None
        self._next_try_s = 0.0
        self._closed = False

    def next_number(self) -> int:
        return next(self._numbers)

    @property
    def open_link(self) -> Link | None:
        return self.link if self.link is not None and self.link.open else None

    def post(self, outgoing: Outgoing) -> None:
        """Send it, now or when its turn comes. Raises MailboxFull, or Unavailable when the channel is closed."""
        if self._closed:
            raise Unavailable(f"the reference to {self.name} was closed")
        link = self.open_link
        if link is not None and not self._outbox and link.has_room:
            link.send(outgoing)
            return
        size_bytes = self._outbox_bytes + len(outgoing.body)
        if len(self._outbox) >= IN_FLIGHT or (self._outbox and size_bytes > _OUTBOX_BYTES):
            raise MailboxFull(
                f"{len(self._outbox)} messages ({self._outbox_bytes} bytes) to {self.name} are waiting to be sent"
            )
        self._outbox.append(outgoing)
        self._outbox_bytes = size_bytes
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send_all(), name=f"send to {self.name}")

    def forget(self, number: int) -> None:
        if self.link is not None:
            self.link.forget(number)

    async def ready(self, deadline_s: float, wanted: str) -> str:
        """Wait until the peer can be reached; returns its incarnation. Refused at once when it will not have us."""
        last: GyreError | None = None
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        found = (await self._linked()).peer.incarnation
                    except NotLetIn:
                        raise
                    except Unavailable as error:
                        last = error
                    else:
                        if wanted not in ("", found):
                            raise wrong_incarnation(self.name, found, wanted)
                        return found
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise last or Unavailable(f"{self.name} could not be reached within {deadline_s:g} s") from None

    def adopt(self, link: Link) -> None:
        """Use a connection that the peer has made. It would not make one if it had one."""
        old, self.link = self.open_link, link
        if old is not None and old is not link:
            old.drop("the peer has connected anew")
        self._failures, self._last = 0, None
        self._linked_now.set()

    async def linked_within(self, s: float) -> Link | None:
        """The connection, when there is one within `s` seconds."""
        try:
            async with asyncio.timeout(s):
                while (link := self.open_link) is None:
                    self._linked_now.clear()
                    await self._linked_now.wait()
                return link
        except TimeoutError:
            return None

    async def close(self) -> None:
        """End the connection; what waits gets Unavailable."""
        self._closed = True
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
            await asyncio.wait((sender,))
        self._refuse_all(Unavailable(f"the reference to {self.name} was closed"))
        if self.link is not None:
            await self.link.close("it was closed")

    # ------------------------------------------------------------------ sending

    async def _send_all(self) -> None:
        """Ends when the outbox is empty. The next message starts another."""
        while self._outbox:
            try:
                link = await self._linked()
            except GyreError as error:
                self._refuse_all(error)
                return
            await link.room()
            if link.open and self._outbox:
                outgoing = self._outbox.popleft()
                self._outbox_bytes -= len(outgoing.body)
                link.send(outgoing)

    def _refuse_all(self, error: GyreError) -> None:
        while self._outbox:
            self._outbox.popleft().refuse(self.name, error)
        self._outbox_bytes = 0

    async def _linked(self) -> Link:
        """The open connection, made anew where there is none."""
        async with self._linking:
            if (link := self.open_link) is not None:
                return link
            now_s = asyncio.get_running_loop().time()
            if self._last is not None and now_s < self._next_try_s:
                raise type(self._last)(f"{self._last} (tried again in {self._next_try_s - now_s:.1f} s)")
            try:
                made = await self._dial()
            except GyreError as error:
                self._failed(error)
                raise
            if (link := self.open_link) is not None and link is not made:  # the peer was first
                made.drop("the peer has connected meanwhile")
                return link
            self.link = made
            self._failures, self._last = 0, None
            self._linked_now.set()
            return made

    def _failed(self, error: GyreError) -> None:
        self._failures += 1
        longest_s, first_s = self._pause.max_s, self._pause.initial_s
        pause_s = min(longest_s, first_s * 2.0 ** min(self._failures - 1, 30)) * random.uniform(0.5, 1.0)
        self._last = error
        self._next_try_s = asyncio.get_running_loop().time() + pause_s
