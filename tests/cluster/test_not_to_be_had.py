"""An etcd that refuses its users, or is full, under a job on real nodes: it is waited for, and once it is mended all goes on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from gyre.actors.messages_gyrectl import ResignLeader
from gyre.cli import client as gyrectl
from gyre.errors import Unavailable
from gyre.store.etcd.api import message_class, method

from .etcd_binary import EtcdBinary
from .etcd_server import PASSWORD, PREFIXES, USER, PlainEtcd, add_user, answering, client, give_space
from .fleet import Fleet, Node
from .test_doctor import QUOTA_BYTES, fill
from .test_nodes import at_the_gate

REFUSED_S = 12.0
"""The leases of all nodes, and of the leader, end meanwhile."""


@pytest_asyncio.fixture
async def own_etcd(etcd: EtcdBinary, tmp_path: Path) -> AsyncIterator[PlainEtcd]:
    server = PlainEtcd.make(etcd.path, tmp_path / "etcd", "--quota-backend-bytes", str(QUOTA_BYTES))
    server.member.start()
    async with client(server.url) as asked:
        await answering(asked)
    yield server
    server.member.signal(signal.SIGKILL)


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[[str], Fleet]]:
    fleets: list[Fleet] = []

    def make(url: str) -> Fleet:
        fleets.append(Fleet.make(tmp_path / "fleet", url, "ab"))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.kill_all()


def with_password(etcd: PlainEtcd, user: str, file: Path) -> str:
    file.write_text(f"{PASSWORD}\n")
    return f"{etcd.url}?user={user}&password_file={file}"


async def make_users(etcd: PlainEtcd) -> None:
    async with client(etcd.url) as nobody:
        await add_user(nobody, "root", ())
        await add_user(nobody, USER, PREFIXES)


async def enable_auth(etcd: PlainEtcd) -> None:
    async with client(etcd.url) as nobody:
        await nobody.ask_once(method("Auth", "AuthEnable"), message_class("AuthEnableRequest")(), 30)


async def waited(fleet: Fleet, words: str) -> None:
    """No gyred has ended, each has said why it waits, and none has said it all the time."""

    def said(node: Node) -> list[str]:
        return [line for line in node.log.splitlines() if "cannot be had, and is asked again" in line]

    for node in fleet.nodes.values():
        await fleet.until(
            lambda node=node: any(words in line for line in said(node)), f"{node.name} to say why it waits"
        )
        assert node.running, node.log[-3000:]
        assert len(said(node)) < 8, said(node)


async def goes_on(fleet: Fleet) -> None:
    fleet.open_gate()
    await fleet.finished()
    await fleet.check_books(2, hurt=[run.run for run in await fleet.runs() if run.attempt > 1])
    for node in fleet.nodes.values():
        assert node.running
        assert "Traceback" not in node.log, node.log
    fleet.stop()


async def test_an_etcd_whose_users_are_switched_on_under_a_job_is_waited_for(
    make_fleet: Callable[[str], Fleet], own_etcd: PlainEtcd, tmp_path: Path
) -> None:
    await make_users(own_etcd)
    fleet = make_fleet(own_etcd.url)
    fleet.begin()
    await at_the_gate(fleet)
    await enable_auth(own_etcd)
    await asyncio.sleep(REFUSED_S)
    await waited(fleet, "etcd refuses a client without user=")
    async with client(with_password(own_etcd, "root", tmp_path / "root")) as root:
        await root.ask(method("Auth", "AuthDisable"), message_class("AuthDisableRequest")())
    await goes_on(fleet)


async def test_a_password_that_is_changed_under_a_job_is_waited_for_and_read_again(
    make_fleet: Callable[[str], Fleet], own_etcd: PlainEtcd, tmp_path: Path
) -> None:
    await make_users(own_etcd)
    await enable_auth(own_etcd)
    fleet = make_fleet(with_password(own_etcd, USER, tmp_path / "password"))
    fleet.begin()
    await at_the_gate(fleet)
    async with client(with_password(own_etcd, "root", tmp_path / "root")) as root:
        change = message_class("AuthUserChangePasswordRequest")(name=USER, password="another")
        await root.ask(method("Auth", "UserChangePassword"), change)
    await asyncio.sleep(REFUSED_S)
    await waited(fleet, "etcd refuses user gyre: ")
    (tmp_path / "password").write_text("another\n")
    await goes_on(fleet)


async def test_a_node_that_begins_with_a_wrong_password_says_so_and_begins_when_it_is_right(
    make_fleet: Callable[[str], Fleet], own_etcd: PlainEtcd, tmp_path: Path
) -> None:
    await make_users(own_etcd)
    await enable_auth(own_etcd)
    fleet = make_fleet(with_password(own_etcd, USER, tmp_path / "password"))
    (tmp_path / "password").write_text("wrong\n")
    for node in fleet.nodes.values():
        node.start()
        await fleet.until(lambda node=node: "etcd refuses user gyre: " in node.log, f"{node.name} to be refused")
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    fleet.submit()
    await goes_on(fleet)


async def test_an_etcd_that_is_full_under_a_job_without_a_leader_is_waited_for(
    make_fleet: Callable[[str], Fleet], own_etcd: PlainEtcd
) -> None:
    fleet = make_fleet(own_etcd.url)
    fleet.begin()
    await at_the_gate(fleet)
    leader = fleet.nodes[await fleet.leader()]
    revision = await fill(own_etcd.url)
    with suppress(Unavailable):  # it may wait for a write of its own already, and does as it is told after it
        await gyrectl.order(leader.dir, ResignLeader())
    fleet.open_gate()  # so that all have something to write
    await asyncio.sleep(REFUSED_S)
    await waited(fleet, "etcd takes no more writes")
    async with client(own_etcd.url) as asked:
        await give_space(asked, revision)
    await goes_on(fleet)
