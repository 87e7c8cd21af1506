"""A child process among those of other nodes: it serves its actor to them, and reaches theirs.

Gradient sums and lineages go from child to child, and not through the light gyred. Where the process is reached by others
it leaves in a file, which its gyred reads and publishes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from gyre.actors.address import TcpAddress
from gyre.actors.messages import Place
from gyre.actors.peers import Peers
from gyre.actors.remote import RemoteRef, connect
from gyre.actors.runtime import LocalRef
from gyre.credentials import Credentials
from gyre.errors import Unavailable


@dataclass(frozen=True)
class Far:
    """What a child is told of it: its own name among processes (`node/child`), its certificates, where to listen."""

    process: str
    ca: str
    certificate: str
    key: str
    host: str
    file: str

    def to_plain(self) -> dict[str, str]:
        return asdict(self)

    @property
    def credentials(self) -> Credentials:
        return Credentials(Path(self.ca), Path(self.certificate), Path(self.key))


@asynccontextmanager
async def far_side(far: Far | None, ref: LocalRef) -> AsyncGenerator[Peers | None]:
    """Serve `ref` to other nodes' processes. Nothing is served, and nobody reached, where a node is alone."""
    if far is None:
        yield None
        return
    async with Peers(far.process, far.credentials, lambda _: ref, str(TcpAddress(far.host, 0, "tls"))) as peers:
        file = Path(far.file)
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps({"address": peers.address}), encoding="utf-8")
        fresh.replace(file)
        yield peers


def read_address(file: Path) -> str:
    """What a child has left there; empty while it has not."""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["address"])
    except (OSError, ValueError, KeyError):
        return ""


class Ways:
    """The references to other child processes, by place; one connection each."""

    def __init__(self, secret: str, peers: Peers | None) -> None:
        self._secret = secret
        self._peers = peers
        self._near: dict[str, RemoteRef] = {}

    def to(self, place: Place) -> RemoteRef:
        """Raises Unavailable for another node's process where we are alone."""
        if place.process:
            if self._peers is None:
                raise Unavailable(f"{place.process} is another node's, and this node is alone")
            return self._peers.ref(place.process, place.address, "")
        if place.address not in self._near:
            self._near[place.address] = connect(place.address, self._secret)
        return self._near[place.address]

    async def close(self) -> None:
        for ref in self._near.values():
            await ref.close()
