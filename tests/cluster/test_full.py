"""An etcd that has reached its quota takes no writes and says so; given space again, it goes on by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gyre.errors import StorageFull
from gyre.store.etcd.address import EtcdAddress
from gyre.store.etcd.store import EtcdStore
from gyre.store.protocol import Put

from .etcd_binary import EtcdBinary
from .etcd_server import PlainEtcd, answering, give_space

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

        await give_space(store.client, written[-1])
        assert (await store.txn(puts=[Put("/p/big", b"small")])).succeeded
    finally:
        await store.close()
        server.member.signal(signal.SIGKILL)
