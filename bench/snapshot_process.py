"""A node of bench_snapshot in a process of its own: `snapshot_process.py PKI NAME FOLDER HOST`, over the product's own service.

Writes its address. Then for each line that it reads, [version, digest, {name: address}], it fetches that snapshot from those
nodes, unless there are none, and writes what it has used and sent since it began: processor seconds and bytes. It ends
with its input.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from time import process_time

from gyre.actors.peers import Peers
from gyre.actors.runtime import ActorSystem
from gyre.actors.snapshot_fetch import fetch
from gyre.actors.snapshot_folders import SnapshotFolders
from gyre.actors.snapshot_service import Snapshots, SnapshotService
from gyre.credentials import Credentials


async def main(pki: Path, name: str, folder: Path, host: str) -> None:
    snapshots = Snapshots(SnapshotFolders(folder))
    async with ActorSystem.running(name) as system:
        service = system.spawn("snapshots", lambda: SnapshotService(snapshots))
        credentials = Credentials(pki / "ca.pem", pki / f"{name}.pem", pki / f"{name}.key")
        async with Peers(name, credentials, lambda _: service, f"tls:{host}:0") as peers:
            print(peers.address, flush=True)
            reader = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            while line := await reader.readline():
                version, digest, others = json.loads(line)
                if others:
                    sources = [(other, peers.ref(other, address, "snapshots")) for other, address in others.items()]
                    await fetch(name, snapshots, version, digest, sources)
                print(json.dumps([process_time(), snapshots.sent_bytes]), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)  # that two have reached for each other at once is told, and meant to be
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]))
