"""The Transfer Engine's processes: whatever becomes of one, it is replaced, and its memory is nobody's trouble."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.errors import Unavailable
from gyre.kv_migrate.choice import Choice, Kind
from gyre.kv_migrate.greeting import SharedSecret
from gyre.kv_migrate.mooncake import MooncakeTransport
from gyre.kv_migrate.mooncake_engine import EngineProcess
from gyre.kv_migrate.staging import Staging
from gyre.kv_migrate.transport import SourceLost
from kv_migrate.peers import LIMIT_S, SECRET, begun, manifest, need, pull, right, serving, shelf, source_process

KIND = Kind.MOONCAKE_TCP
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _library() -> None:
    need(KIND)


def engines(parent: int) -> set[int]:
    """The engines of a process."""
    found: set[int] = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes()
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"mooncake_child" in words and int(fields[1]) == parent and fields[0] != "Z":
            found.add(int(entry))
    return found


async def test_a_receivers_engine_that_dies_in_the_middle_is_replaced_and_the_pull_goes_on() -> None:
    with source_process(128, MIB, KIND) as source:
        async with serving(None, kind=KIND) as client:
            before = engines(os.getpid())
            await pull(client, source.address, manifest(source.epoch, 0), MIB)
            (pid,) = engines(os.getpid()) - before
            staging = Staging(128 * MIB)
            pulling = asyncio.ensure_future(
                pull(client, source.address, manifest(source.epoch, *range(128)), MIB, staging=staging)
            )
            await begun(pulling, staging)
            os.kill(pid, signal.SIGKILL)
            assert right(await pulling, MIB) == list(range(128))
            assert pid not in engines(os.getpid())


async def test_a_receivers_engine_that_hangs_costs_the_deadline_and_is_killed() -> None:
    with source_process(4, MIB, KIND) as source:
        async with serving(None, kind=KIND) as client:
            before = engines(os.getpid())
            await pull(client, source.address, manifest(source.epoch, 0), MIB)
            (pid,) = engines(os.getpid()) - before
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(Unavailable, match=r"within 0\.5 s"):
                await pull(client, source.address, manifest(source.epoch, 1), MIB, 0.5)
            assert pid not in engines(os.getpid())
            assert right(await pull(client, source.address, manifest(source.epoch, 1), MIB), MIB) == [1]


async def test_a_sources_engine_that_dies_costs_one_transfer_and_the_next_has_another() -> None:
    with source_process(4, MIB, KIND) as source:
        async with serving(None, kind=KIND) as client:
            await pull(client, source.address, manifest(source.epoch, 0), MIB)
            (pid,) = engines(source.process.pid)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                while engines(source.process.pid):  # noqa: ASYNC110 - the kernel ends it
                    await asyncio.sleep(0.01)
            assert right(await pull(client, source.address, manifest(source.epoch, 1), MIB), MIB) == [1]
            assert len(engines(source.process.pid)) == 1


async def test_a_peer_that_is_stopped_holds_up_no_transfer_with_another() -> None:
    with source_process(2, MIB, KIND) as frozen, source_process(2, MIB, KIND) as healthy:
        async with serving(None, kind=KIND) as client:
            for source in (frozen, healthy):
                await pull(client, source.address, manifest(source.epoch, 0), MIB)
            frozen.signal(signal.SIGSTOP)
            waiting = asyncio.ensure_future(
                pull(client, frozen.address, manifest(frozen.epoch, 1), MIB, deadline_s=LIMIT_S)
            )
            for _ in range(5):
                assert right(await pull(client, healthy.address, manifest(healthy.epoch, 1), MIB, 20.0), MIB) == [1]
            assert not waiting.done()
            frozen.signal(signal.SIGCONT)
            assert right(await waiting, MIB) == [1]


async def test_a_silent_source_is_lost_once_for_all_who_read_from_it() -> None:
    """It is stopped in the middle of its bytes, with all that it has."""
    count = 64
    with source_process(count, MIB, KIND) as source:
        client = await MooncakeTransport.open(Choice(KIND, "asked for"), SharedSecret(SECRET), silence_s=3.0)
        try:
            wanted = manifest(source.epoch, *range(count))
            staging = Staging(count * MIB)
            pulls = [asyncio.ensure_future(pull(client, source.address, wanted, MIB, staging=staging))]
            await begun(pulls[0], staging)
            others = [replace(wanted, transfer=name) for name in "ab"]
            pulls += [asyncio.ensure_future(pull(client, source.address, other, MIB)) for other in others]
            for process in (source.process.pid, *engines(source.process.pid)):
                os.kill(process, signal.SIGSTOP)
            ends = await asyncio.gather(*pulls, return_exceptions=True)
            assert all(isinstance(end, SourceLost) for end in ends), ends
        finally:
            await client.close()


async def test_a_source_that_is_gone_is_asked_for_a_word_before_another_engine_is_started() -> None:
    with source_process(256, MIB, KIND) as source:
        client = await MooncakeTransport.open(Choice(KIND, "asked for"), SharedSecret(SECRET))
        try:
            await pull(client, source.address, manifest(source.epoch, 0), MIB)
            before = engines(os.getpid())
            staging = Staging(256 * MIB)
            pulling = asyncio.ensure_future(
                pull(client, source.address, manifest(source.epoch, *range(256)), MIB, staging=staging)
            )
            await begun(pulling, staging)
            source.signal(signal.SIGKILL)
            with pytest.raises(SourceLost):
                await pulling
            assert engines(os.getpid()) < before, "the one that failed is gone, and none came in its place"
        finally:
            await client.close()


async def test_a_fence_takes_what_was_exposed_away_from_whoever_knows_where_it_lay() -> None:
    source = shelf(1, MIB)
    async with serving(source, kind=KIND) as server:
        exposed = Staging(MIB)
        reader = await EngineProcess.start(KIND, "127.0.0.1", ())
        try:
            here = await reader.share(exposed)
            carrier = server._carrier  # type: ignore[attr-defined]
            found = await carrier.expose([memoryview(source.content[bytes(16)])])
            await reader.read(found.engine, ((here, found.place, MIB),), LIMIT_S)
            assert exposed.view == source.content[bytes(16)]
            carrier.cut()
            with pytest.raises(Unavailable):
                await reader.read(found.engine, ((here, found.place, MIB),), LIMIT_S)
        finally:
            reader.kill()


async def test_more_requests_than_the_engine_can_queue_go_in_batches() -> None:
    """4,000 blocks of one page: what lies together is read together, within the engine's limits."""
    with source_process(4000, kind=KIND) as source:
        async with serving(None, kind=KIND) as client:
            received = await pull(client, source.address, manifest(source.epoch, *reversed(range(4000))))
            assert right(received) == list(reversed(range(4000)))
