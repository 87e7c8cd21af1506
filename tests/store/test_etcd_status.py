"""What etcd's answers of failure mean."""

from __future__ import annotations

import pytest

from gyre.errors import Refused, Unavailable
from gyre.store.etcd.status import Failure, error_of, failure
from gyre.store.protocol import StoreFull, StoreRefuses


@pytest.mark.parametrize(
    ("code", "text", "meaning"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", Failure.UNANSWERED),
        ("UNAVAILABLE", "etcdserver: request timed out", Failure.UNANSWERED),
        ("UNAVAILABLE", "etcdserver: leader changed", Failure.UNANSWERED),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Failure.UNANSWERED),
        ("CANCELLED", "", Failure.UNANSWERED),
        ("INTERNAL", "Received RST_STREAM with error code 2", Failure.UNANSWERED),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Failure.UNANSWERED),
        ("", "etcdserver: no leader", Failure.UNANSWERED),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Failure.TOKEN),
        ("", "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token", Failure.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Failure.TOKEN),
        ("NOT_FOUND", "etcdserver: requested lease not found", Failure.LEASE),
        ("FAILED_PRECONDITION", "etcdserver: lease already exists", Failure.LEASE_TAKEN),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", Failure.COMPACTED),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision", Failure.FUTURE),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Failure.DENIED),
        ("", "rpc error: code = PermissionDenied desc = etcdserver: permission denied", Failure.DENIED),
        ("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user ID or password", Failure.DENIED),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", Failure.DENIED),
        ("FAILED_PRECONDITION", "etcdserver: authentication is not enabled", Failure.DENIED),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Failure.FULL),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", Failure.OTHER),
    ],
)
def test_what_to_do_about_a_failure(code: str, text: str, meaning: Failure) -> None:
    assert failure(code, text) is meaning


def test_a_person_is_told_what_to_mend() -> None:
    denied = error_of(Failure.DENIED, "permission denied", "me", "prod")
    assert isinstance(denied, StoreRefuses)
    assert str(denied) == (
        "etcd refuses user me: permission denied; check its password, "
        "and that its role may read and write /gyre/prod/ and gyre.receipts/prod/"
    )
    assert "a client without user=" in str(error_of(Failure.DENIED, "user name is empty", "", "prod"))
    assert isinstance(error_of(Failure.FULL, "space", "", "prod"), StoreFull)
    assert isinstance(error_of(Failure.UNANSWERED, "timed out", "", "prod"), Unavailable)
    assert isinstance(error_of(Failure.OTHER, "request is too large", "", "prod"), Refused)
