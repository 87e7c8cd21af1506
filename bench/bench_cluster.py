"""A thousand nodes on one etcd: how soon a leader that died is replaced, how fast roles change, what memory it takes.

The nodes are sessions of this one process. Each does to etcd what a gyred does there: a lease of 10 s and the records that
hang on it, its cell's records, and watches. They use the product's store; fifty of them share one (and its connection),
where a gyred has one of its own. etcd waits for its disk.

A thousand gyreds have more than a core of work with their watches, and this process has not. So five nodes keep a whole
directory, in records; the others have one watch of its six, that of the cells, and count what it brings; and a hundred
are those who would lead. GYRE_BENCH_NODES, _WATCHES and _CANDIDATES say otherwise: 300, 6 and 300 can be held too.

So this process hears in one place what a thousand machines would hear: a role that changes is a thousand changes heard.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from row import Row

from gyre.actors.campaign import LEASE_S as LEADER_LEASE_S
from gyre.actors.directory import Directory
from gyre.actors.membership import LEASE_S as NODE_LEASE_S
from gyre.errors import Unavailable
from gyre.ids import CellId, NodeId
from gyre.store.election import Verdict, campaign_txn, elected, fenced_txn, verdict
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
    "cluster_role_writes_per_s",
    "cluster_changes_heard_per_s",
    "cluster_unheard_writes_per_s",
    "cluster_leases_lost",
    "cluster_etcd_mb",
    "cluster_process_mb",
)

NODES = int(os.environ.get("GYRE_BENCH_NODES", "1000"))
WATCHES = int(os.environ.get("GYRE_BENCH_WATCHES", "1"))
CANDIDATES = int(os.environ.get("GYRE_BENCH_CANDIDATES", "100"))
STORES = max(1, NODES // 50)
WHOLE = 5
"""Nodes that keep a whole directory."""
AT_ONCE = 20
"""Nodes that begin at the same moment; all of them in one process would ask more at once than it can hear in time."""
PAUSE_S = 0.3
ROLES_S, UNHEARD_S = 30.0, 10.0
SETTLE_S = 15.0
"""For everybody to have heard, and to wait again."""


@dataclass
class Seen:
    """What happened in all sessions together."""

    heard: int = 0
    lost: int = 0


class Session:
    """One node, as etcd knows it."""

    def __init__(self, index: int, store: Store, keys: Keys, seen: Seen) -> None:
        self.node, self.cell = NodeId(f"n{index:04d}"), CellId(f"n{index:04d}-c0")
        self._store, self._keys, self._seen = store, keys, seen
        self._lease: Lease | None = None
        self.token = 0
        self.ends = asyncio.Event()
        """Lead no more."""
        self.silent = False
        """End as one that is killed: the lease runs out."""

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

    async def campaign(self, won: asyncio.Queue[Session]) -> None:
        """As the scheduler actor does."""
        while True:
            lease = await self._store.lease(LEADER_LEASE_S)
            result = await commit(self._store, campaign_txn(self._keys, LeaderRecord(self.node, ""), lease.id))
            token = elected(result, lease.id)
            if token is None:
                await lease.revoke()
                await self._until_free(result.revision)
                continue
            self.token = token
            won.put_nowait(self)
            while not self.ends.is_set():
                with suppress(Unavailable):  # it is proven still
                    await lease.keep_alive()
                with suppress(TimeoutError):
                    async with asyncio.timeout(lease.ttl_s / 3):
                        await self.ends.wait()
            if not self.silent:
                await lease.revoke()
            return

    async def _until_free(self, revision: int) -> None:
        async with aclosing(self._store.watch(self._keys.leader, revision + 1)) as events:
            async for event in events:
                if event.kind == "delete":
                    return

    async def change_roles(self, others: list[Session], until_s: float) -> int:
        """One cell after the other, as a leader orders them: each change is read, written under our token, and heard by
        all before the next. Ends early when the lease is lost: this process was too busy to keep it."""
        store, written, hearing = TypedStore(self._store), 0, len(others) - WHOLE
        while perf_counter() < until_s:
            key = self._keys.cell_role(others[written % len(others)].cell)
            found = await store.get(key, CellRoleRecord)
            assert found is not None
            other = Role.TRAIN if found.record.desired is Role.ROLLOUT else Role.ROLLOUT
            new = replace(found.record, desired=other, epoch=found.record.epoch + 1, token=self.token)
            before = self._seen.heard
            txn = fenced_txn(self._keys, self.token, puts=(put_record(key, new),))
            if verdict(await store.commit(txn), self.token) is not Verdict.WRITTEN:
                break
            while self._seen.heard - before < hearing:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            written += 1
        return written

    async def write_unheard(self, until_s: float) -> int:
        """Fenced writes of what nobody watches."""
        store, written = TypedStore(self._store), 0
        while perf_counter() < until_s:
            snapshot = SnapshotRecord(written, "", self.node)
            txn = fenced_txn(self._keys, self.token, puts=(put_record(f"{self._keys.root}unheard", snapshot),))
            if verdict(await store.commit(txn), self.token) is not Verdict.WRITTEN:
                break
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
    yield Row("cluster_role_writes_per_s", found["writes"], "1/s", "", True)
    yield Row("cluster_changes_heard_per_s", found["heard"], "1/s", "", True)
    yield Row("cluster_unheard_writes_per_s", found["steps"], "1/s", ">= 20", found["steps"] >= 20)
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
    seen, found = Seen(), dict[str, float]()
    everybody = [Session(index, stores[index % len(stores)], keys, seen) for index in range(NODES)]

    def begin(work: object) -> None:
        tasks.append(asyncio.ensure_future(work))  # type: ignore[arg-type]

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
    for number, each in enumerate(everybody[WHOLE:]):
        prefixes = (keys.cells, keys.nodes, keys.leader, keys.children, keys.core, keys.snapshot)
        for prefix in prefixes[:WATCHES]:
            begin(each.hear(prefix, now))
        if number % AT_ONCE == 0:
            await asyncio.sleep(PAUSE_S)
    await asyncio.sleep(SETTLE_S)
    assert all(directory.listed for directory in directories)

    won: asyncio.Queue[Session] = asyncio.Queue()
    began_s = perf_counter()
    begin(everybody[0].campaign(won))
    leader = await won.get()
    found["first"] = perf_counter() - began_s
    for number, each in enumerate(everybody[1:CANDIDATES]):
        begin(each.campaign(won))
        if number % AT_ONCE == 0:
            await asyncio.sleep(PAUSE_S)
    await asyncio.sleep(SETTLE_S)

    leader.ends.set()
    began_s = perf_counter()
    leader = await won.get()
    found["resign"] = perf_counter() - began_s
    await asyncio.sleep(SETTLE_S)

    assert won.empty(), "the leader could not keep its lease: this process has too little of the machine"
    leader.silent = True
    leader.ends.set()
    began_s = perf_counter()
    leader = await won.get()
    found["takeover"] = perf_counter() - began_s
    await asyncio.sleep(SETTLE_S)

    before, began_s = seen.heard, perf_counter()
    written = await leader.change_roles(everybody, perf_counter() + ROLES_S)
    found["writes"] = written / (perf_counter() - began_s)
    found["heard"] = (seen.heard - before) / (perf_counter() - began_s)
    began_s = perf_counter()
    found["steps"] = await leader.write_unheard(began_s + UNHEARD_S) / (perf_counter() - began_s)
    found["lost"] = seen.lost
    found["etcd_mb"] = _resident_mb(etcd)
    found["process_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert all(len(directory.nodes) == NODES - seen.lost for directory in directories)
    return found


def _resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024
