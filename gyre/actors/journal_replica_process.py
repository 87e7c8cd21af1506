"""The process that keeps copies of another node's journals (docs/job-file.md, `[journal]`).

    python -m gyre.actors.journal_replica_process ADDRESS SECRET_FILE FOLDER

It listens at ADDRESS (`tcp:127.0.0.1:7070`) for the gateway of the job whose secret SECRET_FILE holds, and writes to FOLDER,
which is laid out as a gateway's own journal folder. Exit code 2: what it was told cannot be gone by.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

from gyre.actors.messages import Ok, Ping
from gyre.actors.remote import serve
from gyre.actors.runtime import Actor, ActorSystem, handles
from gyre.errors import GyreError
from gyre.proxy.replication import AskHeld, CopyJournal, Held, JournalReplica, PutAway


class ReplicaKeeper(Actor):
    """The copies as the gateway reaches them. Messages of one journal come one after another, by the gateway's doing."""

    def __init__(self, replica: JournalReplica) -> None:
        self._replica = replica

    @handles(Ping, concurrent=True)
    async def ping(self, _: Ping) -> Ok:
        return Ok()

    @handles(AskHeld, concurrent=True)
    async def held(self, message: AskHeld) -> Held:
        return await asyncio.to_thread(self._replica.held, message)

    @handles(CopyJournal, concurrent=True)
    async def copy(self, message: CopyJournal) -> Held:
        return await asyncio.to_thread(self._replica.copy, message)

    @handles(PutAway, concurrent=True)
    async def put_away(self, message: PutAway) -> Held:
        return await asyncio.to_thread(self._replica.put_away, message)


async def run(address: str, secret: str, folder: Path) -> None:
    """Serve until SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with ActorSystem.running("journal replica") as system:
        keeper = system.spawn("keeper", lambda: ReplicaKeeper(JournalReplica(folder)))
        async with serve(keeper, address, secret) as server:
            print(server.address, flush=True)
            await stopped.wait()


def main() -> int:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    if len(sys.argv) != 4:
        print("usage: python -m gyre.actors.journal_replica_process ADDRESS SECRET_FILE FOLDER", file=sys.stderr)
        return 2
    address, secret_file, folder = sys.argv[1:]
    try:
        secret = Path(secret_file).read_text(encoding="ascii").strip()
        asyncio.run(run(address, secret, Path(folder)))
    except (GyreError, OSError, UnicodeDecodeError) as error:
        print(f"gyre.journal_replica: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
