"""One leader at a time, and no write of one that was deposed; the snapshot's version only grows (case C13)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gyre.errors import BadInput
from gyre.ids import NodeId
from gyre.store.election import Verdict, campaign_txn, elected, fenced_txn, publish_snapshot_txn, verdict
from gyre.store.open import open_store
from gyre.store.protocol import Compare, Delete, Get, Lease, Put, Store, commit
from gyre.store.records import Keys, LeaderRecord, SnapshotRecord
from gyre.store.typed import TypedStore, Versioned

KEYS = Keys("demo")
A = LeaderRecord(NodeId("a"), "tcp:127.0.0.1:1")
B = LeaderRecord(NodeId("b"), "tcp:127.0.0.1:2")


def snapshot(version: int, digest: str = "d") -> SnapshotRecord:
    return SnapshotRecord(version, digest, f"/snapshots/v{version:08d}")


@pytest_asyncio.fixture
async def store() -> AsyncIterator[Store]:
    store = open_store("memory:")
    yield store
    await store.close()


async def campaign(store: Store, who: LeaderRecord) -> tuple[int | None, Lease]:
    lease = await store.lease(60)
    return elected(await commit(store, campaign_txn(KEYS, who, lease.id)), lease.id), lease


async def leader(store: Store, who: LeaderRecord) -> int:
    token, _ = await campaign(store, who)
    assert token is not None
    return token


async def current_leader(store: Store) -> LeaderRecord | None:
    found = await TypedStore(store).get(KEYS.leader, LeaderRecord)
    return found.record if found else None


async def published(store: Store) -> Versioned[SnapshotRecord]:
    found = await TypedStore(store).get(KEYS.snapshot, SnapshotRecord)
    assert found is not None
    return found


async def test_the_first_to_campaign_leads_and_its_token_is_the_revision_of_the_leader_key(store: Store) -> None:
    token, _ = await campaign(store, A)
    found = await TypedStore(store).get(KEYS.leader, LeaderRecord)
    assert found is not None
    assert (found.record, found.create_revision) == (A, token)
    assert (await campaign(store, B))[0] is None
    assert await current_leader(store) == A


async def test_the_next_leader_comes_when_the_lease_goes_and_has_a_higher_token(store: Store) -> None:
    first, lease = await campaign(store, A)
    await lease.revoke()
    second, _ = await campaign(store, B)
    assert first is not None
    assert second is not None
    assert second > first
    assert await current_leader(store) == B


async def test_a_campaign_whose_answer_was_lost_is_won_when_it_is_repeated_under_the_same_lease(store: Store) -> None:
    lease = await store.lease(60)
    won = elected(await commit(store, campaign_txn(KEYS, A, lease.id)), lease.id)
    again = elected(await commit(store, campaign_txn(KEYS, A, lease.id)), lease.id)
    assert won == again is not None


async def test_a_leader_writes_and_a_deposed_one_does_not(store: Store) -> None:
    token, lease = await campaign(store, A)
    assert token is not None
    result = await commit(store, fenced_txn(KEYS, token, puts=[Put("/x", b"a")], gets=[Get("/x")]))
    assert verdict(result, token) is Verdict.WRITTEN
    assert result.gets[0] is not None

    await lease.revoke()
    late = fenced_txn(KEYS, token, puts=[Put("/y", b"late")], deletes=[Delete("/x")])
    assert verdict(await commit(store, late), token) is Verdict.DEPOSED  # while there is no leader
    await leader(store, B)
    assert verdict(await commit(store, late), token) is Verdict.DEPOSED  # and under the next one
    kv = await store.get("/x")
    assert kv is not None
    assert kv.value == b"a"
    assert await store.get("/y") is None


async def test_the_same_node_elected_again_cannot_write_with_its_old_token(store: Store) -> None:
    token, lease = await campaign(store, A)
    assert token is not None
    await lease.revoke()
    assert await leader(store, A) != token
    result = await commit(store, fenced_txn(KEYS, token, puts=[Put("/x", b"late")]))
    assert verdict(result, token) is Verdict.DEPOSED


async def test_a_leader_that_acts_on_what_has_changed_is_told_so(store: Store) -> None:
    token = await leader(store, A)
    await store.txn(puts=[Put("/x", b"somebody else's")])
    result = await commit(store, fenced_txn(KEYS, token, [Compare.modified("/x", 0)], [Put("/x", b"mine")]))
    assert verdict(result, token) is Verdict.OUTDATED


def test_a_token_that_cannot_be_one_is_refused() -> None:
    # create_revision 0 would compare equal to "there is no leader".
    for token in (0, -1):
        with pytest.raises(BadInput, match="token"):
            fenced_txn(KEYS, token, puts=[Put("/x", b"")])


# ---------------------------------------------------------------------------------------------- the snapshot


async def test_versions_are_published_one_after_another_with_what_belongs_to_them(store: Store) -> None:
    token = await leader(store, A)
    first = publish_snapshot_txn(KEYS, token, None, snapshot(0))
    assert verdict(await commit(store, first), token) is Verdict.WRITTEN
    for version in (1, 2, 3):
        txn = publish_snapshot_txn(
            KEYS, token, await published(store), snapshot(version), [Put("/step", b"%d" % version)]
        )
        assert verdict(await commit(store, txn), token) is Verdict.WRITTEN
    assert (await published(store)).record == snapshot(3)
    kv = await store.get("/step")
    assert kv is not None
    assert kv.value == b"3"


async def test_c13_a_leader_restored_from_old_state_cannot_turn_the_version_back(store: Store) -> None:
    token, lease = await campaign(store, A)
    assert token is not None
    old = None
    seen: list[Versioned[SnapshotRecord]] = []
    for version in range(58):
        result = await commit(store, publish_snapshot_txn(KEYS, token, old, snapshot(version)))
        assert verdict(result, token) is Verdict.WRITTEN
        old = await published(store)
        seen.append(old)
    await lease.revoke()

    token = await leader(store, B)
    step = Put("/step", b"must not be written either")
    from_nothing = publish_snapshot_txn(KEYS, token, None, snapshot(1), [step])
    from_old_state = publish_snapshot_txn(KEYS, token, seen[0], snapshot(1), [step])
    for txn in (from_nothing, from_old_state):
        assert verdict(await commit(store, txn), token) is Verdict.OUTDATED
    assert (await published(store)).record == snapshot(57)
    assert await store.get("/step") is None


async def test_a_deposed_leader_publishes_nothing(store: Store) -> None:
    token, lease = await campaign(store, A)
    assert token is not None
    await commit(store, publish_snapshot_txn(KEYS, token, None, snapshot(0)))
    old = await published(store)
    await lease.revoke()
    await leader(store, B)
    result = await commit(store, publish_snapshot_txn(KEYS, token, old, snapshot(1)))
    assert verdict(result, token) is Verdict.DEPOSED
    assert (await published(store)).record == snapshot(0)


async def test_of_two_publications_of_one_version_one_stands(store: Store) -> None:
    token = await leader(store, A)
    await commit(store, publish_snapshot_txn(KEYS, token, None, snapshot(0)))
    old = await published(store)
    first = await commit(store, publish_snapshot_txn(KEYS, token, old, snapshot(1, "first")))
    second = await commit(store, publish_snapshot_txn(KEYS, token, old, snapshot(1, "second")))
    assert (verdict(first, token), verdict(second, token)) == (Verdict.WRITTEN, Verdict.OUTDATED)
    assert (await published(store)).record.digest == "first"


@pytest.mark.parametrize("version", [-1, 3, 4, 6, 57])
def test_a_version_that_is_not_the_next_is_refused_before_it_is_sent(version: int) -> None:
    old = Versioned(KEYS.snapshot, snapshot(4), 5, 9, 0)
    with pytest.raises(BadInput, match="snapshot version"):
        publish_snapshot_txn(KEYS, 7, old, snapshot(version))
