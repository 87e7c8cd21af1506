"""Child processes that outlive the process that started them, and can be adopted by the next one.

    children = Children(state_dir)
    engine = await children.start(ChildSpec("engine-c0", ("python", "-m", "gyre.engine.local", …), log=logs / "c0.log"))
    print(engine.pid, engine.alive)
    status = await engine.wait()  # from any process, also one that did not start it
    await engine.end(grace_s=5)  # SIGTERM, then SIGKILL, to all of its session

    for name, child in Children(state_dir).adopt().items(): …  # after kill -9 of the starter

A process is known by its pid and its start time, so a pid that another process got since is never waited for or
signalled. Each child leads a session of its own, reads from /dev/null and writes to its log. Its parent is a small
launcher (gyre/launcher.py) that keeps its exit status on disk. Signals and waits go through pidfds (Linux 5.4).

Every wait here ends when the process does; put `asyncio.timeout` around it where that may never be.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gyre.errors import BadInput, Refused, Unavailable

log = logging.getLogger(__name__)

_LAUNCHER = Path(__file__).with_name("launcher.py")
_START_S = 30.0
"""For the launcher to report its child, on a machine that is very busy."""
_KILL_S = 10.0
"""For the kernel to end what was sent SIGKILL."""
_STATUS_S = 15.0
"""For the launcher to write the exit status of a child that is gone."""


@dataclass(frozen=True)
class ChildSpec:
    """What to run. `env` is the whole environment of the child (None: the starter's own)."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] | None = None
    cwd: Path | None = None

    @property
    def argv_digest(self) -> str:
        return hashlib.sha256("\0".join(self.argv).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: with a code, by a signal, or unknown (both None: its launcher was killed before it)."""

    code: int | None = None
    signal: int | None = None

    @property
    def ok(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                return f"killed by {signal.Signals(self.signal).name}"
            except ValueError:
                return f"killed by signal {self.signal}"
        return "exit status unknown" if self.code is None else f"exit code {self.code}"


@dataclass(frozen=True)
class ProcessRef:
    """One process, whoever started it."""

    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        return is_same_process(self.pid, self.start_ticks)

    async def wait(self) -> None:
        """Until the process is gone (a zombie is gone)."""
        pidfd = self._open()
        if pidfd is not None:
            try:
                await _readable(pidfd)
            finally:
                os.close(pidfd)

    def signal(self, number: int) -> bool:
        """Send to this process alone. False: it was gone."""
        pidfd = self._open()
        if pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True

    def session(self) -> tuple[ProcessRef, ...]:
        """The living processes of the session that this process leads, itself among them; none if it leads none."""
        own = _stat(self.pid)
        if own is not None and (own.start_ticks != self.start_ticks or own.session != self.pid):
            return ()  # the pid is another's now, or the process is in someone else's session
        members = (_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
        return tuple(
            ProcessRef(member.pid, member.start_ticks)
            for member in members
            if member is not None and member.session == self.pid and not member.gone
        )

    async def end(self, grace_s: float) -> None:
        """SIGTERM to the session that it leads; SIGKILL to what is left after `grace_s`. Returns when all are gone.

        A process that leads no session is ended alone. What has moved to a session of its own is not touched.
        """
        for member in self._all():
            member.signal(signal.SIGTERM)
            member.signal(signal.SIGCONT)  # a stopped process takes its leave too
        try:
            async with asyncio.timeout(grace_s):
                while members := self._all():
                    for member in members:
                        await member.wait()
        except TimeoutError:
            await self._kill()

    async def _kill(self) -> None:
        try:
            async with asyncio.timeout(_KILL_S):
                while members := self._all():  # again and again: they may be forking
                    for member in members:
                        member.signal(signal.SIGKILL)
                    for member in members:
                        await member.wait()
        except TimeoutError:
            raise Unavailable(f"process {self.pid} is still there {_KILL_S:g} s after SIGKILL") from None

    def _all(self) -> tuple[ProcessRef, ...]:
        return self.session() or ((self,) if self.alive else ())

    def _open(self) -> int | None:
        """A pidfd of the process, or None when it is gone."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # the pid is that of another process's thread now
                return None
            raise
        # Looked at after opening: if the pid was given away before, the start time differs now.
        if not self.alive:
            os.close(pidfd)
            return None
        return pidfd


class Child:
    """One process of a `Children`."""

    def __init__(self, name: str, process: ProcessRef, launcher: ProcessRef, argv_digest: str, directory: Path) -> None:
        self.name = name
        self.process = process
        self.argv_digest = argv_digest
        self._launcher = launcher
        self._directory = directory
        self._exit: ExitStatus | None = None

    def __repr__(self) -> str:
        return f"Child({self.name!r}, pid {self.pid}, {'alive' if self.alive else self.exit})"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def start_ticks(self) -> int:
        return self.process.start_ticks

    @property
    def alive(self) -> bool:
        return self._exit is None and self.process.alive

    @property
    def exit(self) -> ExitStatus | None:
        """How it ended, once that is known."""
        if self._exit is None:
            self._exit = self._read_exit()
        return self._exit

    async def wait(self) -> ExitStatus:
        """How it ended, when it has."""
        await self.process.wait()
        if self.exit is None:
            try:
                async with asyncio.timeout(_STATUS_S):
                    await self._launcher.wait()
            except TimeoutError:
                log.warning("the launcher of %s does not report how it ended", self.name)
        _reap()
        self._exit = self.exit or ExitStatus()
        return self._exit

    def signal(self, number: int) -> bool:
        """Send to the child alone. False: it was gone."""
        return self.process.signal(number)

    async def end(self, grace_s: float) -> ExitStatus:
        """End it and all of its session (SIGTERM, then SIGKILL after `grace_s`), its launcher too, and forget it."""
        await self.process.end(grace_s)
        status = await self.wait()
        try:
            async with asyncio.timeout(_STATUS_S):
                await self._launcher.wait()
        except TimeoutError:
            self._launcher.signal(signal.SIGKILL)
            await self._launcher.wait()
        _reap()
        self.forget()
        return status

    def forget(self) -> None:
        """Drop its record, so that nobody adopts it. Refused while it lives."""
        if self.alive:
            raise Refused(f"child {self.name} (pid {self.pid}) lives and cannot be forgotten")
        record = _read_json(self._directory / f"{self.name}.json")
        if record is None or record.get("pid") == self.pid:  # else the name belongs to a later child
            for suffix in (".json", ".exit"):
                (self._directory / f"{self.name}{suffix}").unlink(missing_ok=True)

    def _read_exit(self) -> ExitStatus | None:
        found = _read_json(self._directory / f"{self.name}.exit")
        if found is None or (found.get("pid"), found.get("start_ticks")) != (self.pid, self.start_ticks):
            return None
        return ExitStatus(found.get("code"), found.get("signal"))


class Children:
    """The children whose records are in `state_dir`/children. One process at a time starts and ends them."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / "children"
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def start(self, spec: ChildSpec) -> Child:
        """Start it. Refused while a child of that name lives; BadInput when it cannot be run as the spec says."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", spec.name):
            raise BadInput("child name", spec.name, "letters, digits, '.', '_' and '-' are allowed")
        if not spec.argv:
            raise BadInput("argv", spec.argv, f"child {spec.name} needs a program to run")
        before = self._read(spec.name)
        if before is not None:
            if before.alive:
                raise Refused(f"child {spec.name} is already running with pid {before.pid}")
            await before.wait()
            before.forget()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                _launch(spec, self._directory, theirs.fileno())
            # Closing our end unacknowledged, whatever the reason, makes the launcher end the child again.
            line = await _first_line(ours, spec.name)
            if line.startswith("! "):
                raise BadInput("argv", spec.argv[0], f"child {spec.name} cannot be run: {line[2:]}")
            pid, ticks, launcher_pid, launcher_ticks = (int(word) for word in line.split())
            ours.send(b"+")
        return Child(
            spec.name,
            ProcessRef(pid, ticks),
            ProcessRef(launcher_pid, launcher_ticks),
            spec.argv_digest,
            self._directory,
        )

    def adopt(self) -> dict[str, Child]:
        """All recorded children by name: the living, and those that ended and were not forgotten (see `exit`)."""
        found = (self._read(path.stem) for path in sorted(self._directory.glob("*.json")))
        return {child.name: child for child in found if child is not None}

    async def end_all(self, grace_s: float) -> None:
        """End every recorded child, at the same time."""
        async with asyncio.TaskGroup() as group:
            for child in self.adopt().values():
                group.create_task(child.end(grace_s), name=f"end {child.name}")

    def _read(self, name: str) -> Child | None:
        record = _read_json(self._directory / f"{name}.json")
        if record is None:
            return None
        try:
            process = ProcessRef(int(record["pid"]), int(record["start_ticks"]))
            launcher = ProcessRef(int(record["launcher_pid"]), int(record["launcher_start_ticks"]))
            boot, digest = str(record["boot"]), str(record["argv_digest"])
        except (KeyError, TypeError, ValueError):
            log.warning("the record of child %s cannot be read and is passed over", name)
            return None
        if boot != boot_id():  # start times count from the boot: none of that one's processes is here
            process, launcher = ProcessRef(process.pid, -1), ProcessRef(launcher.pid, -1)
        return Child(name, process, launcher, digest, self._directory)


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since the boot; None when it is gone (a zombie is gone)."""
    found = _stat(pid)
    return None if found is None or found.gone else found.start_ticks


def is_same_process(pid: int, ticks: int) -> bool:
    """Whether the process with this pid lives and is the one that started at `ticks`."""
    return start_ticks(pid) == ticks


class _Stat(NamedTuple):
    pid: int
    gone: bool
    session: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name is in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return _Stat(pid, fields[0] in "ZX", int(fields[3]), int(fields[19]))


def boot_id() -> str:
    """Which start of the machine this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)


_launchers: list[subprocess.Popen[bytes]] = []
"""Launchers that this process started and has to reap; an adopted child's is somebody else's."""


def _launch(spec: ChildSpec, directory: Path, starter_fd: int) -> None:
    _reap()
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    files = (str(directory / f"{spec.name}.json"), str(directory / f"{spec.name}.exit"))
    launcher = (sys.executable, "-I", "-S", str(_LAUNCHER), *files, spec.name, spec.argv_digest, str(starter_fd))
    try:
        with spec.log.open("ab") as output:
            _launchers.append(
                subprocess.Popen(
                    launcher + spec.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=None if spec.env is None else dict(spec.env),
                    cwd=spec.cwd,
                    pass_fds=(starter_fd,),
                    start_new_session=True,
                )
            )
    except OSError as error:
        raise BadInput("child", spec.name, f"it cannot be launched: {error}") from error


def _reap() -> None:
    _launchers[:] = [launcher for launcher in _launchers if launcher.poll() is None]


async def _first_line(connection: socket.socket, name: str) -> str:
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    data = b""
    try:
        async with asyncio.timeout(_START_S):
            while not data.endswith(b"\n"):
                more = await loop.sock_recv(connection, 4096)
                if not more:
                    raise Unavailable(f"the launcher of child {name} died before it started the child")
                data += more
    except TimeoutError:
        raise Unavailable(f"child {name} did not start within {_START_S:g} s") from None
    return data.decode(errors="replace").strip()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
