"""The deadline that travels with a request: what is asked while it is handled is given no more time than its asker has."""

from __future__ import annotations

from contextvars import ContextVar

FOREVER_S = float("inf")

handling_until_s: ContextVar[float] = ContextVar("handling_until_s", default=FOREVER_S)
"""When the asker of what is being handled gives up, by the loop's clock. A task begins with that of who began it."""


def outlive_request() -> None:
    """The task that says so goes on after the request in which it was begun, and has its own time."""
    handling_until_s.set(FOREVER_S)
