"""Whose turn it is when calls wait for an engine: groups share in turn, and in a group the longest-waiting goes first.

Pure. The runs of a group are compared with each other, and a batch is whole only when its groups are: so no group waits
behind all of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from gyre.ids import GroupId


class Waiter(Protocol):
    """A call that waits. `asked` grows from call to call; one that goes on elsewhere keeps the place it had."""

    @property
    def group(self) -> GroupId: ...
    @property
    def asked(self) -> int: ...


W = TypeVar("W", bound=Waiter)


def next_up(waiting: Iterable[W], served: Mapping[GroupId, int]) -> W | None:
    """Who is served next. `served` is when each group was served last, as a number that grows; absent: never."""
    return min(waiting, key=lambda waiter: (served.get(waiter.group, -1), waiter.asked), default=None)
