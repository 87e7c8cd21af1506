"""An etcd that has reached its quota takes no writes and says so; given space again, it goes on by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gyre.errors import StorageFull
from gyre.store.etcd.address import EtcdAddress
from gyre.store.etcd.api import message_class, method
from gyre.store.etcd.store import EtcdStore
from gyre.store.protocol import Put

from .etcd_binary import EtcdBinary
from .etcd_server import PlainEtcd, answering

QUOTA_BYTES = 4 * 1024 * 1024


async def test_a_full_etcd_is_told_as_that_and_heals(etcd: EtcdBinary, tmp_path: Path) -> None:
    server = PlainEtcd.make(etcd.path, tmp_path, "--quota-backend-bytes", str(QUOTA_BYTES))
    server.member.start()
    store = EtcdStore(EtcdAddress.parse(server.url))
    try:
        await answering(store.client)
        written: list[int] = []

        async def fill() -> None:
            while len(written) < 30:
                written.append((await store.txn(puts=[Put("/p/big", os.urandom(500_000))])).revision)

        with pytest.raises(StorageFull, match="NOSPACE"):
            await fill()
        kv = await store.get("/p/big")
        assert kv is not None
        assert kv.mod_revision == written[-1]

        compact = message_class("CompactionRequest")(revision=written[-1], physical=True)
        await store.client.ask_once(method("KV", "Compact"), compact, 30)
        await store.client.ask_once(method("Maintenance", "Defragment"), message_class("DefragmentRequest")(), 30)
        alarms = await store.client.ask(method("Maintenance", "Alarm"), message_class("AlarmRequest")())
        for alarm in alarms.alarms:
            disarm = message_class("AlarmRequest")(action=2, memberID=alarm.memberID, alarm=alarm.alarm)
            await store.client.ask(method("Maintenance", "Alarm"), disarm)
        assert (await store.txn(puts=[Put("/p/big", b"small")])).succeeded
    finally:
        await store.close()
        server.member.signal(signal.SIGKILL)
