"""Who may do what on an etcd with TLS and users; tokens and certificates that end, and are renewed, under an open store."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from gyre.errors import Refused, Unavailable
from gyre.store.etcd.address import EtcdAddress
from gyre.store.etcd.api import message_class, method
from gyre.store.etcd.store import EtcdStore
from gyre.store.protocol import Lease, Put, StoreRefuses

from .authority import Authority
from .etcd_server import PASSWORD, TOKEN_S, EtcdCluster, PlainEtcd, add_user, client

EXPIRED = datetime.timedelta(hours=-1)


async def test_a_token_that_has_ended_is_renewed_by_itself(etcd_cluster: EtcdCluster, store: EtcdStore) -> None:
    start = (await store.txn(puts=[Put("/p/a", b"")])).revision

    async def renewed(work: Callable[[EtcdStore, Lease], Awaitable[object]]) -> None:
        store = EtcdStore(EtcdAddress.parse(etcd_cluster.url()))
        lease = await store.lease(60)
        before = store.client.token
        # A token lives on while it is used, so etcd is asked nothing until it has let this one go.
        await asyncio.sleep(TOKEN_S + 1.5)
        await work(store, lease)
        assert store.client.token != before
        await store.close()

    await asyncio.gather(
        renewed(lambda store, _: store.get("/p/a")),
        renewed(lambda store, _: store.txn(puts=[Put("/p/b", b"")])),
        renewed(lambda _, lease: lease.keep_alive()),
        renewed(lambda store, _: anext(store.watch("/p/", start))),
    )


async def test_a_change_of_users_under_an_open_store_is_no_error(etcd_cluster: EtcdCluster, store: EtcdStore) -> None:
    await store.txn(puts=[Put("/p/a", b"")])
    async with client(etcd_cluster.root_url()) as root:
        await add_user(root, "another", ("/p/",))
    await store.txn(puts=[Put("/p/a", b"")])
    assert await store.get("/p/a") is not None


async def test_a_wrong_password_and_no_user_are_refused_in_one_line(
    etcd_cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_ETCD_PASSWORD", "wrong")
    wrong = etcd_cluster.url().split("&password_file=")[0]
    for url, message in (
        (wrong, "etcd refuses user gyre: .*invalid user ID or password; check its password"),
        (etcd_cluster.url(""), "etcd refuses a client without user="),
    ):
        store = EtcdStore(EtcdAddress.parse(url))
        with pytest.raises(Refused, match=message) as refused:
            await store.get("/p/a")
        assert "\n" not in str(refused.value)
        await store.close()


async def test_a_password_is_read_again_and_a_wrong_one_is_not_shown_to_etcd_by_everybody_who_waits(
    etcd_cluster: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text("wrong")
    url = etcd_cluster.url().replace(str(etcd_cluster.password_file), str(file))
    store = EtcdStore(EtcdAddress.parse(url))
    shown: list[str] = []
    true = store.client._authenticate

    async def authenticate() -> str:
        shown.append(store.client._password)
        return await true()

    monkeypatch.setattr(store.client, "_authenticate", authenticate)
    monkeypatch.setattr("gyre.store.etcd.client.REFUSED_S", 60.0)
    refused = await asyncio.gather(*(store.get("/p/a") for _ in range(20)), return_exceptions=True)
    assert {type(error) for error in refused} == {StoreRefuses}
    assert shown == ["wrong"]
    file.unlink()
    with pytest.raises(StoreRefuses):
        await store.get("/p/a")
    file.write_text(PASSWORD)
    assert await store.get("/p/a") is None
    assert shown == ["wrong", PASSWORD]
    await store.close()


async def test_what_a_user_may_not_touch_is_refused_and_all_else_goes_on(
    etcd_cluster: EtcdCluster, store: EtcdStore
) -> None:
    with pytest.raises(Refused, match="permission denied"):
        await store.txn(puts=[Put("outside", b"")])
    with pytest.raises(Refused, match="permission denied"):
        await store.get("outside")
    with pytest.raises(Refused, match="permission denied"):
        async with aclosing(store.watch("outside", 1)) as events:
            await anext(events)
    await store.txn(puts=[Put("/p/a", b"")])


async def test_a_user_of_an_etcd_that_has_none_is_told_so(
    plain_etcd: PlainEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_ETCD_PASSWORD", "any")
    store = EtcdStore(EtcdAddress.parse(f"{plain_etcd.url}?user=gyre"))
    with pytest.raises(Refused, match="authentication is not enabled"):
        await store.get("/p/a")
    await store.close()


@pytest.mark.usefixtures("impatient")
async def test_a_client_without_a_certificate_or_with_a_foreign_one_is_let_in_by_nobody(
    etcd_cluster: EtcdCluster,
) -> None:
    foreign = Authority.make(etcd_cluster.authority.folder / "foreign")
    cert, key = foreign.issue("node1")
    ca = etcd_cluster.authority.ca
    endpoints = etcd_cluster.url().split("?")[0]

    async def refused(options: str) -> None:
        store = EtcdStore(EtcdAddress.parse(f"{endpoints}?{options}"))
        with pytest.raises(Unavailable, match=r"etcd at 127\.0\.0\.1:[0-9]+ does not answer"):
            await store.get("/p/a")
        await store.close()

    await asyncio.gather(refused(f"ca={ca}&cert={cert}&key={key}"), refused(f"ca={ca}"), refused(f"ca={foreign.ca}"))


@pytest.mark.usefixtures("impatient")
async def test_a_certificate_that_has_expired_is_refused_until_another_lies_in_its_place(
    etcd_cluster: EtcdCluster,
) -> None:
    etcd_cluster.authority.issue("late", EXPIRED)
    store = EtcdStore(EtcdAddress.parse(etcd_cluster.url("gyre", "late")))
    with pytest.raises(Unavailable, match="does not answer"):
        await store.get("/p/a")
    etcd_cluster.authority.issue("late")
    await store.txn(puts=[Put("/p/a", b"")])
    assert await store.get("/p/a") is not None
    await store.close()


async def test_a_user_whose_role_leaves_out_the_receipts_is_refused_with_what_to_grant(
    etcd_cluster: EtcdCluster,
) -> None:
    async with client(etcd_cluster.root_url()) as root:
        await add_user(root, "half", ("/",))
    store = EtcdStore(EtcdAddress.parse(etcd_cluster.url("half")))
    assert await store.get("/p/a") is None
    with pytest.raises(Refused, match=r"gyre\.receipts/test/"):
        await store.txn(puts=[Put("/p/a", b"")])
    await store.close()
    async with client(etcd_cluster.root_url()) as root:
        await root.ask(method("Auth", "UserDelete"), message_class("AuthUserDeleteRequest")(name="half"))
