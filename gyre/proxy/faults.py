"""What a request can be told instead of an answer. Each dialect gives a fault its own status, type and wording."""

from __future__ import annotations

import re
from enum import StrEnum

from gyre.errors import GyreError


class FaultKind(StrEnum):
    BAD_REQUEST = "bad_request"
    """The body is not JSON, or has a wrong shape, or asks for what Gyre does not do."""
    TOO_LARGE = "too_large"
    """The body has more bytes than the job allows."""
    TOO_LONG = "too_long"
    """The prompt does not fit into the model's context: what makes a harness compact."""
    UNAUTHORIZED = "unauthorized"
    """No such run, or not its key."""
    CLOSED = "closed"
    """The run takes no more calls."""
    NOT_FOUND = "not_found"
    UNAVAILABLE = "unavailable"
    """No engine could answer in time: ours, and counted as an interrupted call."""


_FIELD = re.compile(r"([a-z_]+(?:\[\d+\]|\.\w+)*): ")
"""A field of the body, as a message begins with it."""


class Fault(GyreError):
    """A request that gets no answer. `prompt_tokens` and `context_tokens` are set for `TOO_LONG`."""

    def __init__(self, kind: FaultKind, message: str, *, prompt_tokens: int = 0, context_tokens: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens

    @property
    def field(self) -> str:
        """The field of the body that is to blame, as the message names it, or empty."""
        named = _FIELD.match(str(self)) if self.kind is FaultKind.BAD_REQUEST else None
        return named[1] if named is not None else ""


def bad_request(message: str) -> Fault:
    return Fault(FaultKind.BAD_REQUEST, message)


def too_long(prompt_tokens: int, context_tokens: int) -> Fault:
    return Fault(
        FaultKind.TOO_LONG,
        f"the prompt has {prompt_tokens} tokens, the context {context_tokens}",
        prompt_tokens=prompt_tokens,
        context_tokens=context_tokens,
    )
