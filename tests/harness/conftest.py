"""What the tests of the harness package share: the ways to confine that this machine has, and real runs under keepers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gyre.harness import keeper
from gyre.harness.confine import UNCONFINED, ConfinementUnavailable, Sandbox, View, choose
from gyre.harness.tasks import Task
from gyre.harness.workspace import RunFolder
from gyre.ids import RunId, TaskId


def confined_sandboxes() -> list[Sandbox]:
    """Every way to confine a program that works on this machine."""
    try:
        best = choose("auto")
    except ConfinementUnavailable:
        return []
    ways = {best.programs, *([best.forks] if best.forks else [])}
    return [Sandbox(way, None, shutil.which("bwrap") or "") for way in sorted(ways)]


CONFINED = confined_sandboxes()
ALL_SANDBOXES = [*CONFINED, UNCONFINED]


@pytest.fixture(params=CONFINED, ids=str)
def confined(request: pytest.FixtureRequest) -> Sandbox:
    return request.param


@pytest.fixture(params=ALL_SANDBOXES, ids=str)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return request.param


def a_task(files: dict[str, bytes] | None = None, evaluator: Sequence[str] = ("true",), data: bytes = b"{}") -> Task:
    return Task(TaskId("t"), "sort a.txt", files or {"a.txt": b"b\na\n"}, tuple(evaluator), data)


@dataclass
class Bench:
    """A job's folder with runs in it, each kept by a real keeper process."""

    job: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def folder(self, run: str, attempt: int = 1) -> RunFolder:
        return RunFolder.of(self.job / "work", RunId(run), attempt)

    def prepared(self, run: str) -> RunFolder:
        folder = self.folder(run)
        folder.prepare(a_task())
        return folder

    def keep(self, folder: RunFolder, sandbox: Sandbox, *argv: str, **fields: object) -> subprocess.Popen[bytes]:
        """Start `argv` as the harness of the run in `folder`."""
        spec = keeper.Spec(
            name=folder.mark,
            argv=argv,
            cwd=str(folder.workspace),
            env={"PATH": os.environ["PATH"], "HOME": str(folder.home)},
            log=str(folder.log),
            record_file=str(folder.process_file),
            exit_file=str(folder.exit_file),
        )._replace(**fields)
        spec = sandbox.apply(spec, View((folder.workspace, folder.home), (self.job,)), fork=False)
        process = subprocess.Popen(keeper.command("-"), stdin=subprocess.PIPE, start_new_session=True, env={})
        assert process.stdin is not None
        process.stdin.write(json.dumps(spec._asdict()).encode())
        process.stdin.close()
        self.started.append(process)
        return process

    def run(self, folder: RunFolder, sandbox: Sandbox, *argv: str, **fields: object) -> keeper.End:
        """Keep `argv` until it ends."""
        self.keep(folder, sandbox, *argv, **fields).wait(timeout=60)
        return keeper.End.from_json(folder.exit_file.read_text())

    def shell(self, folder: RunFolder, sandbox: Sandbox, script: str) -> str:
        """What a shell script prints, run as a harness."""
        self.run(folder, sandbox, "sh", "-c", script)
        return folder.log.read_text()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    job = tmp_path / "job"
    job.mkdir()
    made = Bench(job)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)


def python(code: str) -> tuple[str, ...]:
    """The argv of a Python program."""
    return (sys.executable, "-I", "-S", "-c", code)


def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def processes(marker: str) -> list[str]:
    """The command lines on this machine that hold `marker`."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if marker in line]
