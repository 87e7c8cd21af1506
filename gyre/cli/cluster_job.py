"""A cluster's job, reached from any machine: its records by way of etcd, and its nodes by their ports.

The person's certificate opens both. Each node is asked over one encrypted connection, as nodes ask each other
(gyre.actors.peers); there is no job folder, and nothing of it is looked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from gyre.actors.messages import Place
from gyre.actors.peers import Peers, node_of
from gyre.actors.reference import LocalRef
from gyre.actors.remote import RemoteRef
from gyre.cli.cluster_file import ClusterFile
from gyre.errors import BadInput, GyreError, NotLetIn, Refused, Unavailable
from gyre.store.records import ChildRecord, CurrentJobRecord, Keys, LeaderRecord, NodeRecord, current_key
from gyre.store.typed import TypedStore

R = TypeVar("R")

REACH_S = 3.0
"""For one node to let us in, before the next is tried."""


class NoJob(Unavailable):
    """The cluster has had none yet."""


@dataclass(frozen=True)
class ClusterJob:
    """The job that a cluster works on, or has worked on last."""

    file: ClusterFile

    async def current(self, store: TypedStore) -> CurrentJobRecord:
        """Raises NoJob, or Unavailable."""
        found = await store.get(current_key(self.file.cluster), CurrentJobRecord)
        if found is None:
            raise NoJob(f"the cluster {self.file.cluster} has no job yet; gyrectl job submit gives it one")
        return found.record

    async def nodes(self, store: TypedStore, keys: Keys) -> list[NodeRecord]:
        """Those that may be asked, in the order in which they are. Raises BadInput for one that is named and not there."""
        leader = await store.get(keys.leader, LeaderRecord)
        leads = leader.record.node if leader else None
        there = [item.record for item in (await store.range(keys.nodes, NodeRecord)).items if item.record.address]
        wanted = self.file.node
        found = [node for node in there if wanted in (None, node.node)]
        if not found and there:
            names = ", ".join(node.node for node in there)
            raise BadInput("cluster.node", wanted, f"it is not there; one of {names}")
        return sorted(found, key=lambda node: (node.node != leads, node.node))

    async def processes(self, store: TypedStore, keys: Keys) -> list[Place]:
        """The gyreds of those nodes, each with its children that have told where they are reached."""
        children = [item.record for item in (await store.range(keys.children, ChildRecord)).items]
        return [
            place
            for node in await self.nodes(store, keys)
            for place in (
                Place(node.node, node.address),
                *(Place(f"{node.node}/{each.name}", each.address) for each in children if each.node == node.node),
            )
        ]

    @asynccontextmanager
    async def connections(self) -> AsyncGenerator[Peers]:
        """From a person to nodes: nothing is served. Raises BadInput for certificates that cannot be used."""
        async with Peers(_person(self.file), self.file.credentials, nobody) as peers:
            yield peers

    @asynccontextmanager
    async def gyred(self, nodes: Sequence[NodeRecord]) -> AsyncGenerator[RemoteRef]:
        """The first of the nodes that lets us in. Raises NotLetIn or Unavailable: why the first one does not."""
        if not nodes:
            raise Unavailable(f"no node of the cluster {self.file.cluster} works on a job just now")
        async with self.connections() as peers:
            whys: list[GyreError] = []
            for node in nodes:
                ref = peers.ref(node.node, node.address, "node")
                try:
                    await ref.ready(REACH_S)
                except (NotLetIn, Unavailable) as error:
                    whys.append(error)
                else:
                    yield ref
                    return
            also = f" (nor does another of the {len(nodes)} nodes)" if len(nodes) > 1 else ""
            raise type(whys[0])(f"{nodes[0].node} does not answer: {whys[0]}{also}")

    async def ask_all(
        self, places: Sequence[Place], message: object, limit_s: float, reply: type[R]
    ) -> dict[str, R | GyreError]:
        """What each process answers, or why it does not, by its name."""
        async with self.connections() as peers:

            async def ask(place: Place) -> R | GyreError:
                actor = "node" if place.process == node_of(place.process) else ""
                try:
                    return await peers.ref(place.process, place.address, actor).ask(message, limit_s, reply)
                except GyreError as error:
                    return error

            answers = await asyncio.gather(*map(ask, places))
        return {place.process: answer for place, answer in zip(places, answers, strict=True)}


def _person(file: ClusterFile) -> str:
    try:
        from gyre import pki
    except ImportError:
        raise Unavailable("certificates need the package cryptography: pip install 'gyre[cluster]'") from None
    return pki.read(file.credentials.certificate).name


def nobody(actor: str) -> LocalRef:
    raise Refused(f"{actor!r} is not here: gyrectl serves nothing")
