"""Who leads, and the fence around every write that a leader makes: pure builders of transactions.

A candidate campaigns under a lease. The revision that created the leader key is the leader's token, for ever: nobody
else can have it, and a later leader's is higher. Every write compares it, so a leader that was deposed (even one that
slept through it) writes nothing any more:

    lease = await store.lease(ttl_s)
    token = elected(await commit(store, campaign_txn(keys, me, lease.id)), lease.id)   # None: another one leads
    ...
    result = await commit(store, fenced_txn(keys, token, compares=..., puts=...))
    verdict(result, token)   # written, deposed, or outdated: somebody wrote a compared key first
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from gyre.errors import BadInput
from gyre.store.protocol import Compare, Delete, Get, Put, Txn, TxnResult
from gyre.store.records import Keys, LeaderRecord, SnapshotRecord
from gyre.store.typed import Versioned, put_record


class Verdict(StrEnum):
    """What became of a fenced transaction."""

    WRITTEN = "written"
    DEPOSED = "deposed"
    """The token is no longer the leader's. Nothing was written, nothing will be: stop leading."""
    OUTDATED = "outdated"
    """Still the leader, but a compared key has changed. Nothing was written: read again and decide again."""


def campaign_txn(keys: Keys, leader: LeaderRecord, lease: int) -> Txn:
    """Become the leader if there is none. The leader as it then stands is read with it."""
    return Txn(
        compares=(Compare.created(keys.leader, 0),),
        puts=(put_record(keys.leader, leader, lease),),
        gets=(Get(keys.leader),),
    )


def elected(result: TxnResult, lease: int) -> int | None:
    """The token that a campaign won; None when another leads.

    A leader key that hangs on our own lease is ours also when the compare failed: an earlier try, whose answer was
    lost, had won.
    """
    (leader,) = result.gets
    if leader is None or leader.lease != lease:
        return None
    return leader.create_revision


def fenced_txn(
    keys: Keys,
    token: int,
    compares: Sequence[Compare] = (),
    puts: Sequence[Put] = (),
    deletes: Sequence[Delete] = (),
    gets: Sequence[Get] = (),
) -> Txn:
    """A leader's transaction: nothing is written unless `token` is still the leader's.

    The leader key is read last, after the caller's gets, so that `verdict` can tell why a transaction failed.
    """
    if token <= 0:
        raise BadInput("token", token, "the revision that created the leader key")
    return Txn((Compare.created(keys.leader, token), *compares), tuple(puts), tuple(deletes), (*gets, Get(keys.leader)))


def verdict(result: TxnResult, token: int) -> Verdict:
    """What became of the transaction of `fenced_txn`."""
    if result.succeeded:
        return Verdict.WRITTEN
    leader = result.gets[-1]
    return Verdict.OUTDATED if leader is not None and leader.create_revision == token else Verdict.DEPOSED


def publish_snapshot_txn(
    keys: Keys,
    token: int,
    old: Versioned[SnapshotRecord] | None,
    new: SnapshotRecord,
    puts: Sequence[Put] = (),
    compares: Sequence[Compare] = (),
) -> Txn:
    """Make `new` the authoritative snapshot in place of `old`, and write `puts` with it.

    The version grows by exactly one (the first may be any). Building raises BadInput for another; the store refuses
    when what it holds is not `old`, so that a leader that was restored from old state cannot turn the version back.
    """
    if old is not None and new.version != old.record.version + 1:
        raise BadInput("snapshot version", new.version, f"{old.record.version + 1}, the one after that published")
    if new.version < 0:
        raise BadInput("snapshot version", new.version, "0 or more")
    fence = Compare.modified(keys.snapshot, old.mod_revision if old else 0)
    return fenced_txn(keys, token, (fence, *compares), (put_record(keys.snapshot, new), *puts))
