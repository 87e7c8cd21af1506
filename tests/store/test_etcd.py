"""The store on etcd: the conformance suite on a server alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from cluster.etcd_server import EtcdCluster, PlainEtcd

from gyre.store.open import open_store
from gyre.store.protocol import Store

from .conformance import StoreConformance


class TestOneServer(StoreConformance):
    @pytest_asyncio.fixture
    async def store(self, plain_etcd: PlainEtcd) -> AsyncIterator[Store]:
        store = open_store(plain_etcd.url)
        yield store
        await store.close()


class TestThreeServers(StoreConformance):
    """With TLS on both sides, and a user who may do no more than the store needs."""

    @pytest_asyncio.fixture
    async def store(self, etcd_cluster: EtcdCluster) -> AsyncIterator[Store]:
        store = open_store(etcd_cluster.url())
        yield store
        await store.close()

    @pytest_asyncio.fixture
    async def keeper(self, etcd_cluster: EtcdCluster) -> AsyncIterator[Store]:
        store = open_store(etcd_cluster.root_url())
        yield store
        await store.close()
