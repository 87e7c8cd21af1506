"""Moving bytes between two processes: our TCP transport against a plain socket, and Mooncake's TCP where it can be loaded.

The plain socket is `sendall` and `recv_into` of the same number of bytes that lie together, into memory that was used
before; a pull checks every byte besides. The two take turns, so what else the machine does meets both: a ratio is that of
the quickest of each. Processor time is of both sides together. Between machines all goes over TLS, which has rows of its own.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

from kv_process import open_transport
from row import Row

from gyre import pki
from gyre.kv_migrate.choice import Kind, mooncake_fault
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.staging import Staging
from gyre.kv_migrate.transport import Transport

MIB = 1 << 20
SHAPES = {"64mib": (64, MIB), "1gib": (1024, MIB), "4000_blocks": (4000, MIB // 16)}
"""How many blocks of how many bytes."""
GOALS = {"64mib": 0.9, "1gib": 0.9, "4000_blocks": 0.7}
TURNS = 9

NAMES = (
    *(f"tcp_{shape}_over_socket" for shape in SHAPES),
    "tcp_cpu_over_socket",
    *(f"tls_{shape}_over_socket" for shape in SHAPES),
    *(f"mooncake_{shape}_over_socket" for shape in SHAPES),
)


def rows() -> Iterable[Row]:
    measured = asyncio.run(ratios(Kind.TCP))
    for shape, (speed, _) in measured.items():
        yield Row(f"tcp_{shape}_over_socket", speed, "x", f">= {GOALS[shape]}", speed >= GOALS[shape])
    cpu = measured["1gib"][1]
    yield Row("tcp_cpu_over_socket", cpu, "x", "<= 1.5", cpu <= 1.5)
    with tempfile.TemporaryDirectory() as folder:
        pki.init(Path(folder), "bench", 2)
        for name in ("source", "receiver"):
            pki.issue(Path(folder), name, pki.Kind.NODE, 1)
        for shape, (speed, _) in asyncio.run(ratios(Kind.TCP, folder)).items():
            yield Row(f"tls_{shape}_over_socket", speed, "x", "none", True)
    if fault := mooncake_fault():
        print(f"kv: Mooncake's TCP is left out: {fault}", file=sys.stderr)
    else:
        for shape, (speed, _) in asyncio.run(ratios(Kind.MOONCAKE_TCP)).items():
            yield Row(f"mooncake_{shape}_over_socket", speed, "x", "none", True)


@dataclass
class Turns:
    """The quickest of several, and the processor time of all."""

    quickest_s: float = float("inf")
    cpu_s: float = 0.0

    async def take(self, act: Callable[[], Awaitable[None]], cpu_s: Callable[[], float]) -> None:
        before_s, started_s = cpu_s(), perf_counter()
        await act()
        self.quickest_s = min(self.quickest_s, perf_counter() - started_s)
        self.cpu_s += cpu_s() - before_s


async def ratios(kind: Kind, certificates: str = "") -> dict[str, tuple[float, float]]:
    """By shape: the transport's speed over the socket's, and its processor time over that of the socket."""
    argv = (sys.executable, str(Path(__file__).with_name("kv_process.py")), kind, certificates)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:
        assert source.stdin is not None
        assert source.stdout is not None
        inward, outward = source.stdin, source.stdout

        def cpu_s() -> float:
            print(file=inward, flush=True)
            return process_time() + float(outward.readline())

        port, address, epoch = json.loads(outward.readline())
        transport = await open_transport(kind, certificates, "receiver")
        staging = Staging(MIB << 10)
        found: dict[str, tuple[float, float]] = {}
        with socket.create_connection(("127.0.0.1", port)) as plain:
            for shape, (count, size) in SHAPES.items():
                socket_turns, transport_turns = Turns(), Turns()
                for turn in range(-1, TURNS):
                    if turn == 0:  # what came before touched the memory
                        socket_turns, transport_turns = Turns(), Turns()
                    await socket_turns.take(lambda: copy(plain, staging.view[: count * size]), cpu_s)  # noqa: B023
                    await transport_turns.take(lambda: pull(transport, address, epoch, count, size, staging), cpu_s)  # noqa: B023
                found[shape] = (
                    socket_turns.quickest_s / transport_turns.quickest_s,
                    transport_turns.cpu_s / socket_turns.cpu_s,
                )
        await transport.close()
        inward.close()
        return found


async def copy(plain: socket.socket, memory: memoryview) -> None:
    plain.sendall(len(memory).to_bytes(8, "big"))
    filled = 0
    while filled < len(memory):
        filled += plain.recv_into(memory[filled:])


async def pull(transport: Transport, address: str, epoch: int, count: int, size: int, staging: Staging) -> None:
    names = tuple(number.to_bytes(4, "big") for number in range(count))
    wanted = Manifest(f"{perf_counter()}", epoch, "model", 1, str(size), names)
    received = await transport.pull(address, wanted, size, staging, 120.0)
    assert len(received.blocks) == count
