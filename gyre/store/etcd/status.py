"""What etcd's answers of failure mean: pure, from a grpc status and its text."""

from __future__ import annotations

from enum import StrEnum

from gyre.errors import GyreError, Refused, Unavailable
from gyre.store.protocol import StoreFull, StoreRefuses


class Failure(StrEnum):
    """What to do about a call that failed."""

    UNANSWERED = "unanswered"
    """This endpoint did not answer in time, or not with etcd's decision: it may or may not have been carried out."""
    TOKEN = "token"
    """Our token of a user is no more; it was not carried out. Get another and ask again."""
    LEASE = "lease"
    """A lease that was named is no more; nothing was carried out."""
    LEASE_TAKEN = "lease_taken"
    COMPACTED = "compacted"
    FUTURE = "future"
    DENIED = "denied"
    FULL = "full"
    OTHER = "other"


_UNANSWERED = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "UNKNOWN", "ABORTED", "DATA_LOSS")
_TOKEN = ("invalid auth token", "revision of auth store is old")
_DENIED = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_DENIED_TEXTS = ("authentication failed", "user name is empty", "authentication is not enabled", "permission denied")


def failure(code: str, text: str) -> Failure:
    """`code` is grpc's name of the status; empty where a stream's message brought only `text`."""
    if any(each in text for each in _TOKEN):
        return Failure.TOKEN
    if "lease not found" in text:
        return Failure.LEASE
    if "lease already exists" in text:
        return Failure.LEASE_TAKEN
    if "has been compacted" in text:
        return Failure.COMPACTED
    if "future revision" in text:
        return Failure.FUTURE
    if "database space exceeded" in text:
        return Failure.FULL
    if code in _DENIED or any(each in text for each in _DENIED_TEXTS):
        return Failure.DENIED
    if code in _UNANSWERED or "too many requests" in text or "no leader" in text:
        return Failure.UNANSWERED
    return Failure.OTHER


def error_of(kind: Failure, text: str, user: str, cluster: str) -> GyreError:
    """The error that a person gets, for the failures that no other endpoint mends."""
    if kind is Failure.DENIED:
        who = f"user {user}" if user else "a client without user="
        keys = f"/gyre/{cluster}/ and gyre.receipts/{cluster}/"
        mend = f"check its password, and that its role may read and write {keys}"
        return StoreRefuses(f"etcd refuses {who}: {text}; {mend}")
    if kind is Failure.FULL:
        return StoreFull(f"etcd takes no more writes: {text}; compact, defragment, then disarm the NOSPACE alarm")
    if kind is Failure.UNANSWERED:
        return Unavailable(f"etcd does not answer: {text}")
    return Refused(f"etcd refuses the call: {text}")
