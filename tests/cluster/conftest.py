"""A store on three members of etcd, with TLS and a user."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gyre.store.etcd.address import EtcdAddress
from gyre.store.etcd.store import EtcdStore

from .etcd_server import EtcdCluster


@pytest.fixture
def wary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent watch has its endpoint checked soon."""
    monkeypatch.setattr("gyre.store.etcd.stream.SILENT_S", 0.5)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, wary: None) -> None:
    """Calls that nobody answers are given up soon, too."""
    monkeypatch.setattr("gyre.store.etcd.client.PATIENCE_S", 2.5)


@pytest_asyncio.fixture
async def store(etcd_cluster: EtcdCluster) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(EtcdAddress.parse(etcd_cluster.url()))
    yield store
    await store.close()


@pytest_asyncio.fixture
async def keeper(etcd_cluster: EtcdCluster) -> AsyncIterator[EtcdStore]:
    """The operator's, who may compact."""
    store = EtcdStore(EtcdAddress.parse(etcd_cluster.root_url()))
    yield store
    await store.close()
