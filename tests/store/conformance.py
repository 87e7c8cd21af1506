"""What every back end of the store must do: one suite, run on each (a subclass gives the `store` fixture)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from gyre.errors import BadInput
from gyre.store.protocol import (
    MAX_TXN_BYTES,
    MAX_TXN_OPS,
    Compacted,
    Compare,
    Delete,
    Event,
    Get,
    LeaseLost,
    Put,
    Store,
    StoreClosed,
)

DEADLINE_S = 20.0


async def put(store: Store, key: str, value: bytes = b"x", lease: int = 0) -> int:
    return (await store.txn(puts=[Put(key, value, lease)])).revision


async def delete(store: Store, *keys: str) -> int:
    return (await store.txn(deletes=[Delete(key) for key in keys])).revision


async def take(events: AsyncGenerator[Event, None], count: int) -> list[Event]:
    async with asyncio.timeout(DEADLINE_S):
        return [await anext(events) for _ in range(count)]


def told(events: list[Event]) -> list[tuple[str, str, bytes, int]]:
    return [(event.kind, event.kv.key, event.kv.value, event.kv.mod_revision) for event in events]


class StoreConformance:
    """Revisions are compared with each other, never with a constant: a cluster's store has others' writes behind it."""

    ttl_s = 2.0
    """A short lease, as short as the back end grants."""

    @pytest.fixture
    def keeper(self, store: Store) -> Store:
        """The store that compacts; another where the one that is tested may not."""
        return store

    # ------------------------------------------------------------------------------------------ reading and writing

    async def test_a_key_counts_its_revisions_and_versions(self, store: Store) -> None:
        first = await put(store, "/a", b"1")
        second = await put(store, "/a", b"2")
        kv = await store.get("/a")
        assert second == first + 1
        assert kv is not None
        assert (kv.value, kv.create_revision, kv.mod_revision, kv.version) == (b"2", first, second, 2)

    async def test_a_key_written_again_after_its_delete_is_a_new_one(self, store: Store) -> None:
        await put(store, "/a", b"1")
        await delete(store, "/a")
        assert await store.get("/a") is None
        again = await put(store, "/a", b"3")
        kv = await store.get("/a")
        assert kv is not None
        assert (kv.create_revision, kv.mod_revision, kv.version) == (again, again, 1)

    async def test_all_writes_of_a_transaction_have_one_revision(self, store: Store) -> None:
        before = await put(store, "/old")
        result = await store.txn(puts=[Put("/a", b"1"), Put("/b", b"2")], deletes=[Delete("/old")], gets=[Get("/b")])
        a = await store.get("/a")
        assert a is not None
        assert result.gets[0] is not None
        assert result.revision == before + 1 == a.mod_revision == result.gets[0].mod_revision
        assert await store.get("/old") is None

    async def test_the_delete_of_an_absent_key_makes_no_revision(self, store: Store) -> None:
        before = await put(store, "/a")
        assert await delete(store, "/absent") == before

    async def test_a_value_may_be_empty_or_any_bytes(self, store: Store) -> None:
        for value in (b"", b"\0\xff" * 50):
            await put(store, "/a", value)
            kv = await store.get("/a")
            assert kv is not None
            assert kv.value == value

    # ------------------------------------------------------------------------------------------ transactions

    async def test_nothing_is_written_when_a_compare_fails(self, store: Store) -> None:
        before = await put(store, "/a", b"1")
        result = await store.txn(
            [Compare.modified("/a", before), Compare.created("/b", 1)],
            [Put("/a", b"2"), Put("/b", b"2")],
            gets=[Get("/a"), Get("/b")],
        )
        assert not result.succeeded
        assert result.revision == before
        assert result.gets[0] is not None
        assert result.gets[0].value == b"1"
        assert result.gets[1] is None

    async def test_the_gets_see_what_the_transaction_wrote(self, store: Store) -> None:
        await put(store, "/old")
        result = await store.txn(puts=[Put("/a", b"2")], deletes=[Delete("/old")], gets=[Get("/a"), Get("/old")])
        assert result.gets[0] is not None
        assert (result.gets[0].value, result.gets[1]) == (b"2", None)

    async def test_compares_of_a_key_that_is_there(self, store: Store) -> None:
        created = await put(store, "/a", b"m")
        modified = await put(store, "/a", b"n")
        true = [
            Compare.created("/a", created),
            Compare.created("/a", 0, ">"),
            Compare.created("/a", modified, "<"),
            Compare.modified("/a", modified),
            Compare.modified("/a", created, "!="),
            Compare.value("/a", b"n"),
            Compare.value("/a", b"m", ">"),
            Compare.value("/a", b"o", "<"),
        ]
        false = [
            Compare.created("/a", 0),
            Compare.created("/a", created, "!="),
            Compare.modified("/a", created),
            Compare.modified("/a", modified, ">"),
            Compare.value("/a", b"m"),
            Compare.value("/a", b"n", "!="),
        ]
        for compare in true:
            assert (await store.txn([compare])).succeeded, compare
        for compare in false:
            assert not (await store.txn([compare])).succeeded, compare

    async def test_an_absent_key_compares_as_revision_0_and_as_no_value(self, store: Store) -> None:
        for compare in (
            Compare.created("/absent", 0),
            Compare.modified("/absent", 0),
            Compare.modified("/absent", 1, "<"),
        ):
            assert (await store.txn([compare])).succeeded, compare
        for compare in (
            Compare.created("/absent", 0, ">"),
            Compare.value("/absent", b""),
            Compare.value("/absent", b"x", "!="),
        ):
            assert not (await store.txn([compare])).succeeded, compare

    async def test_of_many_writers_that_create_one_key_one_wins(self, store: Store) -> None:
        async def create(who: int) -> bool:
            return (await store.txn([Compare.created("/one", 0)], [Put("/one", str(who).encode())])).succeeded

        won = await asyncio.gather(*(create(who) for who in range(20)))
        kv = await store.get("/one")
        assert sum(won) == 1
        assert kv is not None
        assert kv.value == str(won.index(True)).encode()

    async def test_increments_that_compare_and_try_again_lose_none(self, store: Store) -> None:
        await put(store, "/n", b"0")

        async def increment() -> None:
            while True:
                kv = await store.get("/n")
                assert kv is not None
                value = str(int(kv.value) + 1).encode()
                if (await store.txn([Compare.modified("/n", kv.mod_revision)], [Put("/n", value)])).succeeded:
                    return

        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(increment() for _ in range(12)))
        kv = await store.get("/n")
        assert kv is not None
        assert (kv.value, kv.version) == (b"12", 13)

    async def test_a_key_is_written_at_most_once_in_a_transaction(self, store: Store) -> None:
        with pytest.raises(BadInput, match="'/a'"):
            await store.txn(puts=[Put("/a", b"1"), Put("/a", b"2")])
        with pytest.raises(BadInput, match="'/a'"):
            await store.txn(puts=[Put("/a", b"1")], deletes=[Delete("/a")])
        assert await store.get("/a") is None

    async def test_transactions_over_the_limits_and_keys_that_are_none_are_refused(self, store: Store) -> None:
        with pytest.raises(BadInput, match=str(MAX_TXN_OPS)):
            await store.txn(puts=[Put(f"/{n}", b"") for n in range(MAX_TXN_OPS)], gets=[Get("/a")])
        with pytest.raises(BadInput, match="bytes"):
            await store.txn(puts=[Put("/a", b"x" * MAX_TXN_BYTES)])
        for key in ("", "\ud800"):
            with pytest.raises(BadInput, match="key"):
                await put(store, key)
            with pytest.raises(BadInput, match="key"):
                await store.get(key)
        assert (await store.range("/")).items == ()

    # ------------------------------------------------------------------------------------------ ranges

    async def test_a_range_is_the_keys_of_a_prefix_in_byte_order(self, store: Store) -> None:
        for key in ("/p/b", "/p/a/x", "/p", "/q", "/p/a", "/p/é", "/p/\U0001f600", "/p0"):
            await put(store, key)
        page = await store.range("/p/")
        assert [kv.key for kv in page.items] == ["/p/a", "/p/a/x", "/p/b", "/p/é", "/p/\U0001f600"]
        assert not page.more
        assert [kv.key for kv in (await store.range("/q")).items] == ["/q"]
        assert (await store.range("/nothing")).items == ()

    async def test_pages_at_one_revision_make_up_the_whole_range_while_others_write(self, store: Store) -> None:
        keys = [f"/p/{n:02d}" for n in range(10)]
        for key in keys:
            await put(store, key, b"old")
        seen: list[tuple[str, bytes]] = []
        after, revision, sizes = "", 0, list[int]()
        while True:
            page = await store.range("/p/", limit=4, after=after, revision=revision)
            seen += [(kv.key, kv.value) for kv in page.items]
            sizes.append(len(page.items))
            revision = page.revision
            await put(store, f"/p/{len(sizes):02d}-new")
            await put(store, "/p/09", b"new")
            await delete(store, "/p/08")
            if not page.more:
                break
            after = page.items[-1].key
        assert seen == [(key, b"old") for key in keys]
        assert sizes == [4, 4, 2]

    async def test_a_limit_that_is_just_reached_leaves_no_more(self, store: Store) -> None:
        await put(store, "/p/1")
        await put(store, "/p/2")
        assert not (await store.range("/p/", limit=2)).more

    async def test_a_range_at_an_older_revision_shows_what_was_there(self, store: Store) -> None:
        first = await put(store, "/p/a", b"1")
        second = await put(store, "/p/b", b"1")
        await put(store, "/p/a", b"2")
        last = await delete(store, "/p/b")
        assert [kv.key for kv in (await store.range("/p/", revision=first)).items] == ["/p/a"]
        old = (await store.range("/p/", revision=second)).items
        assert [(kv.key, kv.value, kv.mod_revision) for kv in old] == [("/p/a", b"1", first), ("/p/b", b"1", second)]
        assert [kv.key for kv in (await store.range("/p/", revision=last)).items] == ["/p/a"]
        with pytest.raises(BadInput, match="revision"):
            await store.range("/p/", revision=last + 1000)

    # ------------------------------------------------------------------------------------------ watches

    async def test_a_watch_tells_every_change_of_its_prefix_in_order(self, store: Store) -> None:
        start = await put(store, "/other")
        async with aclosing(store.watch("/p/", start + 1)) as events:
            one = await put(store, "/p/a", b"1")
            await put(store, "/other", b"unseen")
            two = (await store.txn(puts=[Put("/p/a", b"2"), Put("/p/b", b"2")])).revision
            three = await delete(store, "/p/a")
            got = await take(events, 4)
        assert told(got) == [
            ("put", "/p/a", b"1", one),
            ("put", "/p/a", b"2", two),
            ("put", "/p/b", b"2", two),
            ("delete", "/p/a", b"", three),
        ]

    async def test_an_event_tells_what_the_key_held_before(self, store: Store) -> None:
        start = await put(store, "/p/a", b"1")
        await put(store, "/p/a", b"2")
        await delete(store, "/p/a")
        await put(store, "/p/a", b"3")
        async with aclosing(store.watch("/p/", start)) as events:
            got = await take(events, 4)
        assert [event.previous.value if event.previous else None for event in got] == [None, b"1", b"2", None]

    async def test_a_watch_from_the_past_gives_the_past_and_goes_on(self, store: Store) -> None:
        start = await put(store, "/p/0")
        for first in range(1, 600, 50):
            await store.txn(puts=[Put(f"/p/{n}", b"x") for n in range(first, min(first + 50, 600))])
        async with aclosing(store.watch("/p/", start)) as events:
            past = await take(events, 600)
            await put(store, "/p/600")
            now = await take(events, 1)
        assert [event.kv.key for event in past + now] == [f"/p/{n}" for n in range(601)]

    async def test_a_watch_that_is_begun_again_after_its_last_event_loses_and_repeats_nothing(
        self, store: Store
    ) -> None:
        revision = await put(store, "/p/start")
        seen: list[str] = []

        async def write() -> None:
            for n in range(60):
                await put(store, f"/p/{n}")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            while len(seen) < 60:
                async with aclosing(store.watch("/p/", revision + 1)) as events:
                    for event in await take(events, min(7, 60 - len(seen))):
                        seen.append(event.kv.key)
                        revision = event.kv.mod_revision
        assert seen == [f"/p/{n}" for n in range(60)]

    async def test_a_watch_waits_where_the_store_has_not_come_yet(self, store: Store) -> None:
        now = await put(store, "/p/a")
        async with aclosing(store.watch("/p/", now + 3)) as events:
            first = asyncio.ensure_future(take(events, 1))
            for n in range(1, 4):
                await put(store, f"/p/{n}")
            assert told(await first) == [("put", "/p/3", b"x", now + 3)]

    async def test_a_watch_without_a_revision_begins_now(self, store: Store) -> None:
        await put(store, "/p/old")
        async with aclosing(store.watch("/p/")) as events:
            first = asyncio.ensure_future(take(events, 1))
            while not first.done():
                await put(store, "/p/new")
                await asyncio.sleep(0.01)
            assert told(await first)[0][:2] == ("put", "/p/new")

    async def test_each_of_two_watches_gets_everything(self, store: Store) -> None:
        start = await put(store, "/p/a")

        async def watch() -> list[str]:
            async with aclosing(store.watch("/p/", start)) as events:
                return [event.kv.key for event in await take(events, 21)]

        async with asyncio.TaskGroup() as tasks:
            both = [tasks.create_task(watch()) for _ in range(2)]
            for n in range(20):
                await put(store, f"/p/{n}")
        assert both[0].result() == both[1].result() == ["/p/a", *(f"/p/{n}" for n in range(20))]

    async def test_a_cancelled_watch_ends(self, store: Store) -> None:
        async def watch() -> None:
            async with aclosing(store.watch("/p/")) as events:
                async for _ in events:
                    pass

        task = asyncio.create_task(watch())
        await put(store, "/p/a")
        task.cancel()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(asyncio.CancelledError):
                await task
        await put(store, "/p/b")

    # ------------------------------------------------------------------------------------------ compaction

    async def test_compaction_keeps_what_is_there_and_the_history_after_it(self, store: Store, keeper: Store) -> None:
        await put(store, "/p/a", b"1")
        at = await put(store, "/p/a", b"2")
        later = await put(store, "/p/a", b"3")
        await keeper.compact(at)
        assert [kv.value for kv in (await store.range("/p/", revision=at)).items] == [b"2"]
        assert [kv.value for kv in (await store.range("/p/")).items] == [b"3"]
        async with aclosing(store.watch("/p/", at)) as events:
            assert told(await take(events, 2)) == [("put", "/p/a", b"2", at), ("put", "/p/a", b"3", later)]

    async def test_what_was_compacted_away_cannot_be_had(self, store: Store, keeper: Store) -> None:
        old = await put(store, "/p/a", b"1")
        await put(store, "/p/gone")
        await delete(store, "/p/gone")
        at = await put(store, "/p/a", b"2")
        await keeper.compact(at)
        with pytest.raises(Compacted) as refused:
            await store.range("/p/", revision=old)
        assert refused.value.revision == at
        async with aclosing(store.watch("/p/", old)) as events:
            with pytest.raises(Compacted):
                await take(events, 1)
        with pytest.raises(Compacted):
            await keeper.compact(at)
        with pytest.raises(BadInput, match="revision"):
            await keeper.compact(at + 1000)
        assert [kv.key for kv in (await store.range("/p/", revision=at)).items] == ["/p/a"]

    async def test_the_delete_at_the_compacted_revision_is_still_told(self, store: Store, keeper: Store) -> None:
        await put(store, "/p/a")
        at = await delete(store, "/p/a")
        await keeper.compact(at)
        async with aclosing(store.watch("/p/", at)) as events:
            assert told(await take(events, 1)) == [("delete", "/p/a", b"", at)]

    async def test_a_watch_that_has_seen_everything_is_not_hurt_by_compaction(
        self, store: Store, keeper: Store
    ) -> None:
        start = await put(store, "/p/a")
        async with aclosing(store.watch("/p/", start)) as events:
            await take(events, 1)
            last = await put(store, "/elsewhere")
            waiting = asyncio.ensure_future(take(events, 1))
            await asyncio.sleep(0.05)
            await keeper.compact(last)
            await put(store, "/p/b")
            assert (await waiting)[0].kv.key == "/p/b"

    # ------------------------------------------------------------------------------------------ leases

    async def test_keys_go_in_one_revision_when_their_lease_expires(self, store: Store) -> None:
        lease = await store.lease(self.ttl_s)
        await put(store, "/p/a", b"1", lease.id)
        start = await put(store, "/p/b", b"1", lease.id)
        await put(store, "/p/stays")
        async with aclosing(store.watch("/p/", start + 2)) as events:
            got = await take(events, 2)
        assert sorted(event.kv.key for event in got) == ["/p/a", "/p/b"]
        assert {event.kind for event in got} == {"delete"}
        assert got[0].kv.mod_revision == got[1].kv.mod_revision
        assert [kv.key for kv in (await store.range("/p/")).items] == ["/p/stays"]
        with pytest.raises(LeaseLost):
            await lease.keep_alive()
        with pytest.raises(LeaseLost):
            await put(store, "/p/c", b"", lease.id)

    async def test_a_lease_that_is_kept_alive_outlives_one_that_is_not(self, store: Store) -> None:
        kept, left = await store.lease(1.5 * self.ttl_s), await store.lease(1.5 * self.ttl_s)
        await put(store, "/p/kept", b"", kept.id)
        start = await put(store, "/p/left", b"", left.id)

        async def keep() -> None:
            while True:
                assert 0 < await kept.keep_alive() <= kept.ttl_s
                await asyncio.sleep(self.ttl_s / 4)

        keeping = asyncio.create_task(keep())
        async with aclosing(store.watch("/p/", start + 1)) as events:
            assert [event.kv.key for event in await take(events, 1)] == ["/p/left"]
        keeping.cancel()
        assert await store.get("/p/kept") is not None

    async def test_a_revoked_lease_takes_its_keys_at_once_and_may_be_revoked_again(self, store: Store) -> None:
        lease = await store.lease(60)
        await put(store, "/p/a", b"", lease.id)
        await lease.revoke()
        assert await store.get("/p/a") is None
        await lease.revoke()
        with pytest.raises(LeaseLost):
            await lease.keep_alive()

    async def test_a_put_without_the_lease_takes_the_key_off_it(self, store: Store) -> None:
        lease = await store.lease(60)
        await put(store, "/p/a", b"", lease.id)
        kv = await store.get("/p/a")
        assert kv is not None
        assert kv.lease == lease.id
        await put(store, "/p/a", b"")
        await lease.revoke()
        assert await store.get("/p/a") is not None

    async def test_a_lease_has_a_positive_time(self, store: Store) -> None:
        for ttl_s in (0, -1):
            with pytest.raises(BadInput, match="ttl_s"):
                await store.lease(ttl_s)

    # ------------------------------------------------------------------------------------------ the end

    async def test_a_closed_store_ends_its_watches_and_takes_no_more(self, store: Store) -> None:
        async def watch() -> None:
            async with aclosing(store.watch("/p/", await put(store, "/p/a"))) as events:
                async for _ in events:
                    pass

        watching = asyncio.create_task(watch())
        lease = await store.lease(60)
        await asyncio.sleep(0.05)
        await store.close()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(StoreClosed):
                await watching
        with pytest.raises(StoreClosed):
            await store.get("/p/a")
        with pytest.raises(StoreClosed):
            await put(store, "/p/a")
        with pytest.raises(LeaseLost):
            await lease.keep_alive()
        await store.close()
