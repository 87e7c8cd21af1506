"""A store URL of etcd, taken apart; one that is wrong is one clear line that tells no password."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gyre.errors import BadInput
from gyre.store.etcd.address import EtcdAddress
from gyre.store.open import cluster_of, open_store


def test_a_url_names_endpoints_the_cluster_the_files_and_the_user() -> None:
    url = "etcd://10.0.0.1:2379,etcd-2.example:2379,[::1]:2379/prod?ca=/c/ca.pem&cert=/c/n.pem&key=/c/n.key&user=gyre"
    address = EtcdAddress.parse(url, {"GYRE_ETCD_PASSWORD": "secret"})
    assert address == EtcdAddress(
        ("10.0.0.1:2379", "etcd-2.example:2379", "[::1]:2379"),
        "prod",
        ca=Path("/c/ca.pem"),
        cert=Path("/c/n.pem"),
        key=Path("/c/n.key"),
        user="gyre",
        password="secret",
    )
    assert "secret" not in repr(address)


def test_the_least_is_one_endpoint_and_the_cluster() -> None:
    assert EtcdAddress.parse("etcd://h:1/c", {}) == EtcdAddress(("h:1",), "c")


def test_a_password_may_come_from_a_file_and_its_line_end_is_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from file\n")
    url = f"etcd://h:1/c?user=gyre&password_file={tmp_path}/password"
    address = EtcdAddress.parse(url, {"GYRE_ETCD_PASSWORD": "other"})
    assert address.password == "from file"
    (tmp_path / "password").write_text("another\n")
    assert address.password_now() == "another"
    (tmp_path / "password").write_text("")
    with pytest.raises(BadInput, match="it must hold the password, and is empty"):
        address.password_now()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("etcd:", "give etcd://host:2379"),
        ("etcd://", "give etcd://host:2379"),
        ("etcd:h:1/c", "give etcd://host:2379"),
        ("etcd://h/c", "'h' is not allowed; give host:port"),
        ("etcd://h:0/c", "'h:0' is not allowed; give host:port"),
        ("etcd://h:65536/c", "'h:65536' is not allowed; give host:port"),
        ("etcd://h:1,/c", "'' is not allowed; give host:port"),
        ("etcd://::1:2379/c", "'::1:2379' is not allowed; give host:port"),
        ("etcd://h:1", "cluster: '' is not allowed; give its name"),
        ("etcd://h:1/", "cluster: '' is not allowed; give its name"),
        ("etcd://h:1/a/b", "cluster: 'a/b' is not allowed"),
        ("etcd://h:1/a%2Fb", "cluster: 'a/b' is not allowed"),
        ("etcd://h:1/c?cert=a&ca=b", "cert and key go together"),
        ("etcd://h:1/c?cert=a&key=b", "cert and key go together, and with ca"),
        ("etcd://h:1/c?colour=red", "'colour=red' is not allowed; each once of ca, cert, key, user, password_file"),
        ("etcd://h:1/c?ca=a&ca=b", "'ca=b' is not allowed; each once"),
        ("etcd://h:1/c?ca=", "'ca=' is not allowed; each once"),
        ("etcd://h:1/c?nonsense", "options are name=value"),
        ("etcd://h:1/c?user=gyre", "set $GYRE_ETCD_PASSWORD, or name a file"),
        ("etcd://h:1/c?user=gyre&password_file=/not/there", "'/not/there' is not allowed; it must be a text file"),
        ("etcd://h:1/c?password_file=/etc/hostname", "it goes with user="),
    ],
)
def test_a_url_that_is_wrong_is_one_line_with_what_is_right(url: str, message: str) -> None:
    with pytest.raises(BadInput) as refused:
        EtcdAddress.parse(url, {})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("url", ["etcd://gyre:hunter2@h:1/c", "etcd://h:1/c?user=gyre&password=hunter2"])
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(BadInput, match=r"\$GYRE_ETCD_PASSWORD") as refused:
        EtcdAddress.parse(url, {})
    assert "hunter2" not in str(refused.value)


def test_files_that_cannot_be_read_are_told_when_the_store_is_opened() -> None:
    with pytest.raises(BadInput, match=r"'/not/there\.pem' is not allowed; it must be readable"):
        open_store("etcd://h:1/c?ca=/not/there.pem")


def test_the_cluster_of_a_store_url_is_that_of_etcd_and_none_of_an_embedded_store() -> None:
    assert cluster_of("etcd://h:1/prod") == "prod"
    assert cluster_of("sqlite:///state.db") is None
    assert cluster_of("memory:") is None


def test_nobody_loads_grpc_who_opens_no_etcd_store() -> None:
    program = """
import sys
import gyre.cli.gyred
from gyre.store.open import open_store
store = open_store("memory:")
print([name for name in ("grpc", "google.protobuf", "etcd3") if name in sys.modules])
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert shown.strip() == "[]"
