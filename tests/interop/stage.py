"""The stage: gateway, two engines and a real harness in one network namespace that has nothing but loopback.

    unshare --net python -m interop.stage CONFIG    (see `Config`; what happened is written to its `report`)

The processes are the product's own: the gateway's, told what a node tells it; two local engines whose choice of tokens
is scripted; the harness, started by the Launcher from its profile, sandboxed. Role switches are made by the messages
that a cell sends, in its order.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gyre.actors.messages import (
    CloseRun,
    DrainEngine,
    DrainReport,
    EngineRoute,
    GatewayStatus,
    GetGatewayStatus,
    Ok,
    OpenRun,
    Ping,
    SetRoutes,
)
from gyre.actors.remote import RemoteRef, connect
from gyre.children import Child, Children, ChildSpec
from gyre.engine.access import http_key
from gyre.engine.client import EngineClient
from gyre.errors import Unavailable
from gyre.harness.confine import choose
from gyre.harness.launch import HarnessExit, Launcher
from gyre.harness.profiles import Settings, profile
from gyre.harness.tasks import Task
from gyre.harness.workspace import RunFolder
from gyre.ids import CellId, GroupId, RunId, TaskId
from gyre.trajectory.records import RunTrace
from gyre.wire import to_plain

from .policy import instruction
from .scenarios import GO, SCENARIOS, WAITING, Scenario
from .tap import Tap
from .trees import tree_report

TESTS = Path(__file__).parents[1]
"""Where the processes of the stage start, so that they find its modules."""
CELLS = (CellId("c0"), CellId("c1"))
CONTEXT_TOKENS = 200_000
MAX_TOKENS = 4096
BLOCK_TOKENS = 16
SLOTS = 4
CACHE_TOKENS = 262_144
VERSION = 0
START_S = 180.0
ASK_S = 60.0
RUN_S = 300.0
POLL_S = 0.02


@dataclass(frozen=True)
class Config:
    harness: str
    scenarios: tuple[str, ...]
    model: str
    """The folder of the engines' model."""
    folder: str
    """Where everything of the stage is kept."""
    report: str


@dataclass
class Engine:
    cell: CellId
    child: Child
    url: str
    client: EngineClient
    log: Path
    """What its policy wrote down."""
    accepting: bool = True
    read: int = 0

    def news(self) -> list[dict[str, Any]]:
        """The whole lines of its policy's log that were not read before."""
        with self.log.open("rb") as file:
            file.seek(self.read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


@dataclass
class Gateway:
    child: Child
    remote: RemoteRef
    tap: Tap
    journal: Path


@dataclass
class Observed:
    """What the policies chose in one run, as it is read."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    sampled: list[tuple[str, str, str, int]] = field(default_factory=list)
    """(cell, label, digest of the prompt, place) of every token that was sampled, in the order of reading."""
    off_script: int = 0
    halves: list[tuple[CellId, str]] = field(default_factory=list)

    def take(self, engine: Engine) -> None:
        for event in engine.news():
            if "decided" in event:
                self.answers.append({"cell": engine.cell, **event})
            elif "token" in event:
                self.sampled.append((engine.cell, event["of"], event["prompt"], event["token"]))
                self.off_script += not event["on_script"]
            else:
                self.halves.append((engine.cell, event["half"]))


class Stage:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.folder)
        self.secret = secrets.token_hex(32)
        self.secret_file = self.folder / "secret"
        self.state = self.folder / "state"
        self.children = Children(self.state)
        self.engines: dict[CellId, Engine] = {}
        self.gateways: dict[int, Gateway] = {}
        self.sandbox = choose("auto")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.secret_file.write_text(self.secret, encoding="ascii")
        self.secret_file.chmod(0o600)
        try:
            async with AsyncExitStack() as stack:
                self._stack = stack
                async with asyncio.TaskGroup() as group:
                    for cell in CELLS:
                        group.create_task(self.start_engine(cell))
                yield
        finally:
            for engine in self.engines.values():
                await engine.client.close()
            await self.children.end_all(grace_s=5.0)

    # ------------------------------------------------------------------------------------------ processes

    async def start_engine(self, cell: CellId) -> None:
        ready, log = self.folder / f"{cell}.json", self.folder / f"{cell}.policy.jsonl"
        ready.unlink(missing_ok=True)
        log.touch()
        argv = (
            *(sys.executable, "-m", "interop.scripted_engine", "--model", self.config.model),
            *("--version", str(VERSION), "--ready-file", str(ready), "--secret-file", str(self.secret_file)),
            *("--block-tokens", str(BLOCK_TOKENS), "--cache-tokens", str(CACHE_TOKENS)),
        )
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GYRE_TOKENIZER": str(Path(self.config.model) / "tokenizer.json"),
            "GYRE_POLICY_LOG": str(log),
        }
        before = self.children.adopt().get(cell)
        if before is not None:
            before.forget()
        child = await self.children.start(ChildSpec(cell, argv, self.folder / f"{cell}.log", env=env, cwd=TESTS))
        await until(ready.exists, START_S, child)
        url = json.loads(ready.read_text(encoding="utf-8"))["url"]
        client = EngineClient(url, key=http_key(self.secret))
        read = self.engines[cell].read if cell in self.engines else 0
        self.engines[cell] = Engine(cell, child, url, client, log, read=read)

    async def gateway(self, context_tokens: int) -> Gateway:
        """The gateway of a model with so much context; it is started where it is not there yet."""
        if context_tokens in self.gateways:
            return self.gateways[context_tokens]
        name = f"gateway-{context_tokens}"
        address, folder = f"unix:{self.folder / f'{context_tokens}.sock'}", self.folder / name
        config = {
            "journal_dir": str(folder / "journal"),
            "trajectories_dir": str(folder / "trajectories"),
            "model_dir": self.config.model,
            "thinking": True,
            "context_tokens": context_tokens,
            "block_tokens": BLOCK_TOKENS,
            "copies_dir": None,
            "far": None,
        }
        argv = (sys.executable, "-m", "gyre.actors.gateway_process", address, str(self.secret_file), json.dumps(config))
        child = await self.children.start(ChildSpec(name, argv, self.folder / f"{name}.log", cwd=TESTS))
        remote = connect(address, self.secret)
        self._stack.push_async_callback(remote.close)
        async with asyncio.timeout(START_S):
            while True:
                try:
                    await remote.ask(Ping(), ASK_S, Ok)
                    break
                except Unavailable:
                    assert child.alive, f"see {name}.log"
                    await asyncio.sleep(0.1)
        status = await remote.ask(GetGatewayStatus(), ASK_S, GatewayStatus)
        tap = await self._stack.enter_async_context(Tap(int(status.base_url.rpartition(":")[2])))
        found = self.gateways[context_tokens] = Gateway(child, remote, tap, folder / "journal")
        return found

    # ------------------------------------------------------------------------------------------ a cell's part

    async def route(self, gateway: Gateway) -> None:
        routes = tuple(
            EngineRoute(each.cell, each.url, VERSION, each.accepting, SLOTS) for each in self.engines.values()
        )
        await gateway.remote.ask(SetRoutes(VERSION, routes), ASK_S, Ok)

    async def switch_away(self, gateway: Gateway, cell: CellId) -> DrainReport:
        """rollout -> train, up to where the engine's memory is the replica's."""
        engine = self.engines[cell]
        engine.accepting = False
        await self.route(gateway)
        report = await gateway.remote.ask(DrainEngine(cell, True), ASK_S, DrainReport)
        await engine.client.release_memory()
        return report

    async def switch_back(self, gateway: Gateway, cell: CellId) -> None:
        """train -> rollout, at the same version."""
        engine = self.engines[cell]
        await engine.client.resume_memory()
        await engine.client.update_weights(self.config.model, VERSION)
        assert (await engine.client.info()).version == VERSION
        engine.accepting = True
        await self.route(gateway)

    # ------------------------------------------------------------------------------------------ a run

    async def run(self, name: str) -> dict[str, Any]:
        scenario, harness = SCENARIOS[name], self.config.harness
        context_tokens = scenario.context_tokens.get(harness, CONTEXT_TOKENS)
        gateway = await self.gateway(context_tokens)
        await self.route(gateway)
        run, key = RunId(f"{harness}-{name}"), secrets.token_urlsafe(18)
        await gateway.remote.ask(OpenRun(run, GroupId(name), 1, key, harness, 1.0, MAX_TOKENS), ASK_S, Ok)
        folder = RunFolder.of(self.folder / "runs", run, 1)
        folder.prepare(Task(TaskId(name), instruction(name), {"README.md": b"An empty project.\n"}, ("true",), b"{}"))
        settings = Settings(context_tokens=context_tokens, max_tokens=MAX_TOKENS)
        launcher = Launcher(self.children, self.state, profile(harness), settings, self.sandbox, (self.folder,))
        await launcher.warm()
        gateway.tap.heard()
        observed = Observed()
        began_s = time.monotonic()
        process = await launcher.start(
            folder, f"http://127.0.0.1:{gateway.tap.port}/run/{run}/{key}", instruction(name)
        )
        acting = asyncio.create_task(self._meanwhile(scenario, gateway, observed, folder))
        try:
            end = await process.wait(RUN_S)
            if end is None:
                end = await process.end()
                end = HarnessExit(error=f"it did not end within {RUN_S:g} s: {end}")
            seconds = time.monotonic() - began_s
        finally:
            acting.cancel()
            await asyncio.wait([acting])
        acted = acting.result() if not acting.cancelled() else None
        self._read(observed)
        heard = gateway.tap.heard()
        (self.folder / f"{name}.sent").write_bytes(heard.sent)
        (self.folder / f"{name}.received").write_bytes(heard.received)
        trace = await gateway.remote.ask(CloseRun(run, 1), ASK_S, RunTrace)
        await self._mend(gateway)
        return {
            "exit": {"code": end.code, "signal": end.signal, "submitted": end.submitted, "failure": end.failure},
            "seconds": round(seconds, 1),
            "files": files_of(folder.workspace),
            "log": str(folder.log),
            "http": heard.plain(),
            "acted": acted,
            "trace": to_plain(trace),
            "tree": tree_report(gateway.journal / "closed" / f"{run}.1"),
            "answers": observed.answers,
            "sampled": observed.sampled,
            "off_script": observed.off_script,
        }

    async def _meanwhile(
        self, scenario: Scenario, gateway: Gateway, observed: Observed, folder: RunFolder
    ) -> dict[str, Any] | None:
        """What the driver does while the harness works; what it did, or None."""
        match scenario.meanwhile:
            case "nothing":
                return None
            case "switch in an answer":
                await self._until(observed, lambda: bool(observed.halves))
                return asdict(await self.switch_away(gateway, observed.halves[0][0]))
            case "switch in a tool call":
                await self._until(observed, (folder.workspace / WAITING).exists)
                report = await self.switch_away(gateway, CellId(observed.sampled[-1][0]))
                (folder.workspace / GO).touch()
                return asdict(report)
            case "kill in an answer":
                await self._until(observed, lambda: bool(observed.halves))
                engine = self.engines[observed.halves[0][0]]
                engine.child.signal(signal.SIGKILL)
                await engine.child.wait()
                engine.accepting = False
                await self.route(gateway)
                return {"killed": engine.cell}

    async def _until(self, observed: Observed, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(POLL_S)
            self._read(observed)

    def _read(self, observed: Observed) -> None:
        for engine in self.engines.values():
            observed.take(engine)

    async def _mend(self, gateway: Gateway) -> None:
        """Both cells serve again."""
        for engine in list(self.engines.values()):
            if not engine.child.alive:
                await engine.client.close()
                await self.start_engine(engine.cell)
            elif not engine.accepting:
                await self.switch_back(gateway, engine.cell)


def files_of(workspace: Path) -> dict[str, str]:
    """The text of every file that a run left, by its path in the workspace."""
    return {
        str(path.relative_to(workspace)): path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(workspace.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


async def until(holds: Callable[[], bool], limit_s: float, child: Child) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():
            assert child.alive, f"{child.name} ended while it started"
            await asyncio.sleep(POLL_S)


def raise_loopback() -> None:
    """`ip link set lo up`, in a namespace where nothing is up yet."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(any_socket, get_flags, request))
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", flags | up))


async def perform(config: Config) -> None:
    """Run the scenarios, one after another; the report holds those that were run, however the stage ends."""
    stage = Stage(config)
    reports: dict[str, Any] = {}
    try:
        async with stage.running():
            for name in config.scenarios:
                reports[name] = await stage.run(name)
    finally:
        Path(config.report).write_text(json.dumps(reports), encoding="utf-8")


if __name__ == "__main__":
    raise_loopback()
    plain = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    asyncio.run(perform(Config(**{**plain, "scenarios": tuple(plain["scenarios"])})))
