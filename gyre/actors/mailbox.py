"""A mailbox: which message waits, which comes next, and what happens when there is no room. It has no clock.

The host (gyre.actors.host) puts in what others and the actor itself send, and takes out what is handled next: what the
actor sent itself first, then control messages, then the rest, each in the order they came. Others' messages are bounded,
control messages apart from the rest, so that a flood of data does not shut out control.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from gyre.actors.supervision import MailboxFull, Overflow


class Envelope(NamedTuple):
    """A tuple, for it is made for every message."""

    message: object
    answer: asyncio.Future[object] | None
    """Where an asker waits; done when it has given up."""
    until_s: float
    """When the asker gives up; infinite for a tell."""
    came_s: float


@dataclass(frozen=True)
class Broken:
    """What an owned task or a child reports instead of a message: the actor has failed."""

    during: str
    error: BaseException


class Mailbox:
    """`control` are the types of message that go first; the host sets it when it knows the actor's class."""

    def __init__(self, name: str, limit: int, overflow: Overflow) -> None:
        self.limit = limit
        self.expired = 0
        self.dropped = 0
        self.refused = 0
        self._name = name
        self._overflow = overflow
        self._control_kinds: frozenset[type[Any]] = frozenset()
        self._own: deque[Envelope | Broken] = deque()
        self._control: deque[Envelope] = deque()
        self._data: deque[Envelope] = deque()

    def __len__(self) -> int:
        return len(self._own) + len(self._control) + len(self._data)

    @property
    def control_waiting(self) -> int:
        return len(self._control)

    def oldest_came_s(self) -> float | None:
        """When the message that has waited longest came."""
        heads = [queue[0].came_s for queue in (self._control, self._data) if queue]
        heads += [item.came_s for item in self._own if isinstance(item, Envelope)][:1]
        return min(heads, default=None)

    def put(self, envelope: Envelope) -> None:
        """From others. Raises MailboxFull."""
        control = type(envelope.message) in self._control_kinds
        queue = self._control if control else self._data
        if len(queue) >= self.limit and (control or not self._make_room(envelope)):
            self.refused += 1
            raise MailboxFull(f"{self._name} has {self.limit} messages waiting and takes no more")
        queue.append(envelope)

    def put_own(self, item: Envelope | Broken) -> None:
        self._own.append(item)

    def take(self, *, data: bool) -> Envelope | Broken | None:
        """The next to handle; None when none waits. Without `data`, only what goes before it."""
        if self._own:
            return self._own.popleft()
        if self._control:
            return self._control.popleft()
        return self._data.popleft() if data and self._data else None

    def forget_own(self) -> None:
        """What an instance sent itself is not for the next one."""
        self._own.clear()

    def set_control(self, kinds: frozenset[type[Any]]) -> None:
        """What waits already is put in its place."""
        self._control_kinds = kinds
        if kinds:
            waiting = (*self._control, *self._data)
            self._control = deque(item for item in waiting if type(item.message) in kinds)
            self._data = deque(item for item in waiting if type(item.message) not in kinds)

    def empty(self) -> list[Envelope]:
        """All that others have sent, taken out, for the actor has ended."""
        left = [*self._control, *self._data]
        self._control.clear()
        self._data.clear()
        return left

    def _make_room(self, for_whom: Envelope) -> bool:
        if self._overflow is not Overflow.DROP_OLDEST or for_whom.answer is not None:
            return False
        for place, envelope in enumerate(self._data):
            if envelope.answer is None:
                del self._data[place]
                self.dropped += 1
                return True
        return False
