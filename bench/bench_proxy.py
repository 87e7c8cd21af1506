"""What the proxy adds to a call, with an engine that answers at once (DESIGN §9): latency, long runs, memory, the journal.

The gateway runs alone on one core; the engine and the client share what is left. Latency is that of a call through the
gateway less that of one to the engine itself, at the pace of agents: each of the streams asks every `PAUSE_S`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
from proxy_process import STREAMED_TOKENS, TOKEN
from row import Row

from gyre import pki
from gyre.actors.messages import OpenRun
from gyre.actors.messages_journals import AskHeld, Attempt, CopyJournal, Held
from gyre.actors.peers import Peers
from gyre.actors.runtime import Actor, ActorSystem, handles
from gyre.credentials import Credentials
from gyre.engine.records import GenerateRequest
from gyre.ids import CallId, CellId, GroupId, NodeId, RunId
from gyre.proxy.conversation import Conversation, Finish, Message, Speaker
from gyre.proxy.dialects.spoken import Spoken
from gyre.proxy.held_copies import HeldCopies
from gyre.proxy.id_texts import IdTexts
from gyre.proxy.journal_writer import JournalWriter
from gyre.proxy.rendering import Rendering
from gyre.proxy.replication import Replication
from gyre.proxy.sampling import Cached, Ending, Stretch
from gyre.proxy.session import Session
from gyre.trajectory.journal import CallDelivered, CallSampled

NAMES = (
    "proxy_added_p50_ms_1",
    "proxy_added_p99_ms_1",
    "proxy_added_p50_ms_100",
    "proxy_added_p99_ms_100",
    "proxy_added_p50_ms_500",
    "proxy_added_p99_ms_500",
    "proxy_core_ms_per_call",
    "proxy_core_ms_per_streamed_call",
    "proxy_call_10_ms",
    "proxy_call_100_ms",
    "proxy_call_1000_ms",
    "proxy_own_work_1000_over_10",
    "proxy_700k_run_mb",
    "journal_records_per_s_call",
    "journal_mb_per_s_call",
    "journal_records_per_s_os",
    "journal_mb_per_s_os",
    "journal_copied_over_alone",
)

MODEL = Path(__file__).parents[1] / "gyre" / "demo" / "policy"
PAUSE_S = 5.0
"""Between two calls of a stream: an agent's tool takes its time."""
MEASURE_S = 6.0
SATURATED_CALLS = 3000
STREAMED_CALLS = 500
CALLS = 1000
PROMPT_TOKENS, OUTPUT_TOKENS = 600, 100
"""New in each call of the long run."""
WORD = " a b c d"
"""Eight characters of a tool's result."""
JOURNAL_S = 1.5


def rows() -> Iterable[Row]:
    with tempfile.TemporaryDirectory() as folder, processes(Path(folder)) as parts:
        for streams in (1, 100, 500):
            p50, p99 = asyncio.run(added_ms(parts, streams))
            yield Row(f"proxy_added_p50_ms_{streams}", p50, "ms", "<= 2", p50 <= 2)
            yield Row(f"proxy_added_p99_ms_{streams}", p99, "ms", "-", True)
        core_ms = asyncio.run(core_ms_per_call(parts))
        yield Row("proxy_core_ms_per_call", core_ms, "ms", "<= 2", core_ms <= 2)
        core_ms = asyncio.run(core_ms_per_call(parts, STREAMED_CALLS, STREAMED_TOKENS))
        yield Row("proxy_core_ms_per_streamed_call", core_ms, "ms", "-", True)
        costs = asyncio.run(long_run_ms(parts))
        for call, cost in costs.items():
            yield Row(f"proxy_call_{call}_ms", cost, "ms", "-", True)
    early, late = own_work()
    yield Row("proxy_own_work_1000_over_10", late / early, "ratio", "<= 2", late / early <= 2)
    megabytes = run_bytes() / 1e6
    yield Row("proxy_700k_run_mb", megabytes, "MB", "<= 16", megabytes <= 16)
    for name, fsync in (("call", True), ("os", False)):
        records, megabytes = asyncio.run(journal_speed(fsync))
        yield Row(f"journal_records_per_s_{name}", records, "1/s", "-", True)
        yield Row(f"journal_mb_per_s_{name}", megabytes, "MB/s", "-", True)
    yield Row("journal_copied_over_alone", asyncio.run(copied_speed()), "x", "-", True)


# ------------------------------------------------------------------------------------------ processes


@dataclass(frozen=True)
class Parts:
    engine: str
    gateway: str
    """Where the runs' base URLs begin."""
    control: str


@contextmanager
def processes(folder: Path) -> Iterator[Parts]:
    with (
        process(folder, "engine") as engine,
        process(folder, "gateway", str(folder), str(MODEL), engine["url"]) as told,
    ):
        yield Parts(engine["url"], told["base_url"], told["url"])


@contextmanager
def process(folder: Path, part: str, *rest: str) -> Iterator[dict[str, str]]:
    ready, log = folder / f"{part}.json", folder / f"{part}.log"
    argv = [sys.executable, str(Path(__file__).with_name("proxy_process.py")), part, str(ready), *rest]
    with log.open("wb") as out:
        child = subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        while not ready.exists():
            if child.poll() is not None:
                raise RuntimeError(f"the {part} ended: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield json.loads(ready.read_text())
    finally:
        os.kill(child.pid, signal.SIGTERM)
        child.wait(30)


# ------------------------------------------------------------------------------------------ latency


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def added_ms(parts: Parts, streams: int) -> tuple[float, float]:
    """What the gateway adds at p50 and at p99."""
    pause_s = PAUSE_S if streams > 1 else 0.01
    async with client() as session:

        async def direct(_: int, number: int) -> None:
            body = {
                "rid": f"{number}",
                "input_ids": [1] * 40,
                "sampling_params": {"max_new_tokens": 16},
                "stream": True,
            }
            await ask(session, f"{parts.engine}/generate", body)

        async def through(stream: int, number: int) -> None:
            await ask(session, chat_url(parts, stream), chat(f"{streams}/{stream}/{number}"))

        plain = await latencies(streams, pause_s, direct)
        proxied = await latencies(streams, pause_s, through)
    return tuple(1000 * (at(proxied, place) - at(plain, place)) for place in (50, 99))  # type: ignore[return-value]


async def latencies(streams: int, pause_s: float, call: Any) -> list[float]:
    took: list[float] = []
    end_s = time.perf_counter() + MEASURE_S

    async def stream(place: int) -> None:
        chance = random.Random(place)
        await asyncio.sleep(chance.random() * pause_s)
        number = 0
        while time.perf_counter() < end_s:
            began_s = time.perf_counter()
            await call(place, number)
            took.append(time.perf_counter() - began_s)
            number += 1
            await asyncio.sleep(pause_s * (0.5 + chance.random()))

    await asyncio.gather(*(stream(place) for place in range(streams)))
    return took


def at(values: list[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1]


async def core_ms_per_call(parts: Parts, calls: int = SATURATED_CALLS, tokens: int = 16) -> float:
    """Milliseconds of the gateway's one core that a call takes when it has as many as it can serve."""
    async with client() as session:
        left = iter(range(calls))
        began = time.time_ns()  # an equal request would be answered from the tree

        async def stream(place: int) -> None:
            for number in left:
                await ask(session, chat_url(parts, place), chat(f"{began}/{number}", tokens))

        before = float(await ask(session, f"{parts.control}/cpu", None))
        await asyncio.gather(*(stream(place) for place in range(64)))
        after = float(await ask(session, f"{parts.control}/cpu", None))
    return 1000 * (after - before) / calls


def chat_url(parts: Parts, stream: int) -> str:
    return f"{parts.gateway}/run/r{stream}/key/v1/chat/completions"


def chat(text: str, tokens: int = 16) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You work."}, {"role": "user", "content": text}]
    return {"model": "m", "messages": messages, "stream": True, "max_tokens": tokens}


async def ask(session: aiohttp.ClientSession, url: str, body: Any) -> bytes:
    method = "GET" if body is None else "POST"
    async with session.request(method, url, json=body) as response:
        data = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status} {data[:300]!r}")
        return data


# ------------------------------------------------------------------------------------------ a long run


async def long_run_ms(parts: Parts) -> dict[int, float]:
    """Milliseconds of call 10, 100 and 1,000 of a run that grows to 700,000 tokens, each a median of ten around it."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You work."}]
    took: list[float] = []
    async with client() as session:
        for number in range(CALLS + 1):
            messages.append({"role": "user", "content": f"{number}:" + WORD * (PROMPT_TOKENS // 8)})
            body = {"model": "m", "messages": messages, "max_tokens": OUTPUT_TOKENS}
            data = json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            began_s = time.perf_counter()
            async with session.post(chat_url(parts, 499), data=data, headers=headers) as response:
                answer = await response.read()
            took.append(time.perf_counter() - began_s)
            said = json.loads(answer)["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said})
    return {call: 1000 * median(took[call - 5 : call + 5]) for call in (10, 100, 1000)}


class LongRun:
    """The gateway's own part of a long run's calls: from the parsed request to the engine's text, and from its tokens back."""

    def __init__(self, rendering: Rendering) -> None:
        spoken = Spoken()
        opened = OpenRun(RunId("r"), GroupId("g"), 1, "key", "scripted", 1.0, OUTPUT_TOKENS)
        self._dialect = spoken.chat
        self._session = Session(opened, rendering, spoken.by_name())
        self._texts = IdTexts(self._session.tree)
        self._messages = (Message(Speaker.SYSTEM, "You work."),)
        self._stretch = Stretch(
            array("i", [TOKEN]) * OUTPUT_TOKENS, array("f", [-0.5]) * OUTPUT_TOKENS, array("i", [0]) * OUTPUT_TOKENS
        )
        self.calls = 0

    def call(self) -> float:
        """One more call; its seconds."""
        session = self._session
        said = Message(Speaker.USER, f"{self.calls}:" + WORD * (PROMPT_TOKENS // 8))
        self._messages = (*self._messages, said)
        asked = Conversation(self._messages, (), (), OUTPUT_TOKENS, None, False, False, "m")
        body = {"model": "m"}
        began_s = time.perf_counter()
        made, _ = session.begin(asked, body, b"%d" % self.calls, self._dialect, {}, 10**6, 0.0)
        text = self._texts.prompt(made.base, made.suffix)
        b"".join(GenerateRequest("r", text, 1).body(stream=True))  # as the socket takes it
        session.sampled(made, self._stretch)
        cached = Cached(CellId("c"), 0, 0)
        session.end(made, Ending(Finish.LENGTH, "", cached, 0, False, 0, 0.0))
        self._texts.ended(made.id, made.base, text, self._stretch.token_ids)
        session.deliver(made.id)
        took_s = time.perf_counter() - began_s
        self._messages = (*self._messages, Message(Speaker.ASSISTANT, session.reply(made, "m").answer.text))
        self.calls += 1
        return took_s


def own_work() -> tuple[float, float]:
    """Seconds of the gateway's own work on call 10 and on call 1,000, each a median of ten around it."""
    run = LongRun(Rendering(MODEL, "auto", thinking=False))
    took = [run.call() for _ in range(CALLS + 5)]
    return median(took[5:15]), median(took[CALLS - 5 : CALLS + 5])


def run_bytes() -> int:
    """Bytes that a run of 700,000 tokens takes in the gateway, as Python's own allocator counts them."""
    rendering = Rendering(MODEL, "auto", thinking=False)
    LongRun(rendering).call()  # what the first call loads is the process's and not the run's
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        run = LongRun(rendering)
        for _ in range(CALLS):
            run.call()
        run._messages = ()  # the request's, which is gone when it has its answer
        after, _ = tracemalloc.get_traced_memory()
        return after - before
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------ the journal


async def journal_speed(fsync: bool, replication: Replication | None = None) -> tuple[float, float]:
    """Records and megabytes a second that one run's journal takes, each call's records synced before the next call's."""
    tokens = array("i", range(1000))
    floats = array("f", [-0.5]) * 1000
    calls = 0
    with tempfile.TemporaryDirectory() as folder:
        replica = None if replication is None else replication.link(Attempt(RunId("r"), 1), Path(folder))
        journal = JournalWriter(Path(folder), fsync=fsync, replica=replica)
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + JOURNAL_S:
            name = CallId(f"r.1.{calls}")
            journal.append(CallSampled(name, tokens.tobytes(), floats.tobytes(), tokens.tobytes()))
            journal.append(CallDelivered(name))
            await journal.sync()
            calls += 1
        took_s = time.perf_counter() - began_s
        await journal.close()
        written = sum(path.stat().st_size for path in Path(folder).iterdir())
    return 2 * calls / took_s, written / 1e6 / took_s


class Keeper(Actor):
    """The peer's side of the copies, as a gateway serves it."""

    def __init__(self, copies: HeldCopies) -> None:
        self._copies = copies

    @handles(AskHeld, concurrent=True)
    async def held(self, message: AskHeld) -> Held:
        return await asyncio.to_thread(self._copies.held, message)

    @handles(CopyJournal, concurrent=True)
    async def copy(self, message: CopyJournal) -> Held:
        return await asyncio.to_thread(self._copies.copy, message)


async def copied_speed() -> float:
    """Records a second of a journal whose copy goes to a peer over TLS, to those of one alone: both sides are in this one
    process and on one disk, so two nodes do better."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pki.init(folder, "bench", 10)
        held: list[Credentials] = []
        for node in ("a", "b"):
            pki.issue(folder, node, pki.Kind.NODE, 2, ("127.0.0.1",))
            held.append(Credentials(folder / "ca.pem", folder / f"{node}.pem", folder / f"{node}.key"))
        async with ActorSystem.running("bench") as system:
            keeper = system.spawn("keeper", lambda: Keeper(HeldCopies(folder / "copies")))
            async with (
                Peers("a", held[0], lambda _: keeper) as ours,
                Peers("b", held[1], lambda _: keeper, "tls:127.0.0.1:0") as theirs,
            ):
                replication = Replication(NodeId("a"))
                replication.go_to(NodeId("b"), ours.ref("b", theirs.address, ""))
                copied, _ = await journal_speed(True, replication)
                behind = replication.status()
                await replication.close()
    assert not behind.why, behind
    alone, _ = await journal_speed(True)
    return copied / alone
