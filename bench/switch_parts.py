"""The processes that bench_switch.py orders about: local engines and a replica, as a cell starts them; and a model of some size."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from gyre.actors.messages import Ok, Ping
from gyre.actors.remote import RemoteRef, connect
from gyre.config import CheckpointSection, LossSection, OptimizerSection
from gyre.engine.access import http_key
from gyre.errors import Unavailable

START_S = 180.0


@dataclass(frozen=True)
class Engine:
    url: str
    key: str


@asynccontextmanager
async def engines(folder: Path, model: Path, cells: Sequence[str], *options: str) -> AsyncGenerator[dict[str, Engine]]:
    """A process of the local engine for each cell, with version 1 of `model`. Those of one folder have one secret."""
    secret = folder / "secret"
    if not secret.exists():
        secret.write_text(secrets.token_hex(16))
    started: dict[str, tuple[Path, subprocess.Popen[bytes]]] = {}
    try:
        for cell in cells:
            ready = folder / f"{cell}.json"
            files = ("--model", str(model), "--ready-file", str(ready), "--secret-file", str(secret))
            argv = (sys.executable, "-m", "gyre.engine.local", "--version", "1", *files, *options)
            started[cell] = ready, _start(argv, folder / f"{cell}.log")
        for ready, process in started.values():
            await _until(ready.exists, process)
        key = http_key(secret.read_text())
        yield {cell: Engine(json.loads(ready.read_text())["url"], key) for cell, (ready, _) in started.items()}
    finally:
        for _, process in started.values():
            _end(process)


@asynccontextmanager
async def replica(folder: Path, model: Path) -> AsyncGenerator[RemoteRef]:
    address, secret = f"unix:{folder}/replica.sock", folder / "replica.secret"
    secret.write_text(secrets.token_hex(16))
    config = {
        "model_dir": str(model),
        "loss": LossSection().model_dump(mode="json"),
        "optimizer": OptimizerSection().model_dump(mode="json"),
        "checkpoint": CheckpointSection().model_dump(mode="json"),
        "checkpoints_dir": str(folder / "checkpoints"),
        "staging_dir": "",
        "temperature": 1.0,
        "micro_batch_tokens": 4096,
        "threads": 1,
        "sums_dtype": "float32",
        "ranks": 1,
        "first_device": 0,
        "far": None,
    }
    argv = (sys.executable, "-m", "gyre.actors.replica_process", address, str(secret), json.dumps(config))
    process = _start(argv, folder / "replica.log")
    ref = connect(address, secret.read_text())
    try:
        for _ in range(int(START_S / 0.2)):
            try:
                await ref.ask(Ping(), 5.0, Ok)
                break
            except Unavailable:
                assert process.poll() is None, (folder / "replica.log").read_text()
                await asyncio.sleep(0.2)
        yield ref
    finally:
        await ref.close()
        _end(process)


def write_model(folder: Path, hidden: int, layers: int, context_tokens: int) -> None:
    """Qwen3's layout over random weights in float32, with the vocabulary of the model that is in the folder.

    They are large enough for greedy answers to be long.
    """
    inner = 3 * hidden
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    config |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "head_dim": 64}
    config |= {"max_position_embeddings": context_tokens}
    noise = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=noise) * 1.5 / columns**0.5

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = torch.ones(hidden)
        for name in "qkvo":
            weights[f"{at}self_attn.{name}_proj.weight"] = matrix(hidden, hidden)
        for name in "qk":
            weights[f"{at}self_attn.{name}_norm.weight"] = torch.ones(64)
        weights[f"{at}mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{at}mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[f"{at}mlp.down_proj.weight"] = matrix(hidden, inner)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"))


def _start(argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


async def _until(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    for _ in range(int(START_S / 0.05)):
        if ready():
            return
        if process.poll() is not None:
            raise RuntimeError(f"an engine ended with {process.returncode}")
        await asyncio.sleep(0.05)
    raise RuntimeError("an engine did not start")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
