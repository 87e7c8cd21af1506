"""A lease of etcd that knows until when it is proven."""

from __future__ import annotations

import asyncio
import math
import secrets
from dataclasses import dataclass

from gyre.errors import Unavailable
from gyre.store.etcd.api import message_class, method
from gyre.store.etcd.client import CALL_S, Answered, EtcdClient
from gyre.store.etcd.receipts import grant
from gyre.store.etcd.status import Failure
from gyre.store.protocol import LeaseLost, StoreClosed

_LEAST_S = 0.25
"""One try has this long even when the lease's time is over: etcd may have held it longer."""


async def granted(client: EtcdClient, ttl_s: float) -> EtcdLease:
    """A lease of `ttl_s` or what etcd makes of it: whole seconds, and more than its own elections take."""
    lease = secrets.randbits(62) + 1
    asked_s = asyncio.get_running_loop().time()
    granted_s = await grant(client, message_class("LeaseGrantRequest")(TTL=math.ceil(ttl_s), ID=lease))
    return EtcdLease(client, lease, float(granted_s), asked_s + granted_s)


@dataclass
class EtcdLease:
    """The lease ends at `proven_until_s` of the loop's clock, as far as we know: the last renewal that etcd confirmed
    began its time no earlier than we asked for it. etcd may hold it longer; nobody may rely on that.
    """

    client: EtcdClient
    id: int
    ttl_s: float
    proven_until_s: float
    _lost: bool = False

    async def keep_alive(self) -> float:
        """Begin the ttl anew; the seconds left.

        Raises Unavailable when etcd did not confirm it now but may yet, and LeaseLost, for good, when the lease is gone
        or its time has passed without a confirmation.
        """
        loop = asyncio.get_running_loop()
        try:
            if self._lost:
                raise LeaseLost(self.id)
            return await self.client.patiently(self._renew, self.proven_until_s - loop.time())
        except (LeaseLost, StoreClosed) as error:
            self._lost = True
            raise LeaseLost(self.id) from error
        except Unavailable as error:
            if loop.time() < self.proven_until_s:
                raise
            self._lost = True
            raise LeaseLost(self.id, f"its time has passed and etcd has not confirmed it ({error})") from error

    async def revoke(self) -> None:
        self._lost = True
        try:
            await self.client.ask(method("Lease", "LeaseRevoke"), message_class("LeaseRevokeRequest")(ID=self.id))
        except Answered as error:
            if error.kind is not Failure.LEASE:
                raise

    async def _renew(self) -> float:
        """One try on one endpoint."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        request = message_class("LeaseKeepAliveRequest")(ID=self.id)
        timeout_s = min(CALL_S, max(_LEAST_S, self.proven_until_s - asked_s))
        answer = await self.client.ask_once(method("Lease", "LeaseKeepAlive"), request, timeout_s)
        if answer.TTL <= 0:
            raise LeaseLost(self.id)
        self.proven_until_s = asked_s + answer.TTL
        return self.proven_until_s - loop.time()
