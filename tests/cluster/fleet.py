"""A job on a cluster of real nodes: gyreds with certificates over a real etcd, each with its own folder, all on loopback.

Everything of tests/job's small job holds here, over several nodes: its tasks, its gate, its books.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from job.a_job import DEADLINE_S, Job

from gyre import pki
from gyre.actors.messages_gyrectl import Status
from gyre.children import ProcessRef
from gyre.cli import client
from gyre.errors import GyreError
from gyre.jobdir import JobDir
from gyre.store.open import keys_for, open_store
from gyre.store.records import CoreRecord, JobRecord, JobState, Keys, LeaderRecord, RunRecord, StepRecord
from gyre.store.typed import TypedStore

from .etcd_server import ports

END_S = 60.0


@dataclass
class Node:
    """One node: its file, its folder, and the gyred that runs it now."""

    name: str
    root: Path
    before: tuple[str, ...] = ()
    """What its commands are started through: a network of its own, for one."""
    gyred: subprocess.Popen[bytes] | None = None

    @property
    def file(self) -> Path:
        return self.root / f"{self.name}.toml"

    @property
    def dir(self) -> JobDir:
        return JobDir(self.root / self.name / "jobs" / "small")

    @property
    def log(self) -> str:
        path = self.root / f"{self.name}.log"
        return path.read_text() if path.exists() else ""

    @property
    def running(self) -> bool:
        return self.gyred is not None and self.gyred.poll() is None

    def start(self) -> None:
        command = [*self.before, sys.executable, "-m", "gyre.cli.gyred", "--config", str(self.file)]
        with (self.root / f"{self.name}.log").open("ab") as log:
            self.gyred = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """To gyred alone."""
        assert self.gyred is not None
        os.kill(self.gyred.pid, number)
        if number is signal.SIGKILL:
            self.gyred.wait(END_S)


@dataclass
class Fleet(Job):
    """The job and its nodes. `dir` is the folder of the first node whose gyred runs."""

    store_url: str = ""
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])

    @staticmethod
    def make(root: Path, store_url: str, names: str = "abc", **settings: dict[str, object]) -> Fleet:
        root.mkdir(parents=True, exist_ok=True)
        fleet = Fleet(root, {"harness": {"max_live": 2}, **settings}, store_url=store_url)
        fleet.write()
        pki.init(root / "pki", "tests", 10)
        for name, port in zip(names, ports(len(names)), strict=True):
            fleet.add(name, "127.0.0.1", port)
        return fleet

    def add(self, name: str, host: str, port: int, cells: int = 1, before: tuple[str, ...] = ()) -> Node:
        pki.issue(self.root / "pki", name, pki.Kind.NODE, 2, (host,))
        node = self.nodes[name] = Node(name, self.root, before)
        lines = {
            "name": name,
            "dir": str(self.root / name),
            "base": str(self.root),
            "store": self.store_url,
            "address": f"tls:{host}:{port}",
            "ca": "pki/ca.pem",
            "certificate": f"pki/{name}.pem",
            "key": f"pki/{name}.key",
        }
        text = "".join(f'{key} = "{value}"\n' for key, value in lines.items())
        node.file.write_text(f"[node]\n{text}cells = {cells}\ndrain_s = 0\n")
        return node

    @property
    def dir(self) -> JobDir:
        return next((node.dir for node in self.nodes.values() if node.running), next(iter(self.nodes.values())).dir)

    @property
    def keys(self) -> Keys:
        return keys_for(self.store_url, "small")

    # ------------------------------------------------------------------------------------------ its course

    def submit(self) -> None:
        first = next(iter(self.nodes.values()))
        command = [
            sys.executable,
            "-m",
            "gyre.cli.gyrectl",
            "job",
            "submit",
            str(self.write()),
            "--node",
            str(first.file),
        ]
        done = subprocess.run([*first.before, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def begin(self) -> None:
        for node in self.nodes.values():
            node.start()
        self.submit()

    async def finished(self) -> None:
        """Until the job has ended and every gyred that runs has let it go."""
        await self.until_record(
            "the end of the job", self.keys.job, JobRecord, lambda job: job.state is not JobState.RUNNING
        )
        await self.until(
            lambda: not any(node.running and node.dir.gyred_file.exists() for node in self.nodes.values()),
            "every node to end the job",
        )

    async def until_record(self, what: str, key: str, cls: type, enough: Callable[..., bool]) -> object:
        store = TypedStore(open_store(self.store_url))
        deadline_s = time.monotonic() + DEADLINE_S
        try:
            while True:
                found = await store.get(key, cls)
                if found is not None and enough(found.record):
                    return found.record
                assert time.monotonic() < deadline_s, f"waited in vain for {what}, last: {found}; {self.tail()}"
                self._look()
                await asyncio.sleep(0.1)
        finally:
            await store.store.close()

    async def until_record_of_steps(self, count: int) -> None:
        await self.until_record(f"step {count}", self.keys.step(count), StepRecord, lambda _: True)

    def gyrectl(self, *words: str) -> str:
        """What gyrectl printed, asked of the first node that runs; again while that has not come up yet."""
        command = [sys.executable, "-m", "gyre.cli.gyrectl", *words, "--dir", str(self.dir.root)]
        deadline_s = time.monotonic() + END_S
        while True:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout
            assert "is not running" in done.stderr or "cannot be reached" in done.stderr, done.stderr
            assert time.monotonic() < deadline_s, done.stderr

    async def leader(self) -> str:
        found = await self.until_record("a leader", self.keys.leader, LeaderRecord, lambda _: True)
        assert isinstance(found, LeaderRecord)
        return found.node

    async def core(self) -> CoreRecord:
        found = await self.until_record("a core", self.keys.core, CoreRecord, lambda _: True)
        assert isinstance(found, CoreRecord)
        return found

    async def runs(self) -> list[RunRecord]:
        store = TypedStore(open_store(self.store_url))
        try:
            listing = await store.range(f"{self.keys.root}runs/", RunRecord)
            return [item.record for item in listing.items]
        finally:
            await store.store.close()

    async def until_runs(self, what: str, enough: Callable[[list[RunRecord]], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not enough(runs := await self.runs()):
            assert time.monotonic() < deadline_s, f"waited in vain for {what}, last: {runs}; {self.tail()}"
            self._look()
            await asyncio.sleep(0.1)

    async def status(self) -> Status | None:
        for node in self.nodes.values():
            if node.running:
                with suppress(GyreError, OSError):
                    return await client.status(node.dir)
        return None

    async def until_status(self, what: str, enough: Callable[[Status], bool]) -> Status:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            status = await self.status()
            if status is not None and enough(status):
                return status
            assert time.monotonic() < deadline_s, f"waited in vain for {what}, last: {status}; {self.tail()}"
            self._look()
            await asyncio.sleep(0.1)

    def stop(self) -> None:
        """Every gyred is told to end, and has."""
        for node in self.nodes.values():
            if node.running:
                node.signal(signal.SIGCONT)
                node.signal(signal.SIGTERM)
        for node in self.nodes.values():
            if node.gyred is not None:
                node.gyred.wait(END_S)

    # ------------------------------------------------------------------------------------------ over all nodes

    @property
    def dirs(self) -> Iterator[JobDir]:
        return (node.dir for node in self.nodes.values())

    def open_gate(self, which: str = "") -> None:
        super().open_gate(which)
        for folder in self.dirs:
            for gate in folder.runs.glob(f"{which or '*'}/*/workspace/gate"):
                with suppress(OSError):  # its workspace was discarded
                    if gate.read_text() != "open":
                        gate.write_text("open")

    def harnesses(self, which: str = "*") -> dict[str, int]:
        """The pids of the living runs, by run and attempt, on whatever node."""
        found: dict[str, int] = {}
        for node in self.nodes.values():
            found.update(self.harnesses_on(node, which))
        return found

    def harnesses_on(self, node: Node, which: str = "*") -> dict[str, int]:
        return _living(node.dir, which)

    def kill(self, node: Node) -> None:
        """The whole node dies at once: gyred, every process that it has started, and its snapshots in shared memory."""
        if node.running:
            node.signal(signal.SIGKILL)
        marks = (str(self.root / node.name), str(node.dir.sockets))
        for _ in range(50):
            left = [pid for pid, command in self.processes().items() if any(mark in command for mark in marks)]
            left += list(_living(node.dir, "*").values())
            if not left:
                node.dir.clear_snapshots_in_memory()
                return
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        raise AssertionError(f"{node.name} is not dead: {left}")

    def kill_all(self) -> None:
        for node in self.nodes.values():
            if node.running:
                node.signal(signal.SIGKILL)
        super().kill_all()
        for folder in self.dirs:
            folder.clear_snapshots_in_memory()

    def processes(self) -> dict[int, str]:
        found = super().processes()
        for folder in self.dirs:
            marked = str(folder.sockets)
            for pid, command in _commands().items():
                if marked in command and pid != os.getpid():
                    found[pid] = command
        return found

    @property
    def log(self) -> str:
        return "\n".join(f"---- {node.name}\n{node.log}" for node in self.nodes.values())

    def tail(self) -> str:
        return "\n".join(f"---- {node.name}\n{node.log[-3000:]}" for node in self.nodes.values())


def _living(folder: JobDir, which: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in folder.runs.glob(f"{which}/*/process.json"):
        plain = json.loads(path.read_text())
        if ProcessRef(plain["pid"], plain["start_ticks"]).alive:
            found["/".join(path.parent.parts[-2:])] = plain["pid"]
    return found


def _commands() -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                found[int(entry)] = (
                    Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found
