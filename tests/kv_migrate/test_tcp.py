"""Our TCP transport against a network that changes, cuts and stalls what goes over it, and peers that do not belong."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gyre import pki
from gyre.credentials import Credentials
from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.kv_migrate import spans
from gyre.kv_migrate.asking import Line, open_transfer
from gyre.kv_migrate.choice import Kind
from gyre.kv_migrate.conversation import Acknowledge, AskChecksums, Checksums, Fetch, Granted
from gyre.kv_migrate.greeting import Certificates, SharedSecret
from gyre.kv_migrate.leases import RESUME_S
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.transport import BlockLease
from kv_migrate.peers import (
    LIMIT_S,
    SECRET,
    SIZE,
    Shelf,
    between,
    certificates,
    manifest,
    name,
    pull,
    right,
    serving,
    shelf,
)


def line(address: str) -> Line:
    """A receiver of which every step is a test's."""
    return Line(Kind.TCP, address, SharedSecret(SECRET))


async def test_a_server_without_the_secret_is_not_believed() -> None:
    async with serving(shelf(1), SharedSecret(b"an impostor's own secret")) as server, serving(None) as client:
        with pytest.raises(Refused, match="does not know the shared secret"):
            await pull(client, server.describe(), manifest(server.epoch, 0))


async def test_only_nodes_of_the_same_authority_are_let_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    ours, _ = certificates(tmp_path / "ours", "a", "b")
    (theirs,) = certificates(tmp_path / "theirs", "b")
    (person,) = certificates(tmp_path / "ours", "ada", kind=pki.Kind.CLIENT)
    source = shelf(1)
    async with serving(source, ours) as server:
        for stranger in (theirs, person, SharedSecret(SECRET)):
            async with serving(None, stranger) as client:
                with pytest.raises(GyreError):
                    await pull(client, server.describe(), manifest(server.epoch, 0), deadline_s=3.0)
    assert (source.held, source.ended.is_set()) == (0, False)
    assert sum("is refused (said once)" in said for said in caplog.messages) == 1


def test_a_certificate_that_is_not_there_is_named_when_the_transport_is_made(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"ca\.pem"):
        Certificates(Credentials(tmp_path / "ca.pem", tmp_path / "a.pem", tmp_path / "a.key"))


@pytest.mark.parametrize("seed", range(12))
async def test_a_bit_flipped_on_the_wire_never_becomes_a_block(seed: int) -> None:
    source = shelf(3)
    noise = random.Random(seed)
    # Past the greeting lie the offer and 3 * SIZE bytes of blocks; some flips hit the frames before and after them.
    place = noise.randrange(64, 3 * SIZE)
    flips: list[int] = []

    def flip(data: bytes, offset: int) -> bytes:
        if flips or not offset <= place < offset + len(data):
            return data
        flips.append(place)
        changed = bytearray(data)
        changed[place - offset] ^= 1 << noise.randrange(8)
        return bytes(changed)

    async with serving(source) as server, serving(None) as client, between(server.describe(), flip) as address:
        try:
            received = await pull(client, address, manifest(server.epoch, 0, 1, 2), deadline_s=3.0)
        except (Refused, Unavailable, BadInput):
            pass
        else:
            assert (len(right(received)), received.damaged) == (2, 1)
    assert flips


@pytest.mark.parametrize("seed", range(8))
async def test_a_pull_goes_on_where_its_connection_broke_and_fetches_no_byte_twice(seed: int) -> None:
    """Cut at a random byte of each of the first three connections."""
    source = shelf(64)
    noise = random.Random(seed)
    places = [noise.randrange(100, 64 * SIZE // 3) for _ in range(3)]
    connections: list[int] = []

    def cut(data: bytes, offset: int) -> bytes | None:
        if offset == 0:
            connections.append(0)
        if len(connections) <= len(places) and offset + len(data) > places[len(connections) - 1]:
            return None
        connections[-1] += len(data)
        return data

    async with serving(source) as server, serving(None) as client, between(server.describe(), cut) as address:
        assert right(await pull(client, address, manifest(server.epoch, *range(64)))) == list(range(64))
        await source.is_free()
    assert len(connections) == len(places) + 1
    frames = 400 * len(connections) + 64 * 16
    assert sum(connections) <= 64 * SIZE + frames


async def test_the_next_transfer_goes_over_the_same_connection_and_over_a_new_one_where_that_has_ended() -> None:
    source = shelf(3)
    connections: list[int] = []

    def count(data: bytes, offset: int) -> bytes | None:
        if offset == 0:
            connections.append(0)
        return data if len(connections) != 1 or len(data) + offset < 12_000 else None

    async with serving(source) as server, serving(None) as client, between(server.describe(), count) as address:
        for number in (0, 1, 2, 0):  # the third block is too much for the first connection
            assert right(await pull(client, address, manifest(server.epoch, number))) == [number]
        await source.is_free()
    assert len(connections) == 2


@pytest.mark.parametrize("seed", range(4))
async def test_all_streams_of_a_large_transfer_may_break_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_STREAM_BYTES", 10 * SIZE)
    monkeypatch.setattr(spans, "_SPAN_BYTES", 5 * SIZE)
    source = shelf(64)
    noise = random.Random(seed)
    begun, all_there = 0, asyncio.Event()

    def cut(data: bytes, offset: int) -> bytes | None:
        nonlocal begun
        begun += offset == 0
        if begun == spans.STREAMS:
            all_there.set()
        broken = begun <= spans.STREAMS + 2 and noise.random() < 0.5
        return None if all_there.is_set() and broken else data

    async with serving(source) as server, serving(None) as client, between(server.describe(), cut) as address:
        assert right(await pull(client, address, manifest(server.epoch, *range(64)))) == list(range(64))
        await source.is_free()
    assert begun > spans.STREAMS


async def test_a_certificate_that_goes_away_under_way_ends_one_connection_and_not_the_serving(tmp_path: Path) -> None:
    ours, theirs = certificates(tmp_path, "a", "b")
    async with serving(shelf(1), ours) as server, serving(None, theirs) as client:
        (tmp_path / "a.key").rename(tmp_path / "aside")
        with pytest.raises(Unavailable):
            await pull(client, server.describe(), manifest(server.epoch, 0))
        (tmp_path / "aside").rename(tmp_path / "a.key")
        assert right(await pull(client, server.describe(), manifest(server.epoch, 0))) == [0]


async def test_a_connection_that_breaks_again_and_again_is_given_up_and_the_source_lets_go() -> None:
    source = shelf(3)
    async with (
        serving(source) as server,
        serving(None) as client,
        between(server.describe(), lambda data, offset: None if offset + len(data) > 100 else data) as address,
    ):
        with pytest.raises(Unavailable, match="was lost"):
            await pull(client, address, manifest(server.epoch, 0, 1, 2))
        await source.is_free()


async def test_a_peer_that_never_answers_costs_the_deadline_and_no_more() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 20)
        await asyncio.sleep(LIMIT_S)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with serving(None) as client:
        with pytest.raises(Unavailable, match=r"within 0\.2 s"):
            await pull(client, f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}", manifest(1, 0), deadline_s=0.2)
    server.close()


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    async with serving(shelf(1)) as gone:
        address = gone.describe()
    async with serving(None) as client:
        with pytest.raises(Unavailable):
            await pull(client, address, manifest(1, 0))


@asynccontextmanager
async def stalling(address: str) -> AsyncIterator[str]:
    """A relay that passes on the server's greeting and then reads no more of what it sends."""
    _, host, port = address.split(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(port), limit=4096)

        async def forward() -> None:
            while data := await reader.read(65536):
                up_writer.write(data)

        forwarding = asyncio.ensure_future(forward())
        writer.write(await up_reader.readexactly(64))
        await forwarding
        up_writer.transport.abort()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_a_fence_cuts_a_slow_reader_off_and_its_blocks_are_free() -> None:
    source = Shelf({name(index): bytes(1 << 20) for index in range(64)})
    async with serving(source) as server:
        reader = line(server.describe())
        wanted = manifest(server.epoch, *range(64))
        await open_transfer(reader, wanted, Kind.TCP, LIMIT_S)
        await reader.ask(Fetch(wanted.transfer, wanted.epoch, 0, 64 << 20), Granted)
        assert source.held == 1
        await server.fence(0.1)
        assert source.held == 0
        with pytest.raises((OSError, EOFError)):
            await (await reader.stream()).receive(64 << 20)
        reader.close()


async def test_a_fence_waits_for_a_lease_that_is_being_taken() -> None:
    source = shelf(1)
    gate, asked = asyncio.Event(), asyncio.Event()
    take = source.lease

    async def wait(wanted: Manifest) -> BlockLease:
        asked.set()
        await gate.wait()
        return await take(wanted)

    source.lease = wait  # type: ignore[method-assign]
    async with serving(source) as server, serving(None) as client:
        pulling = asyncio.ensure_future(pull(client, server.describe(), manifest(server.epoch, 0)))
        await asked.wait()
        fencing = asyncio.ensure_future(server.fence(0.0))
        await asyncio.sleep(0.1)
        assert not fencing.done()
        gate.set()
        await fencing
        assert source.held == 0
        with pytest.raises(Refused, match="holds no blocks"):
            await pulling


async def test_an_acknowledgement_of_a_fenced_epoch_frees_nothing_of_the_next() -> None:
    source = shelf(1)
    async with serving(source) as server:
        late, next_one = line(server.describe()), line(server.describe())
        old = manifest(server.epoch, 0, transfer="x")
        await open_transfer(late, old, Kind.TCP, LIMIT_S)
        await server.fence(0.0)
        assert source.held == 0
        new = manifest(server.epoch, 0, transfer="x")
        await open_transfer(next_one, new, Kind.TCP, LIMIT_S)
        late.close()  # it was cut; it comes again with what it has to say
        await (await late.stream()).send_frame(Acknowledge("x", old.epoch))
        with pytest.raises(Refused, match="holds no blocks"):
            await late.ask(AskChecksums("x", old.epoch), Checksums)  # so the acknowledgement was heard
        assert source.held == 1
        await (await next_one.stream()).send_frame(Acknowledge("x", new.epoch))
        await source.is_free()
        late.close()
        next_one.close()


async def test_blocks_are_held_while_a_receiver_comes_back_and_not_for_ever() -> None:
    source = shelf(2)
    async with serving(source) as server:
        reader = line(server.describe())
        wanted = manifest(server.epoch, 0, 1)
        await open_transfer(reader, wanted, Kind.TCP, LIMIT_S)
        reader.close()
        await asyncio.sleep(RESUME_S / 4)
        assert source.held == 1
        await reader.ask(Fetch(wanted.transfer, wanted.epoch, 0, SIZE), Granted)
        assert await (await reader.stream()).receive(SIZE) == source.content[name(0)]
        reader.close()
        await source.is_free()
        with pytest.raises(Refused, match="holds no blocks"):
            await reader.ask(Fetch(wanted.transfer, wanted.epoch, SIZE, 2 * SIZE), Granted)
        reader.close()


async def test_a_receiver_that_holds_on_without_reading_loses_its_blocks_when_its_time_is_over() -> None:
    source = shelf(1)
    async with serving(source) as server:
        reader = line(server.describe())
        await open_transfer(reader, manifest(server.epoch, 0), Kind.TCP, 0.2)
        await source.is_free()
        reader.close()


@pytest.mark.parametrize(("begin", "end"), [(0, SIZE + 1), (-1, 5), (5, 5), (7, 3), (SIZE, 2 * SIZE)])
async def test_bytes_beside_what_was_offered_are_refused(begin: int, end: int) -> None:
    async with serving(shelf(4)) as server:
        reader = line(server.describe())
        wanted = manifest(server.epoch, 0)
        await open_transfer(reader, wanted, Kind.TCP, LIMIT_S)
        with pytest.raises(Refused, match="not among"):
            await reader.ask(Fetch(wanted.transfer, wanted.epoch, begin, end), Granted)
        reader.close()


async def test_a_source_that_fails_does_not_end_the_serving_of_others(caplog: pytest.LogCaptureFixture) -> None:
    source = shelf(2)
    broken = Shelf(source.content)

    async def fail(_: Manifest) -> BlockLease:
        raise RuntimeError("a fault of ours")

    broken.lease = fail  # type: ignore[method-assign]
    async with serving(broken) as server, serving(None) as client:
        with pytest.raises(Unavailable):
            await pull(client, server.describe(), manifest(server.epoch, 0))
        assert "a fault of ours" in caplog.text
        server.register(source)
        assert (await pull(client, server.describe(), manifest(server.epoch, 0))).bytes == SIZE
