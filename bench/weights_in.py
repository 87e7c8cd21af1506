"""How new weights come into a real SGLang on a CPU: from files on disk or in shared memory, or as tensors of another process.

    bin/sglang-env && PYTHONPATH=tests python bench/weights_in.py

The ways take turns. `cold` are files that the page cache was made to drop, `written` such as a replica has just written and
synced. Read bytes are those of all the server's processes from the disk (/proc/PID/io). For `tensors` a process that has
the weights mapped shares them by name ("file_system": shared by descriptor they kill the server) and gives the bracketed
order. A row has the median and the least and most seconds of the order, and what was done before it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from engine.tiny_models import make_model
from real_sglang.servers import CELLS, KEY, PYTHON, Server, engine_section, sglang_server

from gyre.engine.sglang.command import environment
from gyre.train.snapshot import snapshot_path, write_snapshot

TURNS = 9

Taken = tuple[float, float, int]
"""Seconds of the order and of what was done before it, and bytes that the server read from the disk."""

MODEL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16} | {
    "num_key_value_heads": 8,
    "head_dim": 64,
}
"""101 M parameters in float32."""

SENDER = """
import json, sys, time, urllib.request
import torch.multiprocessing
from safetensors import safe_open
from sglang.srt.utils import MultiprocessingSerializer

torch.multiprocessing.set_sharing_strategy("file_system")
url, key, file = sys.argv[1:]

def order(path, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers)) as answer:
        assert json.loads(answer.read())["success"]

print("ready", flush=True)
for line in sys.stdin:
    with safe_open(file, framework="pt") as opened:
        tensors = [(name, opened.get_tensor(name)) for name in opened.keys()]
    began_s = time.perf_counter()
    shared = MultiprocessingSerializer.serialize(tensors, output_str=True)
    shared_s = time.perf_counter()
    order("/begin_weight_update", {"selector": "all"})
    body = {"serialized_named_tensors": [shared], "flush_cache": True, "weight_version": line.strip()}
    order("/update_weights_from_tensor", body)
    order("/end_weight_update", {"selector": "all"})
    print(json.dumps([shared_s - began_s, time.perf_counter() - shared_s]), flush=True)
    del tensors
"""


def main() -> None:
    with (
        TemporaryDirectory(prefix="gyre-bench-") as disk,
        TemporaryDirectory(prefix="gyre-bench-", dir="/dev/shm") as memory,
    ):
        model = make_model(Path(disk) / "model", "qwen3", **MODEL)
        copy = shutil.copytree(model, Path(memory) / "model")
        print(f"{(model / 'model.safetensors').stat().st_size >> 20} MiB", flush=True)
        with sglang_server(Path(disk) / "server", model) as server:
            measure(server, model, copy, Path(disk))


def measure(server: Server, model: Path, copy: Path, place: Path) -> None:
    argv = (str(PYTHON), "-c", SENDER, server.url, KEY, str(copy / "model.safetensors"))
    env = environment(engine_section(), CELLS, os.environ)
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=env) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        while (line := sender.stdout.readline()).strip() != "ready":
            assert line, "the sender has ended"
        found: dict[str, list[Taken]] = {}
        for turn in range(TURNS + 1):
            for name, way in ways(server, sender, model, copy, place, 100 + turn).items():
                taken = way()
                if turn:  # the first touched what they need
                    found.setdefault(name, []).append(taken)
        for name, each in found.items():
            order_s, before_s, read = zip(*each, strict=True)
            print(
                f"{name:8} {shown(order_s)} s, before it {shown(before_s)} s, {max(read) >> 20} MiB read from the disk"
            )


def ways(
    server: Server, sender: subprocess.Popen[str], model: Path, copy: Path, place: Path, version: int
) -> dict[str, Callable[[], Taken]]:
    fresh = snapshot_path(place / "snapshots", 1)
    return {
        "cold": lambda: files(server, model, version, lambda: drop(model)),
        "written": lambda: files(server, fresh, version, lambda: write(model, fresh)),
        "memory": lambda: files(server, copy, version, lambda: None),
        "tensors": lambda: tensors(server, sender, version),
    }


def files(server: Server, folder: Path, version: int, before: Callable[[], None]) -> Taken:
    began_s = perf_counter()
    before()
    ready_s = perf_counter()
    read = read_bytes(server)
    body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    url = f"{server.url}/update_weights_from_disk"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        assert json.loads(answer.read())["success"]
    return perf_counter() - ready_s, ready_s - began_s, read_bytes(server) - read


def tensors(server: Server, sender: subprocess.Popen[str], version: int) -> Taken:
    assert sender.stdin is not None
    assert sender.stdout is not None
    read = read_bytes(server)
    print(version, file=sender.stdin, flush=True)
    shared_s, order_s = json.loads(sender.stdout.readline())
    return order_s, shared_s, read_bytes(server) - read


def drop(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write(model: Path, path: Path) -> None:
    def fill(folder: Path) -> None:
        for file in model.iterdir():
            shutil.copyfile(file, folder / file.name)

    write_snapshot(path, 1, fill)


def read_bytes(server: Server) -> int:
    """Of the session's processes."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(process.name)) == server.process.pid:
                lines = (process / "io").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    return total


def shown(seconds: tuple[float, ...]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    sys.exit(main())
