"""From what is configured to an open transport."""

from __future__ import annotations

import asyncio

from gyre.kv_migrate.choice import Kind, choose, look
from gyre.kv_migrate.mooncake import MooncakeTransport
from gyre.kv_migrate.stream import Greeting
from gyre.kv_migrate.tcp import TcpTransport
from gyre.kv_migrate.transport import Transport


async def open_transport(
    wanted: str, greeting: Greeting, host: str, silence_s: float | None = None, epoch: int | None = None
) -> tuple[Transport, str]:
    """The transport that `wanted` ("auto" or a kind) means on this host, and why it is that one.

    With `silence_s`, a source from which nothing comes for so long is given up before the deadline. `epoch` is that of a
    source whose blocks are good whichever process gives them.

    Raises BadInput when it cannot be had here, Unavailable when it cannot be started.
    """
    choice = choose(wanted, await asyncio.to_thread(look, wanted))
    if choice.kind is Kind.TCP:
        return await TcpTransport.open(greeting, host, silence_s=silence_s, epoch=epoch), choice.reason
    transport = await MooncakeTransport.open(choice, greeting, host, silence_s=silence_s, epoch=epoch)
    return transport, choice.reason
