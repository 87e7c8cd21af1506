"""The figures of one actor through all of its instances: kept by its host, shown by gyre.actors.inspection."""

from __future__ import annotations

from gyre.actors.inspection import ActorInfo, ActorTotals
from gyre.actors.mailbox import Envelope, Mailbox


class Tally:
    """Plain counters, for they are touched with every message."""

    def __init__(self) -> None:
        self.kind = ""
        self.handled = 0
        self.handling_s = 0.0
        self.slowest_s = 0.0
        self.failures = 0
        self.last_failure = ""
        self.beside = 0
        """Concurrent handlers under way."""
        self.in_hand: Envelope | None = None
        self.in_hand_since_s = 0.0

    def took(self, s: float) -> None:
        """A handler has ended after so long."""
        self.handled += 1
        self.handling_s += s
        if s > self.slowest_s:
            self.slowest_s = s

    def failed(self, during: str, error: BaseException) -> None:
        self.failures += 1
        self.last_failure = f"in {during}: {error!r}"

    def totals(self, mailbox: Mailbox) -> ActorTotals:
        return ActorTotals(
            self.kind,
            self.handled,
            self.handling_s,
            mailbox.expired,
            mailbox.dropped,
            mailbox.refused,
            self.failures,
        )

    def info(self, name: str, state: str, mailbox: Mailbox, tasks: int, timers: int, now_s: float) -> ActorInfo:
        came_s, held = mailbox.oldest_came_s(), self.in_hand
        return ActorInfo(
            name=name,
            state=state,
            totals=self.totals(mailbox),
            slowest_s=self.slowest_s,
            waiting=len(mailbox),
            control=mailbox.control_waiting,
            mailbox_messages=mailbox.limit,
            oldest_s=0.0 if came_s is None else now_s - came_s,
            in_hand="" if held is None else type(held.message).__name__,
            in_hand_s=0.0 if held is None else now_s - self.in_hand_since_s,
            beside=self.beside,
            tasks=tasks,
            timers=timers,
            last_failure=self.last_failure,
        )
