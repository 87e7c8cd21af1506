"""The source of bench_kv in a process of its own: `kv_process.py KIND PKI`, a transport beside a plain socket.

With PKI, a folder, both sides have certificates from there and all goes over TLS, as between machines; else a shared secret.

Writes one line: the plain socket's port, then address and epoch of the transport. Then for each line that it reads, the
processor seconds that it and its children have used. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre.credentials import Credentials
from gyre.kv_migrate.choice import Choice, Kind
from gyre.kv_migrate.greeting import Certificates, SharedSecret
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.mooncake import MooncakeTransport
from gyre.kv_migrate.tcp import TcpTransport
from gyre.kv_migrate.transport import BlockLease, Transport

SECRET = SharedSecret(b"the secret of a benchmark")
MEMORY_BYTES = 1 << 30
STEP = 7919
"""A prime: blocks that follow each other in a manifest lie far apart in memory."""


async def open_transport(kind: Kind, pki: str, name: str) -> Transport:
    """That of peer `name`, which has a certificate in the folder `pki`; without one, the secret."""
    folder = Path(pki)
    credentials = Credentials(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
    greeting = Certificates(credentials) if pki else SECRET
    if kind is Kind.TCP:
        return await TcpTransport.open(greeting)
    return await MooncakeTransport.open(Choice(kind, "asked for"), greeting)


@dataclass
class Lease:
    blocks: Sequence[memoryview]

    def intact(self, number: int) -> bool:
        return True

    def end(self) -> None:
        pass


class Memory:
    """Block `n` of a layout of SIZE bytes lies at a place of its own; a name is the number."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(os.urandom(1 << 20)) * (MEMORY_BYTES >> 20))

    async def lease(self, manifest: Manifest) -> BlockLease:
        size = int(manifest.layout)
        blocks = MEMORY_BYTES // size
        places = [int.from_bytes(name, "big") * STEP % blocks * size for name in manifest.blocks]
        return Lease([self.view[place : place + size] for place in places])


def serve_plainly(listener: socket.socket, memory: memoryview) -> None:
    """As many bytes as the peer asks for, again and again."""
    connection, _ = listener.accept()
    while asked := connection.recv(8):
        connection.sendall(memory[: int.from_bytes(asked, "big")])


async def main() -> None:
    memory = Memory()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_plainly, args=(listener, memory.view), daemon=True).start()
    kind, pki = sys.argv[1:]
    transport = await open_transport(Kind(kind), pki, "source")
    transport.register(memory)
    print(json.dumps([listener.getsockname()[1], transport.describe(), transport.epoch]), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(sum(os.times()[:2]), flush=True)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main())
