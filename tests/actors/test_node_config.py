"""A node's file: what may stand in it, and what it means where it is silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre.actors.node_config import SNAPSHOT_MEMORY_MIB, NodeConfig
from gyre.errors import BadInput
from gyre.jobdir import JobDir

LONE = {"name": "a", "dir": "a", "base": ".", "store": "sqlite:///a/store.db"}
CLUSTER = LONE | {
    "store": "etcd://127.0.0.1:2379/lab",
    "address": "tls:127.0.0.1:7400",
    "cells": 1,
    "ca": "ca.pem",
    "certificate": "a.pem",
    "key": "a.key",
}


def load(tmp_path: Path, section: dict[str, str | int | float]) -> NodeConfig:
    file = tmp_path / "node.toml"
    file.write_text("[node]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items()))
    return NodeConfig.load(file)


@pytest.mark.parametrize(("given", "mib"), [({}, SNAPSHOT_MEMORY_MIB), ({"snapshot_memory_mib": 0}, 0)])
def test_memory_for_snapshots_has_a_bound_which_the_file_of_a_job_keeps(
    tmp_path: Path, given: dict[str, int], mib: int
) -> None:
    config = load(tmp_path, CLUSTER | given)
    assert config.membership is not None
    assert config.membership.snapshot_memory_bytes == mib << 20
    again = load(tmp_path, config.to_plain(JobDir(tmp_path / "job")))
    assert again.membership == config.membership


@pytest.mark.parametrize("wrong", [-1, "much"])
def test_a_bound_that_is_none_is_refused_by_its_key(tmp_path: Path, wrong: int | str) -> None:
    with pytest.raises(BadInput, match=r"node\.snapshot_memory_mib"):
        load(tmp_path, CLUSTER | {"snapshot_memory_mib": wrong})


def test_a_lone_node_has_no_snapshots_of_others(tmp_path: Path) -> None:
    assert load(tmp_path, LONE).membership is None
    with pytest.raises(BadInput, match="snapshot_memory_mib is for snapshots of other nodes"):
        load(tmp_path, LONE | {"snapshot_memory_mib": 100})


def test_a_bound_that_changed_wants_a_restart(tmp_path: Path) -> None:
    begun, now = (load(tmp_path, CLUSTER | {"snapshot_memory_mib": mib}) for mib in (100, 200))
    assert begun.differs(now) == ("address, cells, certificates, snapshot_memory_mib or drain_s",)


def test_live_runs_have_the_time_after_sigterm_that_the_file_says(tmp_path: Path) -> None:
    for given, drain_s in (({}, 300.0), ({"drain_s": 1.5}, 1.5), ({"drain_s": 0}, 0.0)):
        config = load(tmp_path, CLUSTER | given)
        assert config.membership is not None
        assert config.membership.drain_s == drain_s
        assert load(tmp_path, config.to_plain(JobDir(tmp_path / "job"))).membership == config.membership
    with pytest.raises(BadInput, match=r"node\.drain_s"):
        load(tmp_path, CLUSTER | {"drain_s": -1})
    with pytest.raises(BadInput, match="drain_s is for a node among others"):
        load(tmp_path, LONE | {"drain_s": 10})
