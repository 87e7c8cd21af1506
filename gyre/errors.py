"""The errors that Gyre raises on purpose. Each says in one line what was wrong and what would be right."""

from __future__ import annotations


class GyreError(Exception):
    """The root of all errors that a person can mend."""


class BadInput(GyreError):
    """Something that a person or a program gave us is not allowed.

    The message names the field, the value that was met, and what is allowed.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        super().__init__(f"{field}: {shown if len(shown) <= 120 else shown[:117] + '...'} is not allowed; {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class Unavailable(GyreError):
    """A process or a peer could not be reached within its deadline."""


class NameTaken(GyreError):
    """Another living gyred is in the cluster under our node's name."""


class Refused(GyreError):
    """The other side understood and said no: a stale token, an old attempt, a version that does not match."""


class NotLetIn(Refused, Unavailable):
    """The other side and we do not accept each other: a certificate, a name, a life that is over. It cannot be reached
    until that has changed, and then it can."""


class NotLoaded(Refused):
    """A replica does not hold the parameters that were asked for: it has to load them before it is of use."""


class OthersAway(Refused):
    """What it takes is with others, who cannot be reached just now: who was asked has not failed, and can do it later."""


class StorageFull(GyreError):
    """Something that must be on disk before we answer could not be written there."""
