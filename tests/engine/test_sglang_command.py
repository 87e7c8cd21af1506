"""The command line that starts SGLang, out of the job file: nothing of SGLang is needed to know it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre.config import SGLANG_SET, CellsSection, EngineSection
from gyre.engine.sglang.command import command, environment, secret_options
from gyre.kv_migrate.hicache_settings import HicacheSettings

CELLS = CellsSection(slots=24, block_tokens=64, cache_tokens=1_000_000, threads=3)
KEY = "0123456789abcdef"


def options(engine: EngineSection, place: int = 0, kv: HicacheSettings | None = None) -> tuple[str, ...]:
    return command(
        engine,
        CELLS,
        python="/sgl/bin/python",
        model=Path("/job/snapshots/v7"),
        version=7,
        host="10.0.0.4",
        port=30000,
        secrets=Path("/job/state/engine-c0.yaml"),
        place=place,
        kv=kv,
    )


def value(argv: tuple[str, ...], name: str) -> str:
    (found,) = (argv[at + 1] for at, word in enumerate(argv) if word == name)
    return found


def test_sizes_and_place_follow_from_the_job_file() -> None:
    engine = EngineSection(kind="sglang", python="/sgl/bin/python", tensor_parallel=4)
    argv = options(engine, place=1)
    assert argv[:3] == ("/sgl/bin/python", "-m", "sglang.launch_server")
    wanted = {
        "--model-path": "/job/snapshots/v7",
        "--weight-version": "7",
        "--host": "10.0.0.4",
        "--port": "30000",
        "--tp-size": "4",
        "--base-gpu-id": "4",
        "--page-size": "64",
        "--max-total-tokens": "1000000",
        "--max-running-requests": "48",
        "--dtype": "bfloat16",
        "--device": "cuda",
    }
    assert {name: value(argv, name) for name in wanted} == wanted
    assert {"--enable-memory-saver", "--skip-tokenizer-init", "--sleep-on-idle", "--enable-metrics"} <= set(argv)


def test_on_a_cpu_it_takes_the_layers_that_need_no_kernels() -> None:
    engine = EngineSection(kind="sglang", python="python", device="cpu", dtype="float32")
    argv = options(engine)
    assert value(argv, "--attention-backend") == "torch_native"
    assert "--enable-memory-saver" not in argv
    assert "--base-gpu-id" not in argv


def test_options_of_the_job_file_come_last_and_unchanged() -> None:
    more = ("--cuda-graph-max-bs-decode", "64", "--attention-backend=fa3")
    assert options(EngineSection(kind="sglang", python="python", options=more))[-3:] == more


def test_with_kv_that_moves_it_has_our_plug_in_and_no_secret_on_the_command_line() -> None:
    engine = EngineSection(kind="sglang", python="python", moves_kv=True)
    assert "--enable-hierarchical-cache" not in options(engine)
    argv = options(engine, kv=HicacheSettings("/job/state/secret", "10.0.0.4:30001", "my-job", ("ca", "cert", "key")))
    assert value(argv, "--hicache-storage-backend") == "dynamic"
    assert json.loads(value(argv, "--hicache-storage-backend-extra-config")) == {
        "backend_name": "gyre",
        "module_path": "gyre.kv_migrate.hicache",
        "class_name": "GyreStorage",
        "interface_v1": 1,
        "prefetch_threshold": 64,
        "secret_file": "/job/state/secret",
        "orders": "10.0.0.4:30001",
        "model": "my-job",
        "certificates": ["ca", "cert", "key"],
    }


def test_the_key_is_in_a_file_and_not_on_the_command_line() -> None:
    argv = options(EngineSection(kind="sglang", python="python"))
    assert value(argv, "--config") == "/job/state/engine-c0.yaml"
    assert not any("key" in word for word in argv)
    assert secret_options(KEY) == f"api-key: {KEY}\n"


def test_packages_of_our_python_are_not_shown_to_its() -> None:
    engine = EngineSection(kind="sglang", python="python", device="cpu")
    ours = {"PATH": "/bin", "PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours", "OMP_NUM_THREADS": "64"}
    assert environment(engine, CELLS, ours) == {
        "PATH": "/bin",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "3",
    }
    on_gpus = environment(EngineSection(kind="sglang", python="python"), CELLS, ours)
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpus
    assert on_gpus["OMP_NUM_THREADS"] == "64"


@pytest.mark.parametrize("name", SGLANG_SET)
def test_what_gyre_sets_no_job_file_sets(name: str) -> None:
    for more in ((name, "1"), (f"{name}=1",)):
        with pytest.raises(ValueError, match=f"{name} is set by Gyre"):
            EngineSection(kind="sglang", python="python", options=more)
