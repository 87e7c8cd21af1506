"""Journals with a copy at a peer: nothing settled is lost with the node, and a peer that is away is caught up with from disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import BadInput, Unavailable
from gyre.ids import CallId, RunId
from gyre.proxy.journal_writer import JournalWriter, look_at_journal
from gyre.proxy.replication import AskHeld, CopyJournal, Held, JournalReplica, PutAway, Replication
from gyre.trajectory.journal import CallDelivered

from .conftest import until
from .scripted_engine import ScriptedEngine
from .test_restart import ANSWER, GatewayProcess, user

R = TypeVar("R")
RUN = RunId("r")
REPLICA = "gyre.actors.journal_replica_process"


class NearPeer:
    """The way to a replica in this process, which can be cut."""

    def __init__(self, root: Path) -> None:
        self.replica = JournalReplica(root)
        self.reachable = True
        self.bytes = 0

    async def ask(self, message: object, deadline_s: float, reply: type[R]) -> R:
        if not self.reachable:
            raise Unavailable("the peer cannot be reached")
        match message:
            case AskHeld():
                answer: object = self.replica.held(message)
            case CopyJournal():
                self.bytes += len(message.data)
                answer = self.replica.copy(message)
            case PutAway():
                answer = self.replica.put_away(message)
            case _:
                raise AssertionError(message)
        assert isinstance(answer, reply)
        return answer


def folder_of(root: Path) -> Path:
    return root / "open" / RUN / "1"


def record(number: int) -> CallDelivered:
    return CallDelivered(CallId(f"call {number}"))


def records(root: Path) -> list[object]:
    return list(look_at_journal(folder_of(root)).records)


async def test_a_synced_record_is_on_the_peers_disk(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    replication = Replication(NearPeer(there))
    journal = JournalWriter(folder_of(here), fsync=True, replica=replication.link(RUN, 1, folder_of(here)))
    for number in range(5):
        journal.append(record(number))
        await journal.sync()
        assert records(there) == [record(each) for each in range(number + 1)]
    assert replication.behind_bytes == 0
    await journal.close()
    await replication.close()


async def test_while_the_peer_is_away_the_run_goes_on_and_then_the_copy_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gyre.proxy.journal_writer.SEGMENT_BYTES", 100)  # so that it must catch up over segments
    here, there = tmp_path / "here", tmp_path / "there"
    peer = NearPeer(there)
    replication = Replication(peer)
    journal = JournalWriter(folder_of(here), fsync=True, replica=replication.link(RUN, 1, folder_of(here)))
    journal.append(record(0))
    await journal.sync()
    peer.reachable = False
    for number in range(1, 10):
        journal.append(record(number))
        await journal.sync()
    assert records(there) == [record(0)]
    assert replication.behind_bytes > 0
    assert caplog.text.count("goes on without the copy of its journal: the peer cannot be reached") == 1
    peer.reachable = True
    await until(lambda: replication.behind_bytes == 0)
    assert records(there) == [record(number) for number in range(10)]
    journal.append(record(10))
    await journal.sync()
    assert records(there)[-1] == record(10)
    await journal.close()
    await replication.close()


async def test_a_journal_opened_again_sends_only_what_the_peer_lacks(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    peer = NearPeer(there)
    for first in (0, 3):
        replication = Replication(peer)
        journal = JournalWriter(folder_of(here), fsync=True, replica=replication.link(RUN, 1, folder_of(here)))
        for number in range(first, first + 3):
            journal.append(record(number))
        await journal.sync()
        await journal.close()
        await replication.close()
    assert records(there) == records(here) == [record(number) for number in range(6)]
    assert peer.bytes == sum(path.stat().st_size for path in folder_of(here).iterdir())


async def test_a_copy_that_is_not_the_beginning_of_the_journal_is_made_anew(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    folder_of(there).mkdir(parents=True)
    (folder_of(there) / "000000.journal").write_bytes(b"GYREJRN1" + b"another life" * 40)
    replication = Replication(NearPeer(there))
    journal = JournalWriter(folder_of(here), fsync=True, replica=replication.link(RUN, 1, folder_of(here)))
    journal.append(record(0))
    await journal.sync()
    assert records(there) == [record(0)]
    await journal.close()
    await replication.close()


async def test_a_closed_journal_is_put_away_at_the_peer_too(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    replication = Replication(NearPeer(there))
    journal = JournalWriter(folder_of(here), fsync=False, replica=replication.link(RUN, 1, folder_of(here)))
    journal.append(record(0))
    await journal.sync()
    await journal.close()
    closed = here / "closed" / "r.1"
    closed.parent.mkdir()
    folder_of(here).rename(closed)
    replication.put_away(RUN, 1, closed)
    await until(lambda: (there / "closed" / "r.1").is_dir())
    assert look_at_journal(there / "closed" / "r.1").records == [record(0)]
    assert not (there / "open" / RUN).exists()
    await replication.close()


@settings(max_examples=40, deadline=None)
@given(data=st.binary(min_size=1, max_size=200), cut=st.integers(0, 200), offset=st.integers(0, 220))
def test_a_copy_never_has_a_hole(tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, offset: int) -> None:
    replica = JournalReplica(tmp_path_factory.mktemp("there"))

    def copy(at: int, piece: bytes) -> Held:
        import xxhash

        return replica.copy(CopyJournal(RUN, 1, 0, at, piece, xxhash.xxh3_64_intdigest(piece)))

    held = copy(0, data[:cut]).bytes
    assert copy(offset, b"more").bytes == (offset + 4 if offset <= held else held)


@pytest.mark.parametrize("run", ["../x", "", "a/b", ".hidden"])
def test_a_run_is_no_way_out_of_the_folder(tmp_path: Path, run: str) -> None:
    with pytest.raises(BadInput, match=r"run: .* is not allowed"):
        JournalReplica(tmp_path).held(AskHeld(RunId(run), 1, 0))


def test_data_that_was_damaged_on_the_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="checksum"):
        JournalReplica(tmp_path).copy(CopyJournal(RUN, 1, 0, 0, b"data", 1))
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ real processes


class ReplicaProcess:
    def __init__(self, folder: Path, secret_file: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", REPLICA, "tcp:127.0.0.1:0", str(secret_file), str(folder)],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(lambda head: ANSWER)
    await engine.start()
    yield engine
    await engine.stop()


async def test_a_gateway_on_the_peers_folder_goes_on_with_every_run_of_a_node_that_is_gone(
    tmp_path: Path, model_dir: Path, engine: ScriptedEngine
) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text("a shared secret")
    copies = tmp_path / "copies"
    replica = ReplicaProcess(copies, secret_file)
    lost_folder, next_folder = tmp_path / "lost", tmp_path / "next"
    lost_folder.mkdir()
    next_folder.mkdir()
    async with aiohttp.ClientSession() as http:
        lost = GatewayProcess(
            lost_folder, model_dir, engine, http, replicate_to=replica.address, secret="a shared secret"
        )
        heir = GatewayProcess(next_folder, model_dir, engine, http, journal_dir=str(copies))
        try:
            await lost.start()
            told: dict[str, object] = {}
            for run in ("one", "two"):
                base = await lost.open(run)
                async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
                    told[run] = await client.chat.completions.create(model="m", messages=[user("go")])
                    history = [user("go"), {"role": "assistant", "content": ANSWER}, user("on")]
                    told[f"{run} on"] = await client.chat.completions.create(model="m", messages=history)
            await lost.open("over")
            await lost.order("close_run", run="over", attempt=1)
            # One call is in flight when the node dies.
            engine.held.clear()
            asked = http.post(f"{base}/v1/chat/completions", json={"model": "m", "messages": [user("lost")]})
            waiting = asyncio.ensure_future(asked)
            await until(lambda: bool(engine.live))
            lost.end(signal.SIGKILL)
            shutil.rmtree(lost_folder / "journal")
            engine.held.set()
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: not (copies / "open" / "over").exists())

            await heir.start()
            assert (await heir.order("status"))["open_runs"] == 2
            requests = len(engine.requests)
            for run in ("one", "two"):
                base = f"{heir.base_url}/run/{run}/key-{run}"
                async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
                    assert await client.chat.completions.create(model="m", messages=[user("go")]) == told[run]
                    assert await client.chat.completions.create(model="m", messages=history) == told[f"{run} on"]
            assert len(engine.requests) == requests
            trace = await heir.order("close_run", run="one", attempt=1)
            assert (trace["calls"], trace["counted_tokens"]) == (2, 2 * (len(ANSWER) + 1))
            assert trace["faults"] == []
        finally:
            for gateway in (lost, heir):
                gateway.end(signal.SIGKILL)
            assert replica.end() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: python -m"),
        (["tcp:10.0.0.1:1", "SECRET", "copies"], "only loopback hosts"),
        (["tcp:127.0.0.1:0", "missing", "copies"], "No such file"),
    ],
)
def test_the_peers_process_says_in_one_line_what_it_cannot_go_by(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text("s")
    given = [str(secret_file) if argument == "SECRET" else argument for argument in arguments]
    ended = subprocess.run(
        [sys.executable, "-m", REPLICA, *given],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
