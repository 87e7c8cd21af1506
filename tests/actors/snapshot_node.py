"""A node that serves a snapshot, as a process that kills itself in the middle of it.

    python -m tests.actors.snapshot_node PKI NAME SNAPSHOTS_DIR CHUNKS
    -> its address, one line

It sends so many chunks, and is killed when it is asked for one more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from gyre.actors.messages_snapshots import Chunk, GetChunk
from gyre.actors.peers import Peers
from gyre.actors.runtime import ActorSystem, handles
from gyre.actors.snapshot_folders import SnapshotFolders
from gyre.actors.snapshot_service import Snapshots, SnapshotService
from gyre.credentials import Credentials


class Dying(SnapshotService):
    def __init__(self, snapshots: Snapshots, chunks: int) -> None:
        super().__init__(snapshots)
        self._left = chunks

    @handles(GetChunk)
    async def one_chunk(self, message: GetChunk) -> Chunk:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return await self.chunk(message)


async def main(folder: Path, name: str, snapshots_dir: Path, chunks: int) -> None:
    async with ActorSystem.running(name) as system:
        ref = system.spawn("snapshots", lambda: Dying(Snapshots(SnapshotFolders(snapshots_dir)), chunks))
        credentials = Credentials(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
        async with Peers(name, credentials, lambda _: ref, "tls:127.0.0.1:0") as peers:
            print(peers.address, flush=True)
            await asyncio.sleep(120)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
