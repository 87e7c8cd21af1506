"""A snapshot of 64 MiB from one core to one other node and to eight, each a process of its own, over TLS.

The two take turns, and a ratio is that of the quickest of each. All nodes share this machine: on fewer than nine cores the
eight would wait for a processor, which nodes of their own would not. So each is a host with a cable of its own (a network
namespace), which carries less than the machine can. Without the cables there is the processor time of the busiest node,
of nine against the busiest of two: the time can come to that where each has a processor. Bytes that leave the core are
in copies of the snapshot.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import IO

from row import Row

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from cluster.netns import Host, Network, why_not

from gyre import pki
from gyre.train.snapshot import snapshot_path, write_snapshot

PEERS = 8
SIZE_BYTES = 64 << 20
TURNS = 5
MBIT_S = 100
"""Of each cable: a copy takes 5.4 s on it, and less than half a second of processor time."""

NAMES = ("snapshot_8_peers_over_1", "snapshot_busiest_cpu_8_over_1", "snapshot_copies_from_core")


@dataclass
class Node:
    name: str
    folder: Path
    inward: IO[str]
    outward: IO[str]
    address: str = ""

    def ask(self, version: int, digest: str, sources: dict[str, str]) -> None:
        print(json.dumps([version, digest, sources]), file=self.inward, flush=True)

    def answer(self) -> tuple[float, int]:
        """Processor seconds and bytes sent, when it has what it was asked for."""
        cpu_s, sent_bytes = json.loads(self.outward.readline())
        return cpu_s, sent_bytes


@dataclass(frozen=True)
class Spread:
    seconds: float
    busiest_cpu_s: float
    copies: float


def rows() -> Iterable[Row]:
    if unable := why_not():
        print(f"bench: snapshot_8_peers_over_1 is not measured: {unable}", file=sys.stderr)
    else:
        with Network.made([f"n{number}" for number in range(PEERS + 1)], MBIT_S) as network:
            one, many = spreads(2, list(network.hosts.values()))
        ratio = min(each.seconds for each in many) / min(each.seconds for each in one)
        yield Row("snapshot_8_peers_over_1", ratio, "x", "<= 2.5", ratio <= 2.5)
    one, many = spreads(TURNS)
    cpu = min(each.busiest_cpu_s for each in many) / min(each.busiest_cpu_s for each in one)
    copies = max(each.copies for each in many)
    yield Row("snapshot_busiest_cpu_8_over_1", cpu, "x", "<= 2.5", cpu <= 2.5)
    yield Row("snapshot_copies_from_core", copies, "copies", "<= 2", copies <= 2)


def spreads(turns: int, hosts: Sequence[Host] = ()) -> tuple[list[Spread], list[Spread]]:
    """From the core to one node, and to all; each node on its host where there are hosts."""
    one: list[Spread] = []
    many: list[Spread] = []
    with TemporaryDirectory(prefix="gyre-bench-") as place, ExitStack() as stack:
        nodes = [start(stack, Path(place), number, hosts) for number in range(PEERS + 1)]
        for node in nodes:
            node.address = node.outward.readline().strip()
        for turn in range(turns + 1):
            found = spread(nodes, nodes[1:2], 2 * turn), spread(nodes, nodes[1:], 2 * turn + 1)
            if turn:  # the first made connections, and touched what they need
                one.append(found[0])
                many.append(found[1])
    return one, many


def start(stack: ExitStack, place: Path, number: int, hosts: Sequence[Host]) -> Node:
    """The first is the core."""
    authority = place / "pki"
    if not number:
        authority.mkdir()
        pki.init(authority, "bench", 30)
    name = f"n{number}"
    pki.issue(authority, name, pki.Kind.NODE, 10)
    folder = place / name
    folder.mkdir()
    before, address = (hosts[number].before, hosts[number].address) if hosts else ((), "127.0.0.1")
    program = str(Path(__file__).with_name("snapshot_process.py"))
    argv = (*before, sys.executable, program, str(authority), name, str(folder), address)
    process = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.stdin.close)
    return Node(name, folder, process.stdin, process.stdout)


def spread(nodes: list[Node], peers: list[Node], version: int) -> Spread:
    """Have the core, the first of `nodes`, hold a new version, and `peers` fetch it. It is nowhere when this returns."""
    core = nodes[0]

    def fill(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(random.Random(version).randbytes(SIZE_BYTES))
        (folder / "config.json").write_text("{}")

    digest = write_snapshot(snapshot_path(core.folder, version), version, fill)
    before = used(nodes)
    addresses = {node.name: node.address for node in (core, *peers)}
    started_s = perf_counter()
    for peer in peers:
        peer.ask(version, digest, {name: at for name, at in addresses.items() if name != peer.name})
    for peer in peers:
        peer.answer()
    seconds = perf_counter() - started_s
    after = used(nodes)
    for node in nodes:
        shutil.rmtree(snapshot_path(node.folder, version), ignore_errors=True)
    busiest_cpu_s = max(now[0] - then[0] for now, then in zip(after, before, strict=True))
    return Spread(seconds, busiest_cpu_s, (after[0][1] - before[0][1]) / SIZE_BYTES)


def used(nodes: list[Node]) -> list[tuple[float, int]]:
    for node in nodes:
        node.ask(0, "", {})
    return [node.answer() for node in nodes]
