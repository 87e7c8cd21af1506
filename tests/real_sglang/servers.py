"""Real SGLang servers for tests, started by the command line that a cell uses."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gyre.config import CellsSection, EngineSection
from gyre.engine.ports import free_port
from gyre.engine.sglang.command import command, environment, secret_options

KEY = "a key that is shown by those who may"
BLOCK_TOKENS = 16
CELLS = CellsSection(slots=8, block_tokens=BLOCK_TOKENS, cache_tokens=65536)
_CACHE = Path(os.environ.get("GYRE_CACHE") or Path(__file__).parents[2] / ".cache")
PYTHON = _CACHE / "sglang-0.5.23" / "bin" / "python"
PYTHON_WITH_GYRE = Path(__file__).parents[2] / "bin" / "sglang-python"
"""For engines that move KV: our plug-in is in this checkout."""
MISSING = "" if (PYTHON.parents[1] / ".made").exists() else "SGLang is not installed here: bin/sglang-env, 4 minutes"
_START_S = 300.0
_END_S = 30.0


def engine_section(*options: str) -> EngineSection:
    return EngineSection(kind="sglang", python=str(PYTHON), device="cpu", dtype="float32", options=options)


@dataclass(frozen=True)
class Server:
    url: str
    model: Path
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@contextmanager
def sglang_server(folder: Path, model: Path, *options: str, version: int = 1) -> Iterator[Server]:
    """A serving SGLang; it is ended, by force if it must be, when the block is left."""
    folder.mkdir(parents=True, exist_ok=True)
    section, port = engine_section(*options), free_port("127.0.0.1")
    secrets, log = folder / "secrets.yaml", folder / "sglang.log"
    secrets.write_text(secret_options(KEY), encoding="utf-8")
    argv = command(
        section,
        CELLS,
        python=section.python,
        model=model,
        version=version,
        host="127.0.0.1",
        port=port,
        secrets=secrets,
        place=0,
        kv=None,
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            ("nice", "-n", "5", *argv),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=environment(section, CELLS, os.environ),
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", model, process, log)
    try:
        deadline_s = time.monotonic() + _START_S
        while not _serves(server.url):
            assert server.alive, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.25)
        yield server
    finally:
        _end(process)


def _serves(url: str) -> bool:
    try:
        asked = urllib.request.Request(f"{url}/model_info", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(asked, timeout=5):
            return True
    except (OSError, urllib.error.URLError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its session: the server has a scheduler and more beside it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            continue
