"""People at a process's port: what one who shows a person's certificate may ask there, and whose order it is then.

A person asks what gyrectl asks, and gives its orders. What processes say among themselves is not for people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from gyre.actors.inspection import ListActors
from gyre.actors.messages_gyrectl import ORDERS, GetStatus, GetTrace, GetVersion
from gyre.actors.messages_journals import GetCopies
from gyre.actors.reference import LocalRef
from gyre.errors import Refused

QUESTIONS = (GetStatus, GetTrace, GetVersion, GetCopies, ListActors)


class Guest:
    """An actor, as the person reaches it: an order goes on under the name in their certificate."""

    def __init__(self, person: str, actor: LocalRef) -> None:
        self._person = person
        self._actor = actor

    def request(self, message: object, left_s: float) -> asyncio.Future[object]:
        """As of LocalRef. Raises Refused for what is not a person's to ask."""
        if isinstance(message, ORDERS):
            message = replace(message, by=self._person)
        elif not isinstance(message, QUESTIONS):
            raise Refused(f"{type(message).__name__} is not for people: {self._person} shows a person's certificate")
        return self._actor.request(message, left_s)

    def tell(self, message: object) -> None:
        raise Refused(f"{type(message).__name__}: people ask, and wait for the answer")

    def on_end(self, call: Callable[[str], None]) -> Callable[[], None]:
        return self._actor.on_end(call)
