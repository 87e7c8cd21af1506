"""The contract of a transport, over each of them: our TCP by secret and by certificates, and the Transfer Engine's own TCP."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.kv_migrate.choice import Kind
from gyre.kv_migrate.greeting import SharedSecret
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.staging import Staging
from gyre.kv_migrate.stream import Greeting
from gyre.kv_migrate.transport import BlockLease
from kv_migrate.peers import (
    LIMIT_S,
    SECRET,
    SIZE,
    Shelf,
    begun,
    certificates,
    manifest,
    name,
    need,
    pull,
    right,
    serving,
    shelf,
    source_process,
)

KINDS = (Kind.TCP, Kind.MOONCAKE_TCP)


@pytest.fixture(params=[(Kind.TCP, "secret"), (Kind.TCP, "certificates"), (Kind.MOONCAKE_TCP, "secret")], ids=str)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Greeting, Greeting, Kind]:
    """How the source and the receiver greet, and which transport they are."""
    kind, greeting = request.param
    need(kind)
    if greeting == "certificates":
        source, receiver = certificates(tmp_path, "a", "b")
        return source, receiver, kind
    return SharedSecret(SECRET), SharedSecret(SECRET), kind


Way = tuple[Greeting, Greeting, Kind]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    need(request.param)
    return request.param


async def test_blocks_arrive_as_they_were_sent_in_the_order_asked(way: Way) -> None:
    theirs, ours, kind = way
    source = shelf(5)
    async with serving(source, theirs, kind) as server, serving(None, ours, kind) as client:
        staging = Staging(3 * SIZE)
        received = await pull(client, server.describe(), manifest(server.epoch, 3, 0, 4), staging=staging)
        assert right(received) == [3, 0, 4]
        assert (received.bytes, received.damaged) == (3 * SIZE, 0)
        assert bytes(staging.view[: 3 * SIZE]) == b"".join(source.content[name(n)] for n in (3, 0, 4))
        await source.is_free()


async def test_blocks_that_the_source_has_not_are_left_out(way: Way) -> None:
    theirs, ours, kind = way
    async with serving(shelf(2), theirs, kind) as server, serving(None, ours, kind) as client:
        assert right(await pull(client, server.describe(), manifest(server.epoch, 0, 9, 1))) == [0, 1]
        assert right(await pull(client, server.describe(), manifest(server.epoch, 8, 9))) == []
        assert right(await pull(client, server.describe(), manifest(server.epoch))) == []


async def test_many_transfers_at_once_do_not_mix(way: Way) -> None:
    theirs, ours, kind = way
    source = shelf(64)
    async with serving(source, theirs, kind) as server, serving(None, ours, kind) as client:
        wanted = [tuple(random.Random(seed).sample(range(64), 30)) for seed in range(12)]
        results = await asyncio.gather(
            *(pull(client, server.describe(), manifest(server.epoch, *numbers)) for numbers in wanted)
        )
        assert [tuple(right(received)) for received in results] == wanted
        await source.is_free()


async def test_a_large_object_comes_over_several_streams_and_is_whole(way: Way) -> None:
    theirs, ours, kind = way
    size, count = 8 << 20, 33
    noise = random.Random(1).randbytes(size)
    source = Shelf({name(index): bytes([index]) + noise[1:] for index in range(count)})
    async with serving(source, theirs, kind) as server, serving(None, ours, kind) as client:
        received = await pull(client, server.describe(), manifest(server.epoch, *range(count)), size)
        assert received.damaged == 0
        assert all(data == source.content[key] for key, data in received.blocks)
        assert len(received.blocks) == count


async def test_no_byte_is_fetched_before_its_turn(kind: Kind) -> None:
    size, count = 100_000, 40
    turns: list[int] = []
    gate = asyncio.Event()

    async def turn(bytes_: int) -> None:
        turns.append(bytes_)
        if len(turns) == (3 if kind is Kind.TCP else 1):
            await gate.wait()

    source = shelf(count, size)
    async with serving(source, kind=kind) as server, serving(None, kind=kind) as client:
        staging, wanted = Staging(count * size), manifest(server.epoch, *range(count))
        paced = asyncio.ensure_future(client.pull(server.describe(), wanted, size, staging, LIMIT_S, turn))
        while not turns or not (kind is not Kind.TCP or len(turns) == 3):  # noqa: ASYNC110
            await asyncio.sleep(0)
        others = await pull(client, server.describe(), manifest(server.epoch, *range(count)), size)
        assert len(right(others, size)) == count, "one that has no turn to wait for goes by"
        assert staging.view[sum(turns[:-1]) : count * size] == bytes(count * size - sum(turns[:-1]))
        gate.set()
        assert len(right(await paced, size)) == count
        assert sum(turns) == count * size
        await source.is_free()


async def test_a_refusal_of_the_source_is_told(way: Way) -> None:
    theirs, ours, kind = way
    async with serving(shelf(1), theirs, kind) as server, serving(None, ours, kind) as client:
        with pytest.raises(Refused, match="version 1 is here"):
            await pull(client, server.describe(), manifest(server.epoch, 0, version=2))


async def test_a_peer_that_serves_nothing_refuses(kind: Kind) -> None:
    async with serving(None, kind=kind) as server, serving(None, kind=kind) as client:
        with pytest.raises(Refused, match="serves nothing"):
            await pull(client, server.describe(), manifest(server.epoch, 0))


async def test_blocks_of_another_size_and_staging_memory_that_is_too_small_are_refused(kind: Kind) -> None:
    source = shelf(600)
    async with serving(source, kind=kind) as server, serving(None, kind=kind) as client:
        with pytest.raises(Refused, match=f"{SIZE} bytes"):
            await pull(client, server.describe(), manifest(server.epoch, 0), SIZE // 2)
        with pytest.raises(Refused, match="staging memory has"):
            await pull(client, server.describe(), manifest(server.epoch, *range(600)), staging=Staging(SIZE))
        await source.is_free()


async def test_a_manifest_of_an_epoch_that_is_over_is_refused(kind: Kind) -> None:
    source = shelf(1)
    async with serving(source, kind=kind) as server, serving(None, kind=kind) as client:
        before = server.epoch
        await server.fence(0.0)
        assert server.epoch > before
        with pytest.raises(Refused, match=f"epoch {before} is over"):
            await pull(client, server.describe(), manifest(before, 0))
        assert right(await pull(client, server.describe(), manifest(server.epoch, 0))) == [0]


async def test_a_process_that_comes_after_another_has_a_later_epoch(kind: Kind) -> None:
    """A peer that restarts under its address: what was meant for the one before is refused."""
    with source_process(2, kind=kind) as first:
        port = int(first.address.rsplit(":", 1)[1])
    async with serving(None, kind=kind) as client:
        with source_process(2, kind=kind, port=port) as second:
            assert second.epoch > first.epoch
            with pytest.raises(Refused, match="is over"):
                await pull(client, second.address, manifest(first.epoch, 0))
            assert right(await pull(client, second.address, manifest(second.epoch, 0))) == [0]


async def test_a_transfer_under_a_name_that_is_in_use_is_refused(kind: Kind) -> None:
    source = shelf(3)
    gate = asyncio.Event()
    take = source.lease

    async def wait(wanted: Manifest) -> BlockLease:
        await gate.wait()
        return await take(wanted)

    source.lease = wait  # type: ignore[method-assign]
    async with serving(source, kind=kind) as server, serving(None, kind=kind) as client:
        first = asyncio.ensure_future(pull(client, server.describe(), manifest(server.epoch, 0, transfer="x")))
        await asyncio.sleep(0.2)
        with pytest.raises(Refused, match="under way"):
            await pull(client, server.describe(), manifest(server.epoch, 1, transfer="x"))
        gate.set()
        assert right(await first) == [0]
        assert right(await pull(client, server.describe(), manifest(server.epoch, 1, transfer="x"))) == [1]


async def test_a_client_without_the_secret_gets_nothing_and_is_logged_once(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    source = shelf(1)
    stranger = SharedSecret(b"another secret entirely")
    async with serving(source, kind=kind) as server, serving(None, stranger, kind) as client:
        for _ in range(3):
            with pytest.raises(GyreError):
                await pull(client, server.describe(), manifest(server.epoch, 0))
        _, host, port = server.describe().split(":")
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: somebody\r\nAccept: */*\r\n\r\n")
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
            writer.close()
    assert (source.held, source.ended.is_set()) == (0, False), "no block was ever held for it"
    assert sum("is refused (said once)" in line for line in caplog.messages) == 1
    assert sum("has not greeted (said once)" in line for line in caplog.messages) == 1, (
        "it found us out first, and left"
    )


async def test_an_address_of_another_kind_or_form_is_refused_by_name(kind: Kind) -> None:
    async with serving(None, kind=kind) as client:
        for address in ("", "tcp:", "tcp:host", "unix:/tmp/x", f"{kind}:host:port", f"{kind}:h:0", "127.0.0.1:80"):
            with pytest.raises(BadInput, match=f"{kind}:HOST:PORT"):
                await pull(client, address, manifest(1, 0))
        with pytest.raises(BadInput, match=f"the transport here is {kind}"):
            await pull(client, "rdma:host:1", manifest(1, 0))


async def test_peers_of_two_kinds_exchange_nothing() -> None:
    need(Kind.MOONCAKE_TCP)
    async with serving(shelf(1), kind=Kind.MOONCAKE_TCP) as server, serving(None) as client:
        with pytest.raises(Refused, match="the peer's transport is tcp, and ours is mooncake-tcp"):
            await pull(client, server.describe().replace("mooncake-tcp", "tcp"), manifest(server.epoch, 0))


# ---------------------------------------------------------------------------------------------- real processes


async def test_a_source_that_is_killed_is_given_up_at_once(kind: Kind) -> None:
    size, count = 1 << 20, 256
    with source_process(count, size, kind) as source:
        async with serving(None, kind=kind) as client:
            assert len((await pull(client, source.address, manifest(source.epoch, 0, 1), size)).blocks) == 2
            staging = Staging(count * size)
            pulling = asyncio.ensure_future(
                pull(client, source.address, manifest(source.epoch, *range(count)), size, staging=staging)
            )
            await begun(pulling, staging)
            source.signal(signal.SIGKILL)
            with pytest.raises(Unavailable):
                await pulling
            staging.view[:] = bytes(len(staging.view))
            await asyncio.sleep(0.3)
            assert staging.view == bytes(len(staging.view)), "nothing is written after the pull has ended"


async def test_a_source_that_is_stopped_costs_the_deadline_and_writes_nothing_when_it_goes_on(kind: Kind) -> None:
    size, count = 1 << 20, 128
    with source_process(count, size, kind) as source:
        async with serving(None, kind=kind) as client:
            await pull(client, source.address, manifest(source.epoch, 0), size)
            staging = Staging(count * size)
            pulling = asyncio.ensure_future(
                pull(client, source.address, manifest(source.epoch, *range(count)), size, 2.0, staging)
            )
            await begun(pulling, staging)
            source.signal(signal.SIGSTOP)
            with pytest.raises(Unavailable):
                await pulling
            staging.view[:] = bytes(len(staging.view))
            with pytest.raises(Unavailable, match=r"within 0\.3 s"):
                await pull(client, source.address, manifest(source.epoch, 0), size, 0.3)
            source.signal(signal.SIGCONT)
            await source.is_free()
            assert staging.view == bytes(len(staging.view)), "a late write must not land in memory that is used again"
            assert len((await pull(client, source.address, manifest(source.epoch, 5), size)).blocks) == 1


async def test_blocks_that_are_not_what_their_checksums_say_are_left_out(kind: Kind) -> None:
    with source_process(10, kind=kind) as source:
        source.ask("lie")
        async with serving(None, kind=kind) as client:
            received = await pull(client, source.address, manifest(source.epoch, *range(10)))
            assert (right(received), received.damaged) == ([1, 2, 4, 5, 7, 8], 4)
            await source.is_free()


async def test_a_receiver_that_is_cancelled_at_any_moment_leaves_nothing_held_and_nothing_written(kind: Kind) -> None:
    size, count = 1 << 20, 64
    noise = random.Random(5)
    with source_process(count, size, kind) as source:
        async with serving(None, kind=kind) as client:
            await pull(client, source.address, manifest(source.epoch, 0), size)
            for _ in range(6 if kind is Kind.TCP else 3):
                staging = Staging(count * size)
                pulling = asyncio.ensure_future(
                    pull(client, source.address, manifest(source.epoch, *range(count)), size, staging=staging)
                )
                await asyncio.sleep(noise.random() * 0.1)
                pulling.cancel()
                await asyncio.gather(pulling, return_exceptions=True)
                staging.view[:] = bytes(len(staging.view))
                await source.is_free()
                assert staging.view == bytes(len(staging.view))
            assert (
                len((await pull(client, source.address, manifest(source.epoch, *range(count)), size)).blocks) == count
            )


async def test_no_process_of_a_transport_is_left_behind() -> None:
    need(Kind.MOONCAKE_TCP)

    def engines() -> set[str]:
        found: set[str] = set()
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if b"mooncake_child" in words:
                found.add(entry)
        return found

    before = engines()
    with source_process(2, kind=Kind.MOONCAKE_TCP) as source:
        async with serving(None, kind=Kind.MOONCAKE_TCP) as client:
            await pull(client, source.address, manifest(source.epoch, 0))
            assert len(engines() - before) == 3
        source.signal(signal.SIGKILL)
        source.process.wait(LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            while engines() - before:  # noqa: ASYNC110 - the kernel ends them
                await asyncio.sleep(0.02)
