"""Run in a network namespace with a listening socket of another: who connects there reaches a server that is here.

relay.py FD HOST PORT
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while some := await reader.read(1 << 16):
            writer.write(some)
            await writer.drain()
    writer.close()


async def main(listening: socket.socket, host: str, port: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pass_on(reader, there[1]), _pass_on(there[0], writer))

    async with await asyncio.start_server(serve, sock=listening) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
