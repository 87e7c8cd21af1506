"""What can be seen of a process's actors from outside: the question, the answer, and the figures of each actor.

    actors = await any_ref_of_that_process.ask(ListActors(), 5.0, ActorList)

The runtime answers it for every actor, before the mailbox: a full or busy actor can be looked at too.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.wire import record


@record("actors.list")
@dataclass(frozen=True)
class ListActors:
    """-> ActorList."""


@record("actors.totals")
@dataclass(frozen=True)
class ActorTotals:
    """Counted since the process began. `kind` is the actor's class."""

    kind: str
    handled: int
    handling_s: float
    expired: int
    """Asks that nobody waited for any more when their turn came: dropped unhandled."""
    dropped: int
    """Tells that made room for newer ones."""
    refused: int
    """Messages that met a full mailbox."""
    failures: int


@record("actors.info")
@dataclass(frozen=True)
class ActorInfo:
    """One actor as it is. Times are seconds before now."""

    name: str
    state: str
    """starting, running, draining, stopping, or waiting to start again."""
    totals: ActorTotals
    slowest_s: float
    """The longest time that a handler has taken."""
    waiting: int
    """Messages in the mailbox, `control` of them control messages."""
    control: int
    mailbox_messages: int
    oldest_s: float
    """How long the message that has waited longest has waited; 0 when none waits."""
    in_hand: str
    """The message being handled, "" for none; and since when."""
    in_hand_s: float
    beside: int
    """Concurrent handlers under way."""
    tasks: int
    timers: int
    last_failure: str


@record("actors.answer")
@dataclass(frozen=True)
class ActorList:
    system: str
    actors: tuple[ActorInfo, ...]
    ended: tuple[ActorTotals, ...]
    """Of the actors that have ended, by kind."""


def totals_by_kind(listed: ActorList) -> tuple[ActorTotals, ...]:
    """Sums over the actors of each kind, those that have ended included: they never shrink."""
    sums: dict[str, ActorTotals] = {}
    for one in (*listed.ended, *(actor.totals for actor in listed.actors)):
        sums[one.kind] = add(sums[one.kind], one) if one.kind in sums else one
    return tuple(sums[kind] for kind in sorted(sums))


def add(one: ActorTotals, other: ActorTotals) -> ActorTotals:
    return ActorTotals(
        one.kind,
        one.handled + other.handled,
        one.handling_s + other.handling_s,
        one.expired + other.expired,
        one.dropped + other.dropped,
        one.refused + other.refused,
        one.failures + other.failures,
    )
