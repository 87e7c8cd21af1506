"""What a job file is tested for beyond its shape, a line a fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gyre.cli.check import check_job
from gyre.config import JobSpec
from gyre.kv_migrate.choice import Host


def faults(**sections: dict[str, Any]) -> list[str]:
    plain = {
        "job": {"name": "small", "steps": 1},
        "model": {"path": "builtin:tiny"},
        "tasks": {"source": "builtin:chores"},
        "harness": {"config": "builtin:chores"},
    }
    return check_job(JobSpec.from_json(json.dumps(plain | sections)), Path())


def python_with_sglang(folder: Path) -> str:
    environment = folder / "python"
    environment.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    environment.chmod(0o755)
    (folder / "sglang.py").touch()
    return str(environment)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_can_share_the_model_are_taken(ranks: int) -> None:
    assert faults(cells={"train_ranks": ranks}) == []


def test_ranks_that_cannot_share_the_model_are_a_fault() -> None:
    (fault,) = faults(cells={"train_ranks": 3})
    assert fault == (
        "cells.train_ranks: 3 is not allowed; it must divide the model's num_attention_heads (4), "
        "num_key_value_heads (4), vocab_size (256)"
    )


def test_more_ranks_than_a_cell_has_gpus_are_a_fault() -> None:
    engine = {"kind": "sglang", "python": "python3", "tensor_parallel": 2}
    fault, _ = faults(cells={"train_ranks": 4}, engine=engine)
    assert fault == "cells.train_ranks: 4 is not allowed; a cell has engine.tensor_parallel (2) GPUs"
    (other,) = faults(cells={"train_ranks": 4}, engine=engine | {"device": "cpu"})
    assert other.startswith("engine.python: ")


def test_a_python_without_sglang_is_a_fault(tmp_path: Path) -> None:
    for python, why in (
        (sys.executable, "it has no sglang"),
        ("/none", "it cannot be run (No such file or directory)"),
    ):
        (fault,) = faults(engine={"kind": "sglang", "python": python})
        assert fault == f"engine.python: {python!r} is not allowed; a Python that has SGLang is expected: {why}"
    assert faults(engine={"kind": "sglang", "python": python_with_sglang(tmp_path)}) == []


def test_a_transport_that_the_local_engine_cannot_have_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.cli.check.look", lambda _: Host((), "mooncake cannot be loaded (none); install it"))
    (fault,) = faults(engine={"kv_transport": "mooncake-tcp"})
    assert fault == "engine.kv_transport: 'mooncake-tcp' is not allowed; mooncake cannot be loaded (none); install it"
    assert faults(engine={"kv_transport": "tcp"}) == []


def test_rdma_that_sglang_cannot_have_on_this_machine_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether its Python can load mooncake is not asked."""
    engine = {"kind": "sglang", "python": python_with_sglang(tmp_path), "moves_kv": True}
    monkeypatch.setattr("gyre.cli.check.active_devices", lambda: ())
    (fault,) = faults(engine=engine | {"kv_transport": "mooncake"})
    assert fault == (
        "engine.kv_transport: 'mooncake' is not allowed; it needs an RDMA device with an active port, and there is none"
    )
    for transport in ("auto", "tcp", "mooncake-tcp"):
        assert faults(engine=engine | {"kv_transport": transport}) == []
    monkeypatch.setattr("gyre.cli.check.active_devices", lambda: ("mlx5_0",))
    assert faults(engine=engine | {"kv_transport": "mooncake"}) == []
