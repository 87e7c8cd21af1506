"""What bin/etcd-env gives an operator."""

from __future__ import annotations

import subprocess

import pytest

from .etcd_binary import EtcdBinary


@pytest.mark.parametrize(("program", "shows"), [("etcdctl", "etcdctl version: "), ("etcdutl", "etcdutl version: ")])
def test_the_tools_lie_beside_the_server_and_are_of_its_version(etcd: EtcdBinary, program: str, shows: str) -> None:
    done = subprocess.run(
        [etcd.path.parent / program, "version"], check=True, capture_output=True, text=True, timeout=60
    )
    assert f"{shows}{etcd.version}" in done.stdout
