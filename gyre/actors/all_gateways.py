"""The gateways of all nodes as one: what the policy and the operator look at."""

from __future__ import annotations

import asyncio

from gyre.actors.measures import together
from gyre.actors.messages import GatewayStatus, GetGatewayStatus
from gyre.actors.site import Site
from gyre.errors import GyreError
from gyre.ids import NodeId

ASK_S = 2.0


class AllGateways:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._last: dict[NodeId, GatewayStatus] = {}

    async def look(self) -> GatewayStatus | None:
        """As each node last heard of its own; of one that does not answer, what was last heard from it. None: nobody has."""
        site = self._site
        others = [node for node in site.directory.nodes if node != site.node]
        found = await asyncio.gather(*(self._ask(node) for node in others))
        self._last = {node: status for node, status in zip(others, found, strict=True) if status is not None}
        parts = [*([site.gateway_status] if site.gateway_status else []), *self._last.values()]
        if len(parts) > 1:
            return together(parts)
        return parts[0] if parts else None

    async def _ask(self, node: NodeId) -> GatewayStatus | None:
        try:
            return await self._site.on(node, "node").ask(GetGatewayStatus(), ASK_S, GatewayStatus)
        except GyreError:
            return self._last.get(node)
