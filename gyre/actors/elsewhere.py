"""A reference to whoever holds an office now: the leader's scheduler, the core, a cell wherever it is.

Who that is, is looked up anew for each message. Nothing is sent twice: when nobody holds the office, or he cannot be
reached, an ask raises Unavailable at once and a tell is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from gyre.actors.runtime import Ref
from gyre.errors import GyreError, Unavailable

R = TypeVar("R")

log = logging.getLogger(__name__)


class Elsewhere:
    """`find` gives the reference to send to, or None while nobody is known."""

    def __init__(self, name: str, find: Callable[[], Ref | None]) -> None:
        self.name = name
        self._find = find

    def __repr__(self) -> str:
        return f"Elsewhere({self.name!r})"

    def tell(self, message: object) -> None:
        """As of Ref; what cannot be sent is dropped, and logged."""
        ref = self._find()
        if ref is None:
            log.info("%s is not known just now; %s is dropped", self.name, type(message).__name__)
            return
        try:
            ref.tell(message)
        except GyreError as error:
            log.info("%s is dropped: %s", type(message).__name__, error)

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R:
        """As of Ref."""
        return await self._there().ask(message, deadline_s, reply)

    def on_end(self, call: Callable[[str], None]) -> Callable[[], None]:
        """As of Ref, of who holds the office now."""
        return self._there().on_end(call)

    def _there(self) -> Ref:
        ref = self._find()
        if ref is None:
            raise Unavailable(f"{self.name} is not known just now")
        return ref
