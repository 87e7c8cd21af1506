"""Starting the harness of a run, watching it, and ending it whole.

    launcher = Launcher(children, state_dir, profile("mini-swe-agent"), settings, sandbox, hidden=(job_dir, tasks))
    process = await launcher.start(folder, base_url, instruction)
    end = await process.wait(limit_s)          # None: it still runs
    end = await process.end(grace_s=2.0)       # its whole run, grandchildren that left the session included
    process = launcher.adopt(folder)           # by a new gyred: None where nothing was started

Each harness has a keeper (gyre.harness.keeper) whose pid is the run's. It and its exit file outlive the gyred that
started it. A profile with a fork server runs as a fork of the zygote; one that died is started anew for the next run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.children import Child, Children, ChildSpec, ProcessRef
from gyre.errors import Unavailable
from gyre.harness import keeper
from gyre.harness.confine import Sandbox, View
from gyre.harness.profiles import ForkServer, LaunchContext, Profile, Settings, clean_environment
from gyre.harness.programs import located
from gyre.harness.workspace import RunFolder
from gyre.harness.zygote import folder_address

log = logging.getLogger(__name__)

_ZYGOTE_READY_S = 180.0
"""For the harness's imports, on a machine that is very busy."""
_ANSWER_S = 60.0
_LINE_BYTES = 1 << 20
_KILL_S = 10.0
_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True)
class HarnessExit:
    """How a harness ended. Its exit code is not a judgement: a run is scored on what it left.

    `code` and `signal` are the harness's own. `lost` says that nobody was there to see it end: its keeper was killed
    from outside. `error` says why it could not be started. `starved` says that it was killed while the system ran out of
    memory. Each is a failure of ours and not the run's. Any other signal is the run's own doing: what can send it one is
    in its sandbox, its policy's commands above all.
    """

    code: int | None = None
    signal: int | None = None
    error: str = ""
    lost: bool = False
    starved: bool = False
    submitted: bool | None = None

    @property
    def exit_code(self) -> int | None:
        """As a shell has it: 128 and the signal's number for one that a signal ended."""
        return self.code if self.code is not None or self.signal is None else 128 + self.signal

    @property
    def failure(self) -> str:
        """Why the run is no evidence of what the policy does; empty: it is."""
        if self.error:
            return f"the harness could not be started: {self.error}"
        if self.starved:
            return "the harness was killed as the system ran out of memory"
        return "the harness was killed from outside" if self.lost else ""

    def __str__(self) -> str:
        if self.failure:
            return self.failure
        return f"exit code {self.code}" if self.code is not None else f"killed by signal {self.signal}"


class HarnessProcess:
    """One attempt's harness, whoever started it."""

    def __init__(self, ref: ProcessRef, folder: RunFolder, profile: Profile, child: Child | None = None) -> None:
        self.ref = ref
        self.folder = folder
        self._profile = profile
        self._child = child
        self._sent: int | None = None
        """The last signal that we ended it by."""

    @property
    def alive(self) -> bool:
        return self.ref.alive

    async def wait(self, limit_s: float | None = None) -> HarnessExit | None:
        """How it ended; None when it still runs after `limit_s` (None: no limit)."""
        try:
            async with asyncio.timeout(limit_s):
                await self.ref.wait()
        except TimeoutError:
            return None
        return await self._ended()

    async def end(self, grace_s: float = 2.0) -> HarnessExit:
        """SIGTERM to the harness, and after `grace_s` an end to all of its run."""
        # The keeper passes the first SIGTERM on, and takes the second as the end.
        for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_S)):
            if self.ref.signal(number):
                self._sent = number
            self.ref.signal(signal.SIGCONT)
            if (end := await self.wait(limit_s)) is not None:
                return end
        raise Unavailable(f"run {self.folder.run}: process {self.ref.pid} is there {_KILL_S:g} s after SIGKILL")

    async def _ended(self) -> HarnessExit:
        if self._child is not None:
            await self._child.wait()
            self._child.forget()
        found = read_end(self.folder)
        if found is None:
            # Without a PID namespace a killed keeper's run may have left processes behind.
            await asyncio.to_thread(keeper.end_marked, self.folder.mark)
            submitted = self._profile.submitted(self.folder)
            return HarnessExit(signal=self._sent, lost=self._sent is None, submitted=submitted)
        submitted = self._profile.submitted(self.folder)
        return HarnessExit(found.code, found.signal, found.error, starved=found.starved, submitted=submitted)


class Launcher:
    """Starts the harnesses of one profile on this node."""

    def __init__(
        self,
        children: Children,
        state_dir: Path,
        profile: Profile,
        settings: Settings,
        sandbox: Sandbox,
        hidden: Sequence[Path] = (),
    ) -> None:
        """`hidden` are folders that no run may see: the job's, and those that hold the tasks' answers."""
        self._children = children
        self._profile = profile
        self._settings = settings
        self._sandbox = sandbox
        self._hidden = tuple(hidden)
        forked = sandbox.forks is not None
        server = profile.fork_server if forked else None
        self._zygote = Zygote(children, state_dir, profile.name, server) if server else None

    async def warm(self) -> None:
        """Have the zygote ready, so that the first run does not wait for its imports."""
        if self._zygote is not None:
            await self._zygote.ready()

    async def start(self, folder: RunFolder, base_url: str, instruction: str) -> HarnessProcess:
        """Start the harness in a prepared folder. An attempt that lives is not started again: its process is returned.

        Raises Unavailable when no process could be started; whatever fails later is in the harness's end.
        """
        if (before := self.adopt(folder)) is not None and before.alive:
            return before
        launch = self._profile.launch(LaunchContext(folder, base_url, instruction, self._settings))
        fork = self._zygote is not None
        program = located(launch.program[0], launch.env.get("PATH", ""))
        spec = keeper.Spec(
            name=folder.mark,
            argv=((self._profile.name,) if fork else (program.path, *launch.program[1:])) + launch.arguments,
            cwd=str(folder.workspace),
            env=dict(launch.env),
            log=str(folder.log),
            record_file=str(folder.process_file),
            exit_file=str(folder.exit_file),
        )
        config = self._settings.config
        readable = (() if config is None else (config,)) + (() if fork else program.folders)
        view = View((folder.workspace, folder.home), self._hidden, readable)
        spec = self._sandbox.apply(spec, view, fork=fork)
        if self._zygote is not None:
            return HarnessProcess(await self._zygote.start(spec), folder, self._profile)
        return await self._execute(spec, folder)

    def adopt(self, folder: RunFolder) -> HarnessProcess | None:
        """The harness that was started in this folder, alive or ended; None when none was."""
        child = self._children.adopt().get(_child_name(folder))
        found = _read_json(folder.process_file)
        if found is not None:
            return HarnessProcess(ProcessRef(found["pid"], found["start_ticks"]), folder, self._profile, child)
        if child is not None:  # its keeper has not come to write down who it is
            return HarnessProcess(child.process, folder, self._profile, child)
        return None

    async def stop(self) -> None:
        """End the zygote. Runs that live are not touched."""
        if self._zygote is not None:
            await self._zygote.stop()

    async def _execute(self, spec: keeper.Spec, folder: RunFolder) -> HarnessProcess:
        folder.spec_file.write_text(json.dumps(spec._asdict()), encoding="utf-8")
        folder.spec_file.chmod(0o600)
        argv = keeper.command(str(folder.spec_file))
        child = await self._children.start(ChildSpec(_child_name(folder), argv, folder.log, env={}))
        return HarnessProcess(child.process, folder, self._profile, child)


class Zygote:
    """The client of gyre.harness.zygote, and the one who starts it."""

    def __init__(self, children: Children, state_dir: Path, name: str, server: ForkServer) -> None:
        self._children = children
        self._folder = state_dir / "harness"
        self._name = f"zygote-{name}"
        self._server = server
        self._lock = asyncio.Lock()

    @property
    def _log(self) -> Path:
        return self._folder / f"{self._name}.log"

    async def ready(self) -> None:
        """Until it answers; it is started if it does not live."""
        async with self._lock:
            await self._make_ready()

    async def start(self, spec: keeper.Spec) -> ProcessRef:
        """A fork that keeps the spec."""
        async with self._lock:
            try:
                answer = await self._ask({"start": spec._asdict()})
            except (OSError, EOFError):
                await self._make_ready()
                try:
                    answer = await self._ask({"start": spec._asdict()})
                except (OSError, EOFError) as error:
                    raise Unavailable(f"{self._name} died as it was to start {spec.name}") from error
        return ProcessRef(answer["pid"], answer["start_ticks"])

    async def stop(self) -> None:
        async with self._lock:
            child = self._children.adopt().get(self._name)
            if child is not None:
                await child.end(grace_s=2.0)

    async def _make_ready(self) -> None:
        child = self._children.adopt().get(self._name)
        ours = child is None or not child.alive
        if child is None or ours:
            child = await self._begin(child)
        try:
            async with asyncio.timeout(_ZYGOTE_READY_S):
                while not await self._answers():
                    if not child.alive and ours:
                        raise Unavailable(
                            f"{self._name} ended while it started ({await child.wait()}): {self._last_words()}"
                        )
                    if not child.alive:  # it was dying as we looked
                        child, ours = await self._begin(child), True
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise Unavailable(f"{self._name} did not answer within {_ZYGOTE_READY_S:g} s") from None

    async def _begin(self, before: Child | None) -> Child:
        if before is not None:
            log.warning("%s has died (%s); it is started again, and its runs go on", self._name, before.exit)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._folder / "socket").unlink(missing_ok=True)
        return await self._children.start(self._spec())

    def _spec(self) -> ChildSpec:
        argv = (sys.executable, "-m", "gyre.harness.zygote", str(self._folder), "socket")
        argv += (self._server.entry_point, str(self._server.preload))
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        env = {**clean_environment(home), **self._server.env}
        return ChildSpec(self._name, argv, self._log, env=env, cwd=self._folder)

    async def _answers(self) -> bool:
        try:
            return "pid" in await self._ask({"ping": True})
        except (OSError, EOFError):
            return False

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request on a connection of its own. OSError, EOFError: nobody is there (any more)."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                with folder_address(str(self._folder), "socket") as address:
                    reader, writer = await asyncio.open_unix_connection(address, limit=_LINE_BYTES)
                try:
                    writer.write(json.dumps(request).encode() + b"\n")
                    await writer.drain()
                    line = await reader.readuntil(b"\n")
                finally:
                    writer.close()
        except TimeoutError:
            raise Unavailable(f"{self._name} did not answer within {_ANSWER_S:g} s") from None
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(f"{self._name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def read_end(folder: RunFolder) -> keeper.End | None:
    """How the harness of this folder ended; None when that is not known (it lives, or its keeper was killed)."""
    found = _read_json(folder.exit_file)
    return None if found is None else keeper.End(**found)


def _child_name(folder: RunFolder) -> str:
    return f"run-{folder.run}-{folder.attempt}"


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
