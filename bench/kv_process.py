"""The source of bench_kv in a process of its own: `kv_process.py KIND...`, each a transport, beside a plain socket.

Writes one line: the plain socket's port, then address and epoch of each transport. Then for each line that it reads, the
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

from gyre.kv_migrate.choice import Choice, Kind
from gyre.kv_migrate.greeting import SharedSecret
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.mooncake import MooncakeTransport
from gyre.kv_migrate.tcp import TcpTransport
from gyre.kv_migrate.transport import BlockLease, Transport

SECRET = SharedSecret(b"the secret of a benchmark")
MEMORY_BYTES = 1 << 30
STEP = 7919
"""A prime: blocks that follow each other in a manifest lie far apart in memory."""


async def open_transport(kind: Kind) -> Transport:
    if kind is Kind.TCP:
        return await TcpTransport.open(SECRET)
    return await MooncakeTransport.open(Choice(kind, "asked for"), SECRET)


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
    transports = [await open_transport(Kind(kind)) for kind in sys.argv[1:]]
    for transport in transports:
        transport.register(memory)
    told = [[transport.describe(), transport.epoch] for transport in transports]
    print(json.dumps([listener.getsockname()[1], told]), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(sum(os.times()[:2]), flush=True)
    for transport in transports:
        await transport.close()


if __name__ == "__main__":
    asyncio.run(main())
