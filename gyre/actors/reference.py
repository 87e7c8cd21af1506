"""The reference to an actor of this process, and the deadline that travels with a request.

While an actor handles an ask, each ask that it makes for it ends no later than the asker's patience does. What an actor
does on its own account (timers, owned tasks) is not bound by that.
"""

# An actor's reference and its host are two sides of one thing.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from gyre.actors.inspection import ListActors
from gyre.actors.mailbox import Envelope
from gyre.actors.supervision import ActorStopped
from gyre.deadline import FOREVER_S, handling_until_s
from gyre.errors import BadInput, Unavailable

if TYPE_CHECKING:
    from gyre.actors.host import Host

log = logging.getLogger(__name__)

R = TypeVar("R")


def patience_s(name: str, message: object, deadline_s: float, now_s: float) -> float:
    """How long an ask may take: its own deadline, or what is left of the one it is made for. Raises Unavailable."""
    left_s = min(deadline_s, handling_until_s.get() - now_s)
    if left_s <= 0:
        raise Unavailable(f"{name} is not asked {type(message).__name__}: the time of the request it is for is over")
    return left_s


def expected(name: str, message: object, got: object, reply: type[R]) -> R:
    """The answer, if it is a `reply`. Raises BadInput."""
    if not isinstance(got, reply):
        raise BadInput(f"the answer of {name} to {type(message).__name__}", got, f"a {reply.__name__} is expected")
    return got


class Served(Protocol):
    """What the other side of a connection reaches here: an actor, as LocalRef has it, or what stands before one."""

    def request(self, message: object, left_s: float) -> asyncio.Future[object]: ...

    def tell(self, message: object) -> None: ...

    def on_end(self, call: Callable[[str], None]) -> Callable[[], None]: ...


class LocalRef:
    """The reference to an actor of this process. It stays good through restarts of the actor."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __repr__(self) -> str:
        return f"LocalRef({self.name!r})"

    @property
    def name(self) -> str:
        return self._host.name

    def tell(self, message: object) -> None:
        host = self._host
        try:
            host.put(Envelope(message, None, FOREVER_S, host.loop.time()))
        except ActorStopped:
            log.info("%s has ended; %s is dropped", self.name, type(message).__name__)

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R:
        left_s = patience_s(self.name, message, deadline_s, self._host.loop.time())
        answer = self.request(message, left_s)
        try:
            async with asyncio.timeout(left_s):
                got = await answer
        except TimeoutError:
            raise Unavailable(f"{self.name} did not answer {type(message).__name__} within {left_s:g} s") from None
        return expected(self.name, message, got, reply)

    def request(self, message: object, left_s: float) -> asyncio.Future[object]:
        """Send, and the answer to wait for. Cancel it to give up, which is also the caller's to do after `left_s`."""
        host = self._host
        answer: asyncio.Future[object] = host.loop.create_future()
        if type(message) is ListActors:
            answer.set_result(host.system.actors())
        else:
            now_s = host.loop.time()
            host.put(Envelope(message, answer, now_s + left_s, now_s))
        return answer

    def on_end(self, call: Callable[[str], None]) -> Callable[[], None]:
        """As of Ref."""
        return self._host.on_end(call)

    async def stop(self, deadline_s: float = 10.0) -> None:
        """End the actor for good after the message in hand, which is cancelled at the deadline."""
        self._host.stop()
        await self._ended(deadline_s)

    async def drain(self, deadline_s: float = 10.0) -> None:
        """End the actor for good after all that it has taken; new messages are refused. At the deadline as `stop`."""
        self._host.drain()
        await self._ended(deadline_s)

    async def stopped(self) -> None:
        """Until the actor has ended for good."""
        await self._host.done.wait()

    async def _ended(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._host.done.wait()
        except TimeoutError:
            log.warning("%s did not stop within %g s and is cancelled", self.name, deadline_s)
            self._host.cancel()
            await self._host.done.wait()
