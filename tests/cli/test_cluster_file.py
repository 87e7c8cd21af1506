"""The file by which a person reaches a cluster: each fault is one line, and which job is meant is never guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre import pki
from gyre.cli.client import CLUSTER, find_job
from gyre.cli.cluster_file import ClusterFile
from gyre.cli.cluster_job import ClusterJob
from gyre.cli.gyrectl import app
from gyre.config import FileError
from gyre.errors import BadInput
from gyre.jobdir import JobDir

URL = "etcd://127.0.0.1:2379/lab"


@pytest.fixture
def section(tmp_path: Path) -> dict[str, str]:
    """Of a file that is right."""
    folder = tmp_path / "pki"
    pki.init(folder, "lab", 10)
    pki.issue(folder, "ada", pki.Kind.CLIENT, 2)
    pki.issue(folder, "a", pki.Kind.NODE, 2)
    pki.init(tmp_path / "other", "other", 10)
    pki.issue(tmp_path / "other", "ada", pki.Kind.CLIENT, 2)
    return {"store": URL, "ca": "pki/ca.pem", "certificate": "pki/ada.pem", "key": "pki/ada.key"}


def write(folder: Path, section: dict[str, str]) -> Path:
    file = folder / "gyrectl.toml"
    file.write_text("[cluster]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items()))
    return file


def test_a_file_that_is_right_is_taken_and_paths_start_from_its_folder(tmp_path: Path, section: dict[str, str]) -> None:
    found = ClusterFile.load(write(tmp_path, section | {"node": "a"}))
    assert (found.cluster, found.node) == ("lab", "a")
    assert found.credentials.certificate == tmp_path / "pki" / "ada.pem"
    assert CliRunner().invoke(app, ["config", "check", str(found.path)]).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"colour": "red"}, "cluster.colour: no such key; allowed here: ca, certificate, key, node, store"),
        ({"store": "sqlite:///a/store.db"}, "cluster.store: 'sqlite:///a/store.db' is not allowed; a cluster's store"),
        ({"store": "etcd://127.0.0.1:2379"}, "cluster.store: store url's cluster: '' is not allowed"),
        ({"store": f"{URL}?ca=/none.pem"}, "cluster.store's ca: '/none.pem' is not allowed; it must be a file"),
        ({"ca": "none.pem"}, "/none.pem' is not allowed; it must be a file that is there"),
        ({"key": "pki/a.key"}, "/pki/ada.pem' is not allowed; it must be PEM and belong to the key "),
        ({"certificate": "pki/a.pem", "key": "pki/a.key"}, "it names the node 'a'; `gyrectl pki issue NAME --client`"),
        ({"certificate": "other/ada.pem", "key": "other/ada.key"}, "it must be a person's, and signed by "),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, section: dict[str, str], changes: dict[str, str], fault: str
) -> None:
    file = write(tmp_path, section | changes)
    with pytest.raises(FileError) as error:
        ClusterFile.load(file)
    (found,) = error.value.faults
    assert fault in found
    checked = CliRunner().invoke(app, ["config", "check", str(file)])
    assert (checked.exit_code, checked.stderr) == (2, f"gyrectl.toml: {found}\n")


def test_a_certificate_that_has_expired_is_no_fault_of_the_file(tmp_path: Path, section: dict[str, str]) -> None:
    pki.issue(tmp_path / "pki", "late", pki.Kind.CLIENT, 1, now=pki.read(tmp_path / "pki/ada.pem").not_before)
    file = write(tmp_path, section | {"certificate": "pki/late.pem", "key": "pki/late.key"})
    assert ClusterFile.load(file).cluster == "lab"


def test_the_job_is_the_folders_or_the_clusters_that_is_named_and_not_both(
    tmp_path: Path, section: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = write(tmp_path, section), tmp_path / "job"
    JobDir(folder).create()
    JobDir(folder).job_file.write_text("{}")
    assert isinstance(find_job(None, file), ClusterJob)
    with pytest.raises(BadInput, match="either a job's folder"):
        find_job(folder, file)
    monkeypatch.setenv(CLUSTER, str(file))
    assert isinstance(find_job(None), ClusterJob)
    assert isinstance(find_job(folder), JobDir), "what is named goes before the variable"
