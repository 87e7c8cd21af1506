"""A thousand nodes on one etcd: how soon a leader that died is replaced, how fast roles change, what memory it takes.

The nodes are sessions of this one process. Each does to etcd what a gyred does there: a lease of 10 s and the
records that hang on it, its cell's records, the six watches of a directory and one of its cell's role, and a campaign to
lead. All of it is the product's but that most sessions count what their directory's watches bring and do not keep it; five
keep it. etcd waits for its disk.

So this process hears in one place what a thousand machines would hear, and that takes it a second or two where each of
them needs a millisecond. Twenty share a connection, which makes that bearable; GYRE_BENCH_SHARED says otherwise (1 shows
what etcd takes for a thousand connections), and GYRE_BENCH_NODES how many nodes they are.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

from row import Row

from gyre.actors.campaign import LEASE_S as LEADER_LEASE_S
from gyre.actors.campaign import Campaign
from gyre.actors.directory import Directory
from gyre.actors.membership import LEASE_S as NODE_LEASE_S
from gyre.actors.mirror import Mirror
from gyre.actors.site import Site
from gyre.errors import Unavailable
from gyre.ids import CellId, NodeId
from gyre.store.election import Verdict, fenced_txn, verdict
from gyre.store.open import keys_for, open_store
from gyre.store.protocol import Lease, LeaseLost, Store, Txn, commit
from gyre.store.records import (
    CellRoleRecord,
    CellSpecRecord,
    ChildRecord,
    CoreRecord,
    Keys,
    LeaderRecord,
    NodeRecord,
    Role,
    SnapshotRecord,
)
from gyre.store.typed import TypedStore, put_record

NAMES = (
    "cluster_join_s",
    "cluster_first_leader_s",
    "cluster_resign_s",
    "cluster_takeover_s",
    "cluster_orders_per_s",
    "cluster_publications_per_s",
    "cluster_changes_heard_per_s",
    "cluster_leases_lost",
    "cluster_etcd_mb",
    "cluster_process_mb",
)

NODES = int(os.environ.get("GYRE_BENCH_NODES", "1000"))
STORES = max(1, NODES // int(os.environ.get("GYRE_BENCH_SHARED", "20")))
WHOLE = 5
"""Nodes that keep a whole directory."""
AT_ONCE = 20
"""Nodes that begin at the same moment; all of them in one process would ask more at once than it can hear in time."""
PAUSE_S = 0.3
ORDERS_S, PUBLICATIONS_S = 20.0, 20.0
SETTLE_S = 5.0
"""For whoever has lost a campaign to wait again."""
HEARD_S = 300.0
"""For everybody to have heard; this process may have little of the machine."""


@dataclass
class Seen:
    """What happened in all sessions together."""

    heard: int = 0
    ordered: int = 0
    """Changes of roles that the cells they are for have heard."""
    lost: int = 0


class Offices:
    """Of a directory, what a campaign asks: who leads, and how many nodes there are."""

    def __init__(self, store: TypedStore, keys: Keys) -> None:
        self._key = keys.leader
        self._called: list[Callable[[], None]] = []
        self.mirror = Mirror(store, keys.leader, LeaderRecord)
        self.nodes = range(NODES)

    @property
    def listed(self) -> bool:
        return self.mirror.listed

    @property
    def leader(self) -> NodeId | None:
        found = self.mirror.items.get(self._key)
        return None if found is None else found.record.node

    def subscribe(self, call: Callable[[], None]) -> Callable[[], None]:
        self._called.append(call)
        return lambda: self._called.remove(call)

    def changed(self) -> None:
        for call in self._called:
            call()


class Session:
    """One node, as etcd knows it."""

    def __init__(self, index: int, store: Store, keys: Keys, seen: Seen, won: asyncio.Queue[Session]) -> None:
        self.node, self.cell = NodeId(f"n{index:04d}"), CellId(f"n{index:04d}-c0")
        self._store, self._keys, self._seen = store, keys, seen
        self._lease: Lease | None = None
        self.offices = Offices(TypedStore(store), keys)
        site = SimpleNamespace(
            node=self.node,
            keys=keys,
            store=TypedStore(store),
            directory=self.offices,
            peers=None,
            child_address=lambda child: f"unix:{child}",
        )
        self.campaign = Campaign(cast(Site, site), lambda _: won.put_nowait(self), lambda _: self._lose())

    def _lose(self) -> None:
        self._seen.lost += 1

    async def join(self) -> None:
        keys = self._keys
        self._lease = lease = await self._store.lease(NODE_LEASE_S)
        me = NodeRecord(self.node, "tls:10.0.0.1:7400", "0123456789abcdef", 4)
        role = CellRoleRecord(Role.ROLLOUT, Role.ROLLOUT, 1, 0, "", 0)
        children = [ChildRecord(self.node, name, "tls:10.0.0.1:7500") for name in ("gateway", f"replica-{self.cell}")]
        puts = [
            put_record(keys.node(self.node), me, lease.id),
            put_record(keys.cell_spec(self.cell), CellSpecRecord(self.cell, self.node, 4)),
            put_record(keys.cell_role(self.cell), role),
            *(put_record(keys.child(self.node, child.name), child, lease.id) for child in children),
        ]
        await commit(self._store, Txn(puts=tuple(puts)))

    async def stay(self) -> None:
        assert self._lease is not None
        try:
            while True:
                await asyncio.sleep(NODE_LEASE_S / 3)
                with suppress(Unavailable):
                    await self._lease.keep_alive()
        except LeaseLost:
            self._seen.lost += 1

    async def hear(self, prefix: str, revision: int) -> None:
        async with aclosing(self._store.watch(prefix, revision)) as events:
            async for _ in events:
                self._seen.heard += 1

    async def hear_orders(self, revision: int) -> None:
        async with aclosing(self._store.watch(self._keys.cell_role(self.cell), revision)) as events:
            async for _ in events:
                self._seen.ordered += 1

    async def change_roles(self, others: list[Session], until_s: float) -> int:
        """One cell after the other, as a leader orders them: each change is read, written under our token, and heard by
        its cell before the next. Ends early when the lease is lost: this process was too busy to keep it."""
        store, written = TypedStore(self._store), 0
        while perf_counter() < until_s and (token := self.campaign.token):
            key = self._keys.cell_role(others[written % len(others)].cell)
            found = await store.get(key, CellRoleRecord)
            assert found is not None
            other = Role.TRAIN if found.record.desired is Role.ROLLOUT else Role.ROLLOUT
            new = replace(found.record, desired=other, epoch=found.record.epoch + 1, token=token)
            before = self._seen.ordered
            txn = fenced_txn(self._keys, token, puts=(put_record(key, new),))
            if verdict(await store.commit(txn), token) is not Verdict.WRITTEN:
                break
            while self._seen.ordered == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            written += 1
        return written

    async def publish(self, until_s: float) -> int:
        """Snapshots, of which every node hears: of each before the next."""
        store, written = TypedStore(self._store), 0
        while perf_counter() < until_s and (token := self.campaign.token):
            before = self._seen.heard
            put = put_record(self._keys.snapshot, SnapshotRecord(written + 1, "", self.node))
            if verdict(await store.commit(fenced_txn(self._keys, token, puts=(put,))), token) is not Verdict.WRITTEN:
                break
            while self._seen.heard - before < NODES - WHOLE:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            written += 1
        return written


def rows() -> Iterable[Row]:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measured(Path(folder)))
    takes_s = LEADER_LEASE_S + 1
    yield Row("cluster_join_s", found["join"], "s", "", True)
    yield Row("cluster_first_leader_s", found["first"], "s", "", True)
    yield Row("cluster_resign_s", found["resign"], "s", "<= 1", found["resign"] <= 1)
    yield Row("cluster_takeover_s", found["takeover"], "s", f"<= {takes_s:g}", found["takeover"] <= takes_s)
    yield Row("cluster_orders_per_s", found["orders"], "1/s", ">= 20", found["orders"] >= 20)
    yield Row("cluster_publications_per_s", found["publications"], "1/s", "", True)
    yield Row("cluster_changes_heard_per_s", found["heard"], "1/s", "", True)
    yield Row("cluster_leases_lost", found["lost"], "", "0", found["lost"] == 0)
    yield Row("cluster_etcd_mb", found["etcd_mb"], "MB", "<= 1000", found["etcd_mb"] <= 1000)
    yield Row("cluster_process_mb", found["process_mb"], "MB", "", True)


async def measured(folder: Path) -> dict[str, float]:
    from cluster.etcd_binary import etcd_binary
    from cluster.etcd_server import PlainEtcd, answering, client

    server = PlainEtcd.make(etcd_binary().path, folder / "etcd", "--unsafe-no-fsync=false")
    server.member.start()
    stores: list[Store] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        async with client(server.url) as asked:
            await answering(asked)
        assert server.member.process is not None
        stores += [open_store(server.url) for _ in range(STORES)]
        return await course(stores, keys_for(server.url, "bench"), server.member.process.pid, tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for store in stores:
            await store.close()
        server.member.signal(signal.SIGKILL)


async def course(stores: list[Store], keys: Keys, etcd: int, tasks: list[asyncio.Task[None]]) -> dict[str, float]:
    seen, found, won = Seen(), dict[str, float](), asyncio.Queue[Session]()
    everybody = [Session(index, stores[index % len(stores)], keys, seen, won) for index in range(NODES)]

    def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        tasks.append(asyncio.ensure_future(work))
        return tasks[-1]

    async def until_heard_of(leader: Session) -> None:
        await until(lambda: all(each.offices.leader == leader.node for each in everybody))
        await asyncio.sleep(SETTLE_S)

    first = TypedStore(stores[0])
    await first.put(keys.core, CoreRecord(everybody[0].cell, everybody[0].node))
    await first.put(keys.snapshot, SnapshotRecord(0, "", everybody[0].node))
    began_s = perf_counter()
    for start in range(0, NODES, AT_ONCE):
        some = everybody[start : start + AT_ONCE]
        await asyncio.gather(*(each.join() for each in some))
        for each in some:
            begin(each.stay())
    found["join"] = perf_counter() - began_s

    directories = [Directory(TypedStore(stores[index % len(stores)]), keys) for index in range(WHOLE)]
    for directory in directories:
        for mirror in directory.mirrors:
            begin(mirror.follow(directory.changed))
    now = (await first.range(keys.core, CoreRecord)).revision + 1
    for number, each in enumerate(everybody):
        begin(each.hear_orders(now))
        begin(each.offices.mirror.follow(each.offices.changed))
        hears = (keys.cells, keys.nodes, keys.children, keys.core, keys.snapshot) if number >= WHOLE else (keys.roles,)
        for prefix in hears:
            begin(each.hear(prefix, now))
        if number % AT_ONCE == 0:
            await asyncio.sleep(PAUSE_S)
    await until(lambda: all(known.listed for known in (*directories, *(each.offices for each in everybody))))

    began_s = perf_counter()
    campaigns = {each: begin(each.campaign.run()) for each in everybody}
    leader = await won.get()
    found["first"] = perf_counter() - began_s
    await until_heard_of(leader)

    leader.campaign.resign()
    began_s = perf_counter()
    leader = await won.get()
    found["resign"] = perf_counter() - began_s
    await until_heard_of(leader)

    assert won.empty(), "the leader could not keep its lease: this process has too little of the machine"
    campaigns[leader].cancel()
    began_s = perf_counter()
    leader = await won.get()
    found["takeover"] = perf_counter() - began_s
    await until_heard_of(leader)

    began_s = perf_counter()
    written = await leader.change_roles(everybody, began_s + ORDERS_S)
    found["orders"] = written / (perf_counter() - began_s)
    before, began_s = seen.heard, perf_counter()
    written = await leader.publish(began_s + PUBLICATIONS_S)
    found["publications"] = written / (perf_counter() - began_s)
    found["heard"] = (seen.heard - before) / (perf_counter() - began_s)
    found["lost"] = max(seen.lost, *(NODES - len(directory.nodes) for directory in directories))
    found["etcd_mb"] = _resident_mb(etcd)
    found["process_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


async def until(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(HEARD_S):
        while not wanted():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def _resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024
