"""Leases and the leader on a real etcd: kept through the death of a member, given up when nobody can prove them, and
the writes of a leader that slept through its end refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from gyre.errors import Unavailable
from gyre.ids import NodeId
from gyre.store.election import Verdict, campaign_txn, elected, fenced_txn, verdict
from gyre.store.etcd.store import EtcdStore
from gyre.store.protocol import LeaseLost, Put, commit
from gyre.store.records import Keys, LeaderRecord

from .etcd_server import EtcdCluster

DEADLINE_S = 60.0
KEYS = Keys("test")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lease_is_kept_through_the_end_of_the_endpoint(
    etcd_cluster: EtcdCluster, store: EtcdStore, number: signal.Signals
) -> None:
    lease = await store.lease(3)
    await store.txn(puts=[Put("/p/kept", b"", lease.id)])
    etcd_cluster.at(store.client.endpoint).signal(number)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 4  # longer than it would live unkept
    while loop.time() < end_s:
        assert 0 < await lease.keep_alive() <= lease.ttl_s
        await asyncio.sleep(0.5)
    assert await store.get("/p/kept") is not None


async def test_a_lease_that_nobody_can_prove_is_given_up_when_its_time_has_passed_and_for_good(
    etcd_cluster: EtcdCluster, store: EtcdStore
) -> None:
    lease = await store.lease(2)
    for member in etcd_cluster.members:
        member.signal(signal.SIGSTOP)

    async def keep() -> None:
        while True:
            try:
                await lease.keep_alive()
            except Unavailable:
                await asyncio.sleep(0.1)

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LeaseLost, match="has not confirmed it"):
            await keep()
    await etcd_cluster.heal()
    with pytest.raises(LeaseLost):
        await lease.keep_alive()


_LEADER = """
import asyncio, json, sys
from gyre.ids import NodeId
from gyre.store.election import campaign_txn, elected, fenced_txn, verdict
from gyre.store.open import open_store
from gyre.store.protocol import LeaseLost, Put, commit
from gyre.store.records import Keys, LeaderRecord

KEYS = Keys("test")

def say(**what):
    print(json.dumps(what), flush=True)

async def main():
    store = open_store(sys.argv[1])
    lease = await store.lease(2)
    token = elected(await commit(store, campaign_txn(KEYS, LeaderRecord(NodeId("old"), "tcp:old"), lease.id)), lease.id)
    say(token=token)
    number = 0
    while True:  # it never asks whether it still leads: only the store can stop it
        number += 1
        result = await commit(store, fenced_txn(KEYS, token, puts=[Put("/p/by-leader", f"old {number}".encode())]))
        say(verdict=verdict(result, token))
        if number % 10 == 0:
            try:
                await lease.keep_alive()
            except LeaseLost as lost:
                say(lost=str(lost))
        await asyncio.sleep(0.02)

asyncio.run(main())
"""


async def test_a_leader_that_slept_through_its_lease_writes_nothing_any_more(
    etcd_cluster: EtcdCluster, store: EtcdStore
) -> None:
    old = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LEADER, etcd_cluster.url()),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert old.stdout is not None

    async def said() -> dict[str, str]:
        assert old.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            return json.loads(await old.stdout.readline())

    try:
        old_token = int((await said())["token"])
        for _ in range(5):
            assert await said() == {"verdict": Verdict.WRITTEN}
        os.kill(old.pid, signal.SIGSTOP)

        lease = await store.lease(60)
        me = LeaderRecord(NodeId("new"), "tcp:new")
        token = None
        async with asyncio.timeout(DEADLINE_S):
            while token is None:
                token = elected(await commit(store, campaign_txn(KEYS, me, lease.id)), lease.id)
                await asyncio.sleep(0.05)
        assert token > old_token
        mine = await commit(store, fenced_txn(KEYS, token, puts=[Put("/p/by-leader", b"new")]))
        assert verdict(mine, token) is Verdict.WRITTEN

        os.kill(old.pid, signal.SIGCONT)
        refused = 0
        lost = False
        while refused < 20 or not lost:
            line = await said()
            lost = lost or "lost" in line
            # What it had said before it was stopped may still lie in the pipe.
            refused += line.get("verdict") == Verdict.DEPOSED
            assert not (refused and line.get("verdict") == Verdict.WRITTEN)
        kv = await store.get("/p/by-leader")
        assert kv is not None
        assert (kv.value, kv.mod_revision) == (b"new", mine.revision)
    finally:
        old.kill()
        await old.wait()
