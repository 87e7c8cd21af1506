"""`python -m kv_migrate.source KIND COUNT SIZE PORT`: a peer with blocks, in a process that tests may kill and stop."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace

import xxhash

from gyre.kv_migrate import serving
from gyre.kv_migrate.choice import Choice, Kind
from gyre.kv_migrate.greeting import SharedSecret
from gyre.kv_migrate.mooncake import MooncakeTransport
from gyre.kv_migrate.tcp import TcpTransport
from kv_migrate.peers import SECRET, shelf


async def main() -> None:
    kind, count, size, port = Kind(sys.argv[1]), *map(int, sys.argv[2:5])
    greeting = SharedSecret(SECRET)
    if kind is Kind.TCP:
        transport = await TcpTransport.open(greeting, port=port)
    else:
        transport = await MooncakeTransport.open(Choice(kind, "asked for"), greeting, port=port)
    source = shelf(count, size)
    transport.register(source)
    print(json.dumps([transport.describe(), transport.epoch]), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().strip():
        if line == "lie":
            _lie_about({xxhash.xxh3_64_digest(block) for block in list(source.content.values())[::3]})
        print(source.held, flush=True)


def _lie_about(blocks: set[bytes]) -> None:
    def digest(data: memoryview) -> bytes:
        truth = xxhash.xxh3_64_digest(data)
        return truth[::-1] if truth in blocks else truth

    serving.xxhash = SimpleNamespace(xxh3_64_digest=digest)


if __name__ == "__main__":
    asyncio.run(main())
