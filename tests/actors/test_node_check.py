"""What a node's file names: each fault is one line, which gyrectl and gyred both say before anything is begun."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre import pki
from gyre.actors.node_check import load_node
from gyre.cli import gyred
from gyre.cli.gyrectl import app
from gyre.config import FileError

Changes = dict[str, object]


@pytest.fixture
def node(tmp_path: Path) -> dict[str, object]:
    """The section of a node whose file is right, with certificates beside it; `b` is another node, `ada` a person."""
    folder = tmp_path / "pki"
    pki.init(folder, "lab", 10)
    for name in ("a", "b"):
        pki.issue(folder, name, pki.Kind.NODE, 2)
    pki.issue(folder, "ada", pki.Kind.CLIENT, 2)
    pki.init(tmp_path / "other", "other", 10)
    pki.issue(tmp_path / "other", "a", pki.Kind.NODE, 2)
    return {
        "name": "a",
        "dir": "a",
        "base": ".",
        "store": url(tmp_path),
        "address": "tls:127.0.0.1:7400",
        "cells": 1,
        "ca": "pki/ca.pem",
        "certificate": "pki/a.pem",
        "key": "pki/a.key",
    }


def url(folder: Path, ca: str = "ca.pem", cert: str = "a.pem", key: str = "a.key") -> str:
    pki_folder = folder / "pki"
    return f"etcd://127.0.0.1:2379/lab?ca={pki_folder / ca}&cert={pki_folder / cert}&key={pki_folder / key}"


def write(folder: Path, section: dict[str, object]) -> Path:
    file = folder / "node.toml"
    file.write_text("[node]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items()))
    return file


def faults(folder: Path, section: dict[str, object]) -> list[str]:
    with pytest.raises(FileError) as error:
        load_node(write(folder, section))
    return error.value.faults


def test_a_file_that_is_right_is_taken(tmp_path: Path, node: dict[str, object]) -> None:
    assert load_node(write(tmp_path, node)).name == "a"
    lone = {"name": "a", "dir": "a", "base": ".", "store": "sqlite:///x/store.db"}
    assert load_node(write(tmp_path, lone)).membership is None


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"cells": True}, "node.cells: True is not allowed"),
        ({"colour": "red"}, "node.colour: no such key; allowed here: address, base, ca, "),
        ({"address": "tls:127.0.0.1:70000"}, "node.address: 'tls:127.0.0.1:70000' is not allowed; `tls:host:port`"),
        ({"address": "tcp:127.0.0.1:7000"}, "node.address: 'tcp:127.0.0.1:7000' is not allowed; `tls:host:port`"),
        ({"base": "nowhere"}, "/nowhere' is not allowed; it must be a folder"),
        ({"store": "etcd://127.0.0.1:2379"}, "node.store: store url's cluster: '' is not allowed"),
        ({"store": "etcd://127.0.0.1:223790/lab"}, "node.store: store url's endpoint: '127.0.0.1:223790'"),
        ({"ca": "pki/none.pem"}, "/pki/none.pem' is not allowed; it must be a file that is there"),
        ({"key": "pki/b.key"}, "/pki/a.pem' is not allowed; it must be PEM and belong to the key "),
        ({"certificate": "pki/b.pem", "key": "pki/b.key"}, "it names 'b', and node.name is 'a'"),
        ({"certificate": "pki/ada.pem", "key": "pki/ada.key"}, "it must be a node's, and signed by "),
        ({"certificate": "other/a.pem", "key": "other/a.key"}, "it must be a node's, and signed by "),
        ({"ca": "pki/b.pem"}, "/pki/b.pem' is not allowed; it must be an authority's certificate"),
        ({"ca": "pki/b.key"}, "/pki/b.key' is not allowed; it must be a PEM certificate"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, node: dict[str, object], changes: Changes, fault: str) -> None:
    (found,) = faults(tmp_path, node | changes)
    assert fault in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ({"cert": "none.pem"}, "node.store's cert: "),
        ({"ca": "none.pem"}, "node.store's ca: "),
        ({"key": "none.key"}, "node.store's key: "),
        ({"key": "b.key"}, "it must be PEM and belong to the key "),
        ({"ca": "a.pem"}, "it must be an authority's certificate"),
    ],
)
def test_the_files_of_the_stores_url_are_looked_at_too(
    tmp_path: Path, node: dict[str, object], parts: dict[str, str], fault: str
) -> None:
    (found,) = faults(tmp_path, node | {"store": url(tmp_path, **parts)})
    assert fault in found
    assert found.startswith("node.store's ")


def test_a_store_that_is_none_is_named(tmp_path: Path) -> None:
    lone = {"name": "a", "dir": "a", "base": ".", "store": "postgres://x"}
    (found,) = faults(tmp_path, lone)
    assert found.startswith("node.store: store url: 'postgres://x' is not allowed; give sqlite:")


def test_every_fault_has_its_line_and_a_key_that_lacks_is_named_without_the_file(
    tmp_path: Path, node: dict[str, object]
) -> None:
    found = faults(tmp_path, {key: value for key, value in node.items() if key != "base"} | {"colour": 1, "cells": -1})
    assert [fault.split(":")[0] for fault in sorted(found)] == ["node.base", "node.cells", "node.colour"]
    assert "node.base: required, and not there" in found
    found = faults(tmp_path, node | {"base": "nowhere", "ca": "none", "key": "none.key"})
    assert [fault.split(":")[0] for fault in found] == ["node.base", "node.ca", "node.key"]
    found = faults(tmp_path, {key: value for key, value in node.items() if key != "key"})
    assert found == ["node: address, cells, ca, certificate want key beside them"]


def test_a_certificate_that_has_expired_is_the_doctors_to_tell(tmp_path: Path, node: dict[str, object]) -> None:
    pki.issue(tmp_path / "pki", "late", pki.Kind.NODE, 1, now=pki.read(tmp_path / "pki/a.pem").not_before)
    names = {"name": "late", "certificate": "pki/late.pem", "key": "pki/late.key"}
    assert load_node(write(tmp_path, node | names)).name == "late"


def test_gyrectl_and_gyred_say_the_same_lines_and_end_with_2(
    tmp_path: Path, node: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path, node | {"base": "nowhere", "certificate": "pki/b.pem", "key": "pki/b.key"})
    checked = CliRunner().invoke(app, ["config", "check", str(file)])
    assert checked.exit_code == 2
    assert len(checked.stderr.splitlines()) == 2
    with caplog.at_level(logging.ERROR):
        assert gyred.main(["--config", str(file)]) == 2
    assert [record.message for record in caplog.records] == checked.stderr.splitlines()


@pytest.mark.parametrize("text", ["", "[nod]\nname = 'a'\n"])
def test_a_file_of_neither_kind_is_judged_as_neither(tmp_path: Path, text: str) -> None:
    file = tmp_path / "some.toml"
    file.write_text(text)
    checked = CliRunner().invoke(app, ["config", "check", str(file)])
    assert checked.exit_code == 2
    assert checked.stderr == (
        "some.toml: neither a job file, which has [job], [model], [tasks], nor a node's, which has [node], "
        "nor gyrectl's, which has [cluster]\n"
    )
