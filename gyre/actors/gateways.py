"""The gateways of all nodes, as a cell speaks to them: each is told of its engine, and each is asked to leave it.

A node that is gone is not waited for. Its gateway may live on and still send calls; whoever takes an engine's memory away
ends those at the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gyre.actors.messages import DrainEngine, DrainReport, EngineRoute, Ok, RouteChanged
from gyre.actors.runtime import Ref
from gyre.actors.site import Site
from gyre.errors import Unavailable
from gyre.ids import NodeId

T = TypeVar("T")

STAGE_S = 600.0
RETRY_S = 0.2


async def insist(
    of: Ref, message: object, reply: type[T], within_s: float, wanted: Callable[[], bool] = lambda: True
) -> T | None:
    """Ask until there is an answer: an actor that failed is there again in a moment. For what may be repeated.

    None when it is not wanted any more. Raises TimeoutError.
    """
    async with asyncio.timeout(within_s):
        while wanted():
            try:
                return await of.ask(message, within_s, reply)
            except Unavailable:
                await asyncio.sleep(RETRY_S)
    return None


class Gateways:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._told: dict[NodeId, int] = {}
        """By node, the revision of its record when it was last told: another one says that it has joined anew."""

    async def route(self, route: EngineRoute) -> None:
        """Until every gateway goes by it."""
        self._told = self._there()
        message = RouteChanged(route)
        await asyncio.gather(insist(self._site.gateway, message, Ok, STAGE_S), *self._others(message, Ok))

    async def drain(self, order: DrainEngine) -> tuple[DrainReport, bool]:
        """Until no gateway that is there has a request on the engine; what they had there, together.

        Beside it: whether one has gone meanwhile, whose requests may still be there.
        """
        site = self._site
        own, others = await asyncio.gather(
            site.gateway.ask(order, STAGE_S, DrainReport), asyncio.gather(*self._others(order, DrainReport))
        )
        reports = [own, *(report for report in others if report is not None)]
        together = DrainReport(
            requests=sum(report.requests for report in reports),
            moved_blocks=sum(report.moved_blocks for report in reports),
            moved_bytes=sum(report.moved_bytes for report in reports),
            stop_s=max(report.stop_s for report in reports),
            move_s=max(report.move_s for report in reports),
        )
        return together, len(reports) <= len(others)

    def joined(self) -> bool:
        """Whether a node is there that was not told, or we are there anew, so that others may have given us up."""
        return any(revision != self._told.get(node) for node, revision in self._there().items())

    def _others(self, message: object, reply: type[T]) -> list[Awaitable[T | None]]:
        site = self._site

        def told(node: NodeId) -> Awaitable[T | None]:
            return insist(site.on(node, "gateway"), message, reply, STAGE_S, lambda: node in site.directory.nodes)

        return [told(node) for node in self._there() if node != site.node]

    def _there(self) -> dict[NodeId, int]:
        return {node: item.mod_revision for node, item in self._site.directory.nodes.items()}
