"""Peers for the transports' tests: blocks on a shelf, in this process or in one of its own that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gyre import pki
from gyre.credentials import Credentials
from gyre.errors import Refused
from gyre.kv_migrate.choice import Choice, Kind
from gyre.kv_migrate.greeting import Certificates, SharedSecret
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.mooncake import MooncakeTransport
from gyre.kv_migrate.staging import Staging
from gyre.kv_migrate.stream import Greeting
from gyre.kv_migrate.tcp import TcpTransport
from gyre.kv_migrate.transport import BlockLease, Received, Transport
from kv_migrate import mooncake_library

SECRET = b"a secret of the engines"
SIZE = 4096
LIMIT_S = 60.0
MODEL = "the weights"


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

    async def is_free(self) -> None:
        """Until nobody holds a block."""
        async with asyncio.timeout(LIMIT_S):
            while self.held:
                self.ended.clear()
                await self.ended.wait()


@dataclass
class ShelfLease:
    shelf: Shelf
    blocks: Sequence[memoryview | None]
    over: bool = False

    def intact(self, number: int) -> bool:
        return True

    def end(self) -> None:
        if not self.over:
            self.over = True
            self.shelf.held -= 1
            self.shelf.ended.set()


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def shelf(count: int, size: int = SIZE) -> Shelf:
    """Equal for equal arguments, in whatever process."""
    return Shelf({name(index): random.Random(index).randbytes(size) for index in range(count)})


def manifest(epoch: int, *numbers: int, version: int = 1, transfer: str = "") -> Manifest:
    return Manifest(
        transfer or os.urandom(8).hex(), epoch, MODEL, version, "layout", tuple(name(number) for number in numbers)
    )


async def open_transport(kind: Kind, greeting: Greeting) -> Transport:
    if kind is Kind.TCP:
        return await TcpTransport.open(greeting)
    return await MooncakeTransport.open(Choice(kind, "asked for"), greeting)


def need(kind: Kind) -> None:
    """Skip the test, and say what it lacks, where this machine cannot run it."""
    if kind is not Kind.TCP and mooncake_library.why_not():
        pytest.skip(mooncake_library.why_not())


@asynccontextmanager
async def serving(
    source: Shelf | None, greeting: Greeting | None = None, kind: Kind = Kind.TCP
) -> AsyncIterator[Transport]:
    transport = await open_transport(kind, greeting or SharedSecret(SECRET))
    try:
        if source is not None:
            transport.register(source)
        yield transport
    finally:
        await transport.close()


async def pull(
    client: Transport,
    address: str,
    wanted: Manifest,
    size: int = SIZE,
    deadline_s: float = LIMIT_S,
    staging: Staging | None = None,
) -> Received:
    return await client.pull(address, wanted, size, staging or Staging(len(wanted.blocks) * size), deadline_s)


async def begun(pulling: asyncio.Future[Received], staging: Staging) -> None:
    """Until the first bytes of the pull are here."""
    while not staging.view[0]:
        assert not pulling.done(), pulling
        await asyncio.sleep(0)


def right(received: Received, size: int = SIZE) -> list[int]:
    """The numbers of the blocks that came; each has to have its own bytes."""
    for key, data in received.blocks:
        assert bytes(data) == random.Random(int.from_bytes(key, "big")).randbytes(size), f"block {key.hex()} is wrong"
    return [int.from_bytes(key, "big") for key, _ in received.blocks]


def certificates(folder: Path, *names: str, kind: pki.Kind = pki.Kind.NODE) -> list[Certificates]:
    """One greeting a name, all of one authority in `folder`."""
    if not (folder / "ca.pem").exists():
        pki.init(folder, "lab", 30)
    for each in names:
        pki.issue(folder, each, kind, 10)
    return [Certificates(Credentials(folder / "ca.pem", folder / f"{n}.pem", folder / f"{n}.key")) for n in names]


@asynccontextmanager
async def between(address: str, change: Callable[[bytes, int], bytes | None]) -> AsyncIterator[str]:
    """A man in the middle: `change(data, offset)` sees what the server sends on a connection; None cuts that connection."""
    kind, host, port = address.split(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except ConnectionError:
            writer.transport.abort()
            return

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
                await writer.drain()

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
        yield f"{kind}:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@dataclass(frozen=True)
class SourceProcess:
    """A peer of its own with `count` blocks of `size` bytes."""

    process: subprocess.Popen[str]
    address: str
    epoch: int

    def ask(self, word: str) -> str:
        """`held`: how many transfers hold blocks. `lie`: from now on every third block is not what its checksum says."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(word, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    async def is_free(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.ask("held") != "0":  # noqa: ASYNC110 - another process' state
                await asyncio.sleep(0.02)


@contextmanager
def source_process(count: int, size: int = SIZE, kind: Kind = Kind.TCP, port: int = 0) -> Iterator[SourceProcess]:
    argv = (sys.executable, "-m", "kv_migrate.source", kind, str(count), str(size), str(port))
    places = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            address, epoch = json.loads(process.stdout.readline())
            yield SourceProcess(process, address, epoch)
        finally:
            process.kill()
            process.wait(LIMIT_S)
