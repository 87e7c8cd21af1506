"""Real etcd servers for the tests of every package, fetched and started when the first test asks for them."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from .etcd_binary import EtcdBinary, etcd_binary
from .etcd_server import EtcdCluster, PlainEtcd, answering, client, wipe

_VERSION = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def etcd(pytestconfig: pytest.Config) -> EtcdBinary:
    binary = etcd_binary()
    pytestconfig.stash[_VERSION] = binary.version
    return binary


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if version := config.stash.get(_VERSION, None):
        terminalreporter.write_line(f"etcd {version}, from Debian's packages")


@pytest.fixture(scope="session")
def plain_server(etcd: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainEtcd]:
    server = PlainEtcd.make(etcd.path, tmp_path_factory.mktemp("etcd"))
    server.member.start()
    yield server
    server.member.signal(signal.SIGKILL)


@pytest_asyncio.fixture
async def plain_etcd(plain_server: PlainEtcd) -> PlainEtcd:
    """A server alone, empty."""
    async with client(plain_server.url) as asked:
        await answering(asked)
        await wipe(asked)
    return plain_server


@pytest.fixture(scope="session")
def three_servers(etcd: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster.make(etcd.path, tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.end()


@pytest_asyncio.fixture
async def etcd_cluster(three_servers: EtcdCluster) -> AsyncIterator[EtcdCluster]:
    """Three members, all well, with no key; what a test does to them is mended before the next."""
    await three_servers.heal()
    async with client(three_servers.root_url()) as root:
        await wipe(root)
    yield three_servers
