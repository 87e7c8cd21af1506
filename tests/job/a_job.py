"""A small real job for the tests of the whole: `gyrectl up` and everything below it, as processes of this machine.

The tasks are a folder of our own and the harness is the scripted one, so that a job costs seconds. A run asks the policy
three times and leaves a score of its own in its workspace: rewards differ, so every group trains. Of the two training
tasks, one waits at a gate in the middle until the test opens it: so a test knows where the job is when it strikes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre.actors.messages_gyrectl import Status
from gyre.children import ProcessRef
from gyre.cli import client
from gyre.cli.report import Books
from gyre.config import JobSpec, load_job
from gyre.errors import GyreError
from gyre.harness.tasks import open_source
from gyre.jobdir import JobDir
from gyre.store.records import JobState, Purpose, RunRecord, RunState, StepRecord
from gyre.train.batch import GroupPlan, SettledGroup, SettledRun, plan
from gyre.trajectory.records import Outcome

GYRED_MOST_BYTES = 80e6
DEADLINE_S = 240.0
"""For anything that is waited for: a machine that is busy takes its time, one that hangs never ends."""

WAIT = "timeout 25 sh -c 'until grep -q open gate; do sleep 0.1; done' 2>/dev/null"
SCRIPT = [
    {"ask": "{task}"},
    {"run": "od -An -N2 -tu2 /dev/urandom | tr -d ' ' > score"},
    *[{"run": f"[ ! -e gate ] || {WAIT}"}] * 8,
    {"ask": "go on"},
    {"ask": "and again"},
    {"submit": True},
]
SCORE = """
import json, pathlib, sys
print(json.dumps({"score": int((pathlib.Path(sys.argv[1]) / "score").read_text()) / 65535}))
"""


@dataclass
class Job:
    """One job: its file, its folder, and the `gyrectl up` that runs it."""

    root: Path
    settings: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """What differs from `_SETTINGS`."""
    script: Sequence[dict[str, Any]] = tuple(SCRIPT)
    up: subprocess.Popen[str] | None = None
    gate_is_open: bool = False
    gyred_bytes: int = 0
    """The most memory that a gyred of it was seen to have."""

    @property
    def dir(self) -> JobDir:
        return JobDir(self.root / "job")

    # ------------------------------------------------------------------------------------------ what it is made of

    def add_task(self, name: str, files: dict[str, str] | None = None, score: str = SCORE, limit_s: float = 10) -> None:
        """A task `train/…` or `heldout/…` whose evaluator is the Python program `score`."""
        folder = self.root / "tasks" / name
        (folder / "files").mkdir(parents=True)
        (folder / "score.py").write_text(score)
        argv = [sys.executable, "-I", "-S", "{folder}/score.py", "{workspace}"]
        (folder / "task.toml").write_text(
            f"instruction = {json.dumps('do ' + name)}\n[evaluator]\nargv = {json.dumps(argv)}\nlimit_s = {limit_s}\n"
        )
        for path, content in (files or {}).items():
            (folder / "files" / path).write_text(content)

    def write(self) -> Path:
        """The job file. Tasks that nobody added are the plain ones."""
        tasks = self.root / "tasks"
        if (self.root / "job.toml").exists():
            return self.root / "job.toml"
        if not (tasks / "train").exists():
            self.add_task("train/gated", {"gate": "closed"})
            self.add_task("train/free")
        if not (tasks / "heldout").exists():
            self.add_task("heldout/one")
            self.add_task("heldout/two")
        (self.root / "script.json").write_text(json.dumps(list(self.script)))
        lines: list[str] = []
        for section in {**_SETTINGS, **self.settings}:
            keys = {**_SETTINGS.get(section, {}), **self.settings.get(section, {})}
            lines += [f"[{section}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        file = self.root / "job.toml"
        file.write_text("\n".join(lines) + "\n")
        return file

    # ------------------------------------------------------------------------------------------ gyrectl up

    def task(self, index: int) -> str:
        """The name of the training task that the job's group `index` has."""
        spec = load_job(self.root / "job.toml")
        return open_source(spec.tasks, spec.job.seed, self.root).train(index).id

    def seen_by(self, pid: int, path: Path) -> Path:
        """What process `pid` sees at `path`."""
        return Path(f"/proc/{pid}/root") / path.relative_to("/")

    def start(self, *options: str, journal_bytes: int = 0) -> None:
        """`gyrectl up`, in the background; with `journal_bytes`, on a disk of its own for the journal that has those."""
        file = self.write()
        command = [sys.executable, "-m", "gyre.cli.gyrectl", "up", str(file), "--dir", str(self.dir.root), *options]
        if journal_bytes:
            self.dir.journal.mkdir(parents=True)
            mount = f'mount -t tmpfs -o size={journal_bytes} tmpfs "$0" && exec "$@"'
            command = [
                "unshare",
                "--user",
                "--map-root-user",
                "--mount",
                "sh",
                "-c",
                mount,
                str(self.dir.journal),
                *command,
            ]
        with (self.root / "up.log").open("a") as log:
            self.up = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
                start_new_session=True,
            )

    async def ended(self) -> int:
        """The exit code of `gyrectl up`."""
        assert self.up is not None
        code = await self.until(lambda: self.up.poll() if self.up else None, "gyrectl up to end", is_there)
        assert code is not None
        return code

    def open_gate(self, which: str = "") -> None:
        """Let the runs that are named so go on; or all, those of later steps too.

        The latter is done again at each look: a workspace may just be made.
        """
        gates = list(self.dir.runs.glob(f"{which or '*'}/*/workspace/gate"))
        if not which:
            self.gate_is_open = True
            gates += self.root.glob("tasks/*/*/files/gate")
        for gate in gates:
            try:
                if gate.read_text() != "open":
                    gate.write_text("open")
            except OSError:  # its workspace was discarded
                continue

    def _look(self) -> None:
        if self.gate_is_open:
            self.open_gate()
        with suppress(OSError, ValueError):  # there is no gyred just now
            pid = json.loads(self.dir.gyred_file.read_text())["pid"]
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            resident = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)
            self.gyred_bytes = max(self.gyred_bytes, resident)

    async def until(self, look: Callable[[], Any], what: str, enough: Callable[[Any], bool] = bool) -> Any:
        """Look again and again until it is enough."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not enough(found := look()):
            assert time.monotonic() < deadline_s, f"waited in vain for {what}; {self.tail()}"
            self._look()
            await asyncio.sleep(0.05)
        return found

    async def until_logged(self, text: str) -> None:
        await self.until(lambda: text in self.log, f"{text!r} in the log")

    async def status(self) -> Status | None:
        try:
            return await client.status(self.dir)
        except (GyreError, OSError):
            return None

    async def until_status(self, what: str, enough: Callable[[Status], bool]) -> Status:
        """The first status that is enough. Fails when the job ends before."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            status = await self.status()
            if status is not None and enough(status):
                return status
            assert self.up is not None
            assert self.up.poll() is None, f"gyrectl up ended before there was {what}; {self.tail()}"
            assert time.monotonic() < deadline_s, f"waited in vain for {what}, last: {status}; {self.tail()}"
            self._look()
            await asyncio.sleep(0.05)

    async def books(self) -> Books:
        return await client.books(self.dir)

    @property
    def log(self) -> str:
        """What gyred said so far."""
        path = self.dir.logs / "gyred.log"
        return path.read_text() if path.exists() else ""

    @property
    def said(self) -> str:
        """What gyrectl printed so far."""
        return (self.root / "up.log").read_text()

    def tail(self) -> str:
        return f"gyrectl said:\n{self.said[-2000:]}\ngyred's log ends:\n{self.log[-6000:]}"

    # ------------------------------------------------------------------------------------------ its processes

    def processes(self) -> dict[int, str]:
        """Every process of this job, whoever started it: its folder, or that of its sockets, is in its command line."""
        marks = (str(self.root), str(self.dir.sockets))
        found: dict[int, str] = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            try:
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                where = os.readlink(f"/proc/{entry}/cwd")
            except OSError:
                continue
            if any(mark in command or where.startswith(mark) for mark in marks):
                found[int(entry)] = command
        return found

    def gyred(self) -> int:
        """The pid of the gyred that runs now; 0 when there is none."""
        try:
            found = json.loads(self.dir.gyred_file.read_text())
        except (OSError, ValueError):
            return 0
        return int(found["pid"]) if ProcessRef(found["pid"], found["start_ticks"]).alive else 0

    def harnesses(self, which: str = "*") -> dict[str, int]:
        """The pids of the living runs, by run and attempt."""
        found: dict[str, int] = {}
        for path in self.dir.runs.glob(f"{which}/*/process.json"):
            plain = json.loads(path.read_text())
            if ProcessRef(plain["pid"], plain["start_ticks"]).alive:
                found["/".join(path.parent.parts[-2:])] = plain["pid"]
        return found

    def kill_all(self) -> None:
        """For a test that failed: leave nothing behind."""
        for _ in range(20):
            left = self.processes()
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if not left:
                break
            time.sleep(0.1)
        if self.up is not None:
            self.up.wait()
        self.dir.clear_staging()
        self.dir.clear_snapshots_in_memory()

    # ------------------------------------------------------------------------------------------ what must hold of it

    async def check_books(self, steps: int, *, hurt: Sequence[str] = ()) -> Books:
        """The job is finished and its books are right; no run but those in `hurt` felt anything."""
        books = await self.books()
        assert books.job is not None
        assert books.job.state is JobState.FINISHED, f"{books.job}; {self.tail()}"
        assert books.snapshot is not None
        assert books.snapshot.version == steps
        assert 20e6 < self.gyred_bytes <= GYRED_MOST_BYTES, self.gyred_bytes
        assert [step.step for step in books.steps] == list(range(1, steps + 1))
        assert [step.version for step in books.steps] == list(range(1, steps + 1))
        training = {group.group: group for group in books.groups if group.purpose is Purpose.TRAIN}
        consumed = [group for step in books.steps for group in step.groups]
        assert sorted(consumed) == sorted(training), "each training group is in exactly one step"
        spec = client.read_spec(self.dir)
        for step in books.steps:
            plans = plans_of(books, step, spec)
            assert step.scored_runs == sum(made.scored_runs for made in plans)
            assert step.counted_tokens == sum(made.counted_tokens for made in plans)
            assert step.micro_steps == sum(len(made.micro_steps) for made in plans)
            # what the replica says that it trained is what was planned: nothing twice, nothing lost
            assert step.metrics["micro_steps"] == step.micro_steps
            assert step.metrics["trained_tokens"] == step.counted_tokens
        for run in books.runs:
            assert run.state is RunState.SETTLED
            if run.run not in hurt:
                assert run.attempt == 1, f"{run}; {self.tail()}"
                assert run.outcome is Outcome.FINISHED, f"{run}; {self.tail()}"
                assert run.trace is not None
                assert run.trace.interrupted_calls == 0, f"{run}; {self.tail()}"
                assert run.trace.calls == 3, f"{run}; {self.tail()}"
        return books


def plans_of(books: Books, step: StepRecord, spec: JobSpec) -> list[GroupPlan]:
    """What the batch of a step had to be, by the records of its runs alone."""
    runs = {run.run: run for run in books.runs}
    groups = {group.group: group for group in books.groups}
    return [
        plan(
            SettledGroup(group, tuple(_settled(runs[run]) for run in groups[group].runs)),
            step.version - 1,
            spec.batch.staleness,
            spec.batch,
            spec.loss,
            step.step,
        )
        for group in step.groups
    ]


def _settled(run: RunRecord) -> SettledRun:
    assert run.outcome is not None
    assert run.trace is not None
    return SettledRun(run.run, run.attempt, run.reward, run.outcome, run.trace)


def gated(status: Status) -> bool:
    """The first training runs are at their gate: the three of the gated task are live, and nothing is left of others."""
    runs = [name for name in status.pids if name.startswith("run-")]
    return status.phase == "training" and (status.live, status.queued, len(runs)) == (3, 0, 3)


def is_there(found: object) -> bool:
    return found is not None


_SETTINGS: dict[str, dict[str, Any]] = {
    "job": {"name": "small", "seed": 1, "steps": 2},
    "model": {"path": "builtin:tiny", "thinking": True, "context_tokens": 512},
    "sampling": {"max_tokens": 16},
    "tasks": {"source": "tasks", "heldout": 2},
    "harness": {"profile": "scripted", "config": "script.json", "max_live": 6, "attempts": 3},
    "cells": {"count": 2, "slots": 3, "cache_tokens": 8192},
    "batch": {"groups": 2, "group_size": 3, "staleness": 0, "micro_step_tokens": 256},
    "loss": {"kind": "gspo", "advantage": "mean"},
    "optimizer": {"lr": 1e-5},
    "limits": {"run_s": 120.0, "evaluator_s": 20.0},
}
