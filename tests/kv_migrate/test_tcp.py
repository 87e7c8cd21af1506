"""The TCP transport against peers that lie, stop, die or do not know the secret."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from gyre.errors import BadInput, GyreError, Refused, Unavailable
from gyre.kv_migrate.tcp import TcpTransport
from gyre.kv_migrate.transport import BlockLease, DamagedBlock, Manifest

SECRET = b"a secret of the engines"
SIZE = 4096
LIMIT_S = 20.0


@dataclass
class Shelf:
    """A source of blocks in memory that remembers who holds what."""

    content: dict[bytes, bytes]
    version: int = 1
    held: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def lease(self, manifest: Manifest) -> BlockLease:
        if manifest.version != self.version:
            raise Refused(f"version {self.version} is here")
        self.held += 1
        return ShelfLease(self, [memoryview(self.content[n]) if n in self.content else None for n in manifest.blocks])


@dataclass
class ShelfLease:
    shelf: Shelf
    blocks: Sequence[memoryview | None]
    over: bool = False

    def end(self) -> None:
        if not self.over:
            self.over = True
            self.shelf.held -= 1
            self.shelf.ended.set()


def shelf(count: int, seed: int = 0) -> Shelf:
    noise = random.Random(seed)
    return Shelf({bytes([index]): noise.randbytes(SIZE) for index in range(count)})


def manifest(*names: int, version: int = 1) -> Manifest:
    return Manifest("t", version, "layout", tuple(bytes([name]) for name in names))


@asynccontextmanager
async def serving(source: Shelf | None, secret: bytes = SECRET) -> AsyncIterator[TcpTransport]:
    transport = await TcpTransport.open(secret)
    try:
        if source is not None:
            transport.register(source)
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def between(address: str, change: Callable[[bytes, int], bytes | None]) -> AsyncIterator[str]:
    """A man in the middle: `change(data, offset)` sees what the server sends; None cuts the connection."""
    host, port = address.removeprefix("tcp:").rsplit(":", 1)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(port))

        async def forward() -> None:
            while data := await reader.read(65536):
                up_writer.write(data)

        async def back() -> None:
            offset = 0
            while data := await up_reader.read(65536):
                changed = change(data, offset)
                offset += len(data)
                if changed is None:
                    return
                writer.write(changed)

        forwarding = asyncio.ensure_future(forward())
        try:
            await back()
        except ConnectionError:
            pass
        finally:
            forwarding.cancel()
            writer.transport.abort()
            up_writer.transport.abort()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def lease_is_over(source: Shelf) -> None:
    async with asyncio.timeout(LIMIT_S):
        await source.ended.wait()
    assert source.held == 0


async def test_blocks_arrive_as_they_were_sent_in_the_order_asked() -> None:
    source = shelf(5)
    async with serving(source) as server, serving(None) as client:
        received = await client.pull(server.describe(), manifest(3, 0, 4), SIZE, LIMIT_S)
        assert [(name, bytes(data)) for name, data in received.blocks] == [
            (bytes([n]), source.content[bytes([n])]) for n in (3, 0, 4)
        ]
        assert received.bytes == 3 * SIZE
        await lease_is_over(source)


async def test_blocks_that_the_source_has_not_are_left_out() -> None:
    async with serving(shelf(2)) as server, serving(None) as client:
        received = await client.pull(server.describe(), manifest(0, 9, 1), SIZE, LIMIT_S)
        assert [name for name, _ in received.blocks] == [b"\x00", b"\x01"]


async def test_many_transfers_at_once_do_not_mix() -> None:
    source = shelf(64)
    async with serving(source) as server, serving(None) as client:
        wanted = [tuple(random.Random(seed).sample(range(64), 30)) for seed in range(20)]
        results = await asyncio.gather(
            *(client.pull(server.describe(), manifest(*names), SIZE, LIMIT_S) for names in wanted)
        )
        for names, received in zip(wanted, results, strict=True):
            assert [bytes(data) for _, data in received.blocks] == [source.content[bytes([n])] for n in names]


async def test_a_refusal_of_the_source_is_told() -> None:
    async with serving(shelf(1)) as server, serving(None) as client:
        with pytest.raises(Refused, match="version 1 is here"):
            await client.pull(server.describe(), manifest(0, version=2), SIZE, LIMIT_S)


async def test_a_peer_that_serves_nothing_refuses() -> None:
    async with serving(None) as server, serving(None) as client:
        with pytest.raises(Refused, match="serves nothing"):
            await client.pull(server.describe(), manifest(0), SIZE, LIMIT_S)


async def test_blocks_of_another_size_are_refused() -> None:
    async with serving(shelf(1)) as server, serving(None) as client:
        with pytest.raises(Refused, match=f"{SIZE} bytes"):
            await client.pull(server.describe(), manifest(0), SIZE // 2, LIMIT_S)


async def test_a_client_without_the_secret_gets_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    source = shelf(1)
    async with serving(source) as server, serving(None, secret=b"another secret entirely") as client:
        for _ in range(3):
            with pytest.raises(GyreError):
                await client.pull(server.describe(), manifest(0), SIZE, LIMIT_S)
        host, port = server.describe().removeprefix("tcp:").rsplit(":", 1)
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: somebody\r\nAccept: */*\r\n\r\n")
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
            writer.close()
    assert source.held == 0
    assert not source.ended.is_set(), "no block was ever held for it"
    # The transport that could not prove the server's side hangs up by itself; the other one is a stranger, said once.
    assert sum("without knowing the shared secret" in line for line in caplog.messages) == 1


async def test_a_server_without_the_secret_is_not_believed() -> None:
    async with serving(shelf(1), secret=b"an impostor's own secret") as server, serving(None) as client:
        with pytest.raises(Refused, match="does not know the shared secret"):
            await client.pull(server.describe(), manifest(0), SIZE, LIMIT_S)


@pytest.mark.parametrize("seed", range(12))
async def test_a_bit_flipped_on_the_wire_never_becomes_a_block(seed: int) -> None:
    source = shelf(3)
    noise = random.Random(seed)
    # Past the greeting and the offer lie 3 * SIZE bytes of blocks; some flips hit the frames before them.
    place = noise.randrange(64, 3 * SIZE)

    def flip(data: bytes, offset: int) -> bytes:
        if not offset <= place < offset + len(data):
            return data
        changed = bytearray(data)
        changed[place - offset] ^= 1 << noise.randrange(8)
        return bytes(changed)

    async with serving(source) as server, serving(None) as client, between(server.describe(), flip) as address:
        with pytest.raises((DamagedBlock, Refused, Unavailable, BadInput)):
            await client.pull(address, manifest(0, 1, 2), SIZE, 3.0)


@pytest.mark.parametrize("seed", range(8))
async def test_a_connection_cut_at_any_byte_is_unavailable_and_the_source_lets_go(seed: int) -> None:
    source = shelf(3)
    place = random.Random(seed).randrange(200, 3 * SIZE)

    def cut(data: bytes, offset: int) -> bytes | None:
        return None if offset + len(data) > place else data

    async with serving(source) as server, serving(None) as client, between(server.describe(), cut) as address:
        with pytest.raises(Unavailable):
            await client.pull(address, manifest(0, 1, 2), SIZE, LIMIT_S)
        if source.held:
            await lease_is_over(source)


async def test_a_peer_that_never_answers_costs_the_deadline_and_no_more() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 20)
        await asyncio.sleep(LIMIT_S)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with serving(None) as client:
        with pytest.raises(Unavailable, match=r"within 0\.2 s"):
            await client.pull(f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}", manifest(0), SIZE, 0.2)
    server.close()


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    async with serving(shelf(1)) as gone:
        address = gone.describe()
    async with serving(None) as client:
        with pytest.raises(Unavailable):
            await client.pull(address, manifest(0), SIZE, LIMIT_S)


@asynccontextmanager
async def stalling(address: str) -> AsyncIterator[str]:
    """A relay that passes on the server's greeting and then reads no more of what it sends."""
    host, port = address.removeprefix("tcp:").rsplit(":", 1)

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
    source = Shelf({bytes([index]): bytes(1 << 20) for index in range(64)})
    async with serving(source) as server, serving(None) as client, stalling(server.describe()) as address:
        pulling = asyncio.ensure_future(client.pull(address, manifest(*range(64)), 1 << 20, LIMIT_S))
        async with asyncio.timeout(LIMIT_S):
            while not source.held:  # noqa: ASYNC110 - the other side's state
                await asyncio.sleep(0.01)
        await server.fence(0.1)
        assert source.held == 0
        pulling.cancel()
        await asyncio.gather(pulling, return_exceptions=True)


@pytest.mark.parametrize("address", ["", "tcp:", "tcp:host", "unix:/tmp/x", "tcp:host:port", "127.0.0.1:80"])
async def test_an_address_of_another_form_is_refused_by_name(address: str) -> None:
    async with serving(None) as client:
        with pytest.raises(BadInput, match="tcp:HOST:PORT"):
            await client.pull(address, manifest(0), SIZE, LIMIT_S)


async def test_a_source_that_fails_does_not_end_the_serving_of_others(caplog: pytest.LogCaptureFixture) -> None:
    source = shelf(2)
    broken = Shelf(source.content)

    async def fail(_: Manifest) -> BlockLease:
        raise RuntimeError("a fault of ours")

    broken.lease = fail  # type: ignore[method-assign]
    async with serving(broken) as server, serving(None) as client:
        with pytest.raises(Unavailable):
            await client.pull(server.describe(), manifest(0), SIZE, LIMIT_S)
        assert "a fault of ours" in caplog.text
        server.register(source)
        assert (await client.pull(server.describe(), manifest(0), SIZE, LIMIT_S)).bytes == SIZE
