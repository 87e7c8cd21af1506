"""What every dialect can do. The gateway holds one of each, and picks by the request's path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gyre.proxy.conversation import Conversation, Reply
from gyre.proxy.faults import Fault


class Dialect(Protocol):
    name: str

    def parse(self, body: Mapping[str, Any]) -> Conversation:
        """What the body asks. Raises Fault(BAD_REQUEST) naming the field that is wrong."""
        ...

    def mint(self, stem: str, place: int) -> str:
        """The id of an answer's tool call, made of `stem`, which no other answer has."""
        ...

    def message_id(self, stem: str) -> str: ...

    def body(self, reply: Reply) -> dict[str, Any]:
        """The answer as one JSON body."""
        ...

    def events(self, reply: Reply, *, include_usage: bool) -> list[bytes]:
        """The answer as the events of a whole stream, in order."""
        ...

    def model(self, name: str) -> dict[str, Any]:
        """The model under the name that was asked for."""
        ...

    def models(self, name: str) -> dict[str, Any]:
        """The list of the one model that there is."""
        ...

    def heartbeat(self) -> bytes:
        """Something to send while a stream is held back, that every client of this dialect ignores."""
        ...

    def fault(self, fault: Fault) -> tuple[int, dict[str, Any]]:
        """(HTTP status, body)."""
        ...

    def fault_event(self, fault: Fault) -> bytes:
        """A fault inside a stream that has begun."""
        ...
