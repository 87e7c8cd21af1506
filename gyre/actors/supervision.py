"""How an actor's failures, its end and its overflow are named, counted and reported."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gyre.errors import GyreError, Unavailable


class MailboxFull(Unavailable):
    """The actor has as many messages waiting as it takes."""


class ActorStopped(Unavailable):
    """The actor has ended, or ended before it answered."""


class ActorFailed(GyreError):
    """A handler raised something that is no GyreError, or an actor failed more often than its limit of restarts."""


class Overflow(Enum):
    """What a full mailbox does with one more tell. An ask is refused at once in any case."""

    REFUSE = "refuse"
    DROP_OLDEST = "drop_oldest"
    """The tell that has waited longest makes room. For messages of which the newest says all."""


@dataclass(frozen=True)
class Died:
    """A watched actor has ended for good, or can no longer be reached. It comes once a watch."""

    name: str
    reason: str


@dataclass(frozen=True)
class Backoff:
    """When a failed actor starts again: after `initial_s`, doubled with each failure within `window_s`, up to `max_s`.

    More than `limit` failures within `window_s` escalate.
    """

    initial_s: float = 0.1
    max_s: float = 10.0
    limit: int = 5
    window_s: float = 60.0

    def delay_s(self, failures: int) -> float | None:
        """The pause after the last of so many failures within the window; None: escalate."""
        return None if failures > self.limit else min(self.max_s, self.initial_s * 2.0 ** (failures - 1))


NEVER = Backoff(limit=0)
"""The first failure escalates."""


@dataclass(frozen=True)
class Failure:
    """A report of one failure. `restart_in_s` is None when it escalates."""

    actor: str
    during: str
    error: str
    trace: str
    restart_in_s: float | None
