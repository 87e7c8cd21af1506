"""gyre.pki and `gyrectl pki`: certificates that OpenSSL accepts for what they are for, and for nothing else."""

from __future__ import annotations

import json
import ssl
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre import pki
from gyre.cli.gyrectl import app
from gyre.errors import BadInput, Refused
from gyre.pki import Kind


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pki.init(tmp_path / "pki", "lab", 30)
    return tmp_path / "pki"


def verified(folder: Path, certificate: Path, purpose: str) -> bool:
    argv = (
        "openssl",
        "verify",
        "-x509_strict",
        "-purpose",
        purpose,
        "-CAfile",
        str(folder / "ca.pem"),
        str(certificate),
    )
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def test_a_node_may_serve_and_ask_and_a_client_only_ask(folder: Path) -> None:
    node = pki.issue(folder, "node-a", Kind.NODE, 10).path
    client = pki.issue(folder, "ada", Kind.CLIENT, 10).path
    assert [verified(folder, node, purpose) for purpose in ("sslserver", "sslclient")] == [True, True]
    assert [verified(folder, client, purpose) for purpose in ("sslserver", "sslclient")] == [False, True]


def test_another_authority_of_the_same_name_does_not_count(folder: Path, tmp_path: Path) -> None:
    pki.init(tmp_path / "other", "lab", 30)
    node = pki.issue(folder, "node-a", Kind.NODE, 10).path
    assert not verified(tmp_path / "other", node, "sslserver")


def test_a_certificate_says_whom_it_names_where_they_are_and_how_long_it_holds(folder: Path) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    pki.init(folder.parent / "later", "lab", 3650, now=now)
    made = pki.issue(folder.parent / "later", "node-a", Kind.NODE, 365, ("10.0.0.1", "a.example"), now=now)
    assert (made.name, made.kind, made.issuer) == ("node-a", Kind.NODE, "lab")
    assert made.hosts == ("node-a", "a.example", "10.0.0.1")
    assert made.not_after == now + timedelta(days=365)
    assert made.not_before == now - timedelta(days=1)
    assert made.left(now + timedelta(days=400)) < timedelta(0)
    assert pki.read(made.path) == made


def test_keys_are_their_owners_only_from_the_start_and_the_folder_too(folder: Path) -> None:
    pki.issue(folder, "node-a", Kind.NODE, 10)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes["ca.key"] == modes["node-a.key"] == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nothing_that_exists_is_overwritten(folder: Path) -> None:
    pki.issue(folder, "node-a", Kind.NODE, 10)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(Refused, match=r"node-a\.pem exists and is not overwritten"):
        pki.issue(folder, "node-a", Kind.NODE, 10)
    with pytest.raises(Refused, match=r"ca\.pem exists and is not overwritten"):
        pki.init(folder, "lab", 30)
    (folder / "node-b.key").write_text("mine")
    with pytest.raises(Refused, match=r"node-b\.key exists"):
        pki.issue(folder, "node-b", Kind.NODE, 10)
    assert {path: path.read_bytes() for path in before} == before
    assert not (folder / "node-b.pem").exists()


def test_a_renewed_certificate_has_the_key_the_kind_and_the_addresses_of_the_old_one(folder: Path) -> None:
    for kind, name in ((Kind.NODE, "node-a"), (Kind.CLIENT, "ada")):
        old = pki.issue(folder, name, kind, 1, ("10.0.0.1",))
        key = (folder / f"{name}.key").read_bytes()
        new = pki.issue(folder, name, Kind.NODE, 20, renew=True)
        assert (folder / f"{name}.key").read_bytes() == key
        assert (new.kind, new.hosts) == (old.kind, old.hosts)
        assert new.not_after > old.not_after
        ssl.create_default_context().load_cert_chain(new.path, folder / f"{name}.key")


def test_what_is_not_there_cannot_be_renewed(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"node-a\.pem"):
        pki.issue(folder, "node-a", Kind.NODE, 10, renew=True)


@pytest.mark.parametrize("name", ["", "Node", "a b", "../a", "a/b", "-a", "a-", "x" * 64, "ca", "a\n"])
def test_a_name_that_cannot_be_is_refused_in_one_line(folder: Path, name: str) -> None:
    with pytest.raises(BadInput, match="name") as met:
        pki.issue(folder, name, Kind.NODE, 10)
    assert "\n" not in str(met.value)


def test_nothing_outlives_its_authority(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"the authority itself ends in 2[89] days"):
        pki.issue(folder, "node-a", Kind.NODE, 60)
    with pytest.raises(BadInput, match="1 to 36500"):
        pki.issue(folder, "node-a", Kind.NODE, 0)


def test_without_an_authority_nothing_is_issued(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="`gyrectl pki init` makes them"):
        pki.issue(tmp_path, "node-a", Kind.NODE, 10)


@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
def test_an_authority_that_cannot_be_read_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("not PEM")
    with pytest.raises(BadInput, match=name):
        pki.issue(folder, "node-a", Kind.NODE, 10)


# ------------------------------------------------------------------------------------------------ the command


def gyrectl(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["pki", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_makes_and_shows_what_a_cluster_needs(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    assert gyrectl("init", "--cluster", "lab", "--dir", folder)[0] == 0
    code, out, _ = gyrectl("issue", "node-a", "--host", "10.0.0.1", "--dir", folder)
    assert (code, "node node-a (node-a, 10.0.0.1), by lab, expires" in out) == (0, True)
    code, out, _ = gyrectl("issue", "ada", "--client", "--days", "90", "--dir", folder, "--json")
    (shown,) = json.loads(out)
    assert (code, shown["kind"], shown["name"]) == (0, "client", "ada")
    code, out, _ = gyrectl("show", folder)
    assert (code, len(out.splitlines())) == (0, 3)
    assert "ada, by lab" in out or "ada (ada), by lab" in out
    assert "in 89 days" in out or "in 90 days" in out


def test_the_command_tells_an_expired_certificate_and_its_mend(folder: Path) -> None:
    pki.issue(folder, "node-a", Kind.NODE, 1, now=datetime.now(UTC) - timedelta(days=9))
    code, out, _ = gyrectl("show", folder / "node-a.pem")
    assert code == 1
    assert "EXPIRED" in out
    assert "`gyrectl pki issue node-a --renew` makes a new one" in out


def test_the_command_refuses_in_one_line(folder: Path) -> None:
    assert gyrectl("init", "--dir", folder)[0::2] == (1, f"{folder}/ca.pem exists and is not overwritten\n")
    code, _, error = gyrectl("issue", "Not A Name", "--dir", folder)
    assert (code, len(error.splitlines())) == (2, 1)
    assert gyrectl("show", folder / "none.pem")[0] == 2
