"""Real engine processes for tests: `python -m gyre.engine.local`, as a cell starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 180.0
END_S = 60.0
LIMIT_S = 120.0
"""Deadlines of the tests: none is waited for unless something hangs."""


@dataclass(frozen=True)
class EngineProcess:
    url: str
    kv_address: str
    process: subprocess.Popen[bytes]
    model: Path
    log: Path

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


def engine_command(model: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "gyre.engine.local", "--model", str(model), *options]


@contextmanager
def engine_process(folder: Path, model: Path, *options: str, version: int = 1) -> Iterator[EngineProcess]:
    """A serving engine; it is ended, by force if it must be, when the block is left."""
    folder.mkdir(parents=True, exist_ok=True)
    ready, log = folder / "ready.json", folder / "engine.log"
    ready.unlink(missing_ok=True)
    command = engine_command(model, "--version", str(version), "--ready-file", str(ready), *options)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    try:
        deadline_s = time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        found = json.loads(ready.read_text())
        yield EngineProcess(found["url"], found["kv_address"], process, model, log)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)
