"""Requests that an engine may still sample although nobody hears it any more, and how that is found out.

A request has left an engine when the engine's own answer has ended, when the engine has taken the order to let go of it,
or when nothing listens where the engine was. Of an engine that cannot be reached none of that is known: it may be cut off,
and sample on. So it is asked until it answers, or until routes name another engine of its cell, which has ended it before.
Until then it gets no request, and its cell is not empty; the call goes on elsewhere when the engine, which hears nothing of
us, has ended the request by itself (gyre.engine.unheard).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from gyre.engine.client import EngineClient
from gyre.engine.records import EngineAbsent, EngineRefused
from gyre.errors import GyreError

EVERYTHING = "*"
"""Stands for all requests of an engine: those of a gateway that died are not known one by one."""
LEFT_S = 15.0
"""After this an engine that cannot be reached has ended by itself what it sampled for us."""
RETRY_S = 0.25
_ABORT_S = 1.0
_PATIENT_ABORT_S = 5.0
_UNKNOWN = (404, 405, 501)
"""Statuses of what stands for an engine and does not take this order."""
_log = logging.getLogger(__name__)


class LetGo(Enum):
    """What an engine says to the order to let go of a request."""

    YES = auto()
    WITH_ITS_CONNECTION = auto()
    """It does not know the order (a router does not): the end of the request's connection ends the request."""
    UNKNOWN = auto()
    """It says nothing."""


async def abort(client: EngineClient, rid: str, within_s: float = _ABORT_S) -> LetGo:
    """Ask the engine to let go of a request."""
    try:
        async with asyncio.timeout(within_s):
            await (client.abort_all() if rid == EVERYTHING else client.abort(rid))
    except EngineAbsent:
        return LetGo.YES
    except EngineRefused as error:
        return LetGo.WITH_ITS_CONNECTION if error.status in _UNKNOWN else LetGo.YES
    except (GyreError, TimeoutError):
        return LetGo.UNKNOWN
    return LetGo.YES


@dataclass(frozen=True)
class _Left:
    """A request at one engine, until it is known to be gone. The engine cannot sample it after `until_s`."""

    rid: str
    until_s: float
    gone: asyncio.Future[None]


class Leftovers:
    """`emptied` is told whenever an engine has let go of the last."""

    def __init__(self, emptied: Callable[[], None]) -> None:
        self._emptied = emptied
        self._left: dict[EngineClient, dict[str, _Left]] = {}
        self._asking: dict[EngineClient, asyncio.Task[None]] = {}

    def leave(self, client: EngineClient, rid: str, since_s: float) -> None:
        """The request's connection is over since then, and the engine has not said that it let go."""
        loop = asyncio.get_running_loop()
        self._left.setdefault(client, {})[rid] = _Left(rid, since_s + LEFT_S, loop.create_future())
        if client not in self._asking:
            self._asking[client] = loop.create_task(self._ask(client), name=f"ask {client.url} to let go")

    def at(self, client: EngineClient) -> bool:
        """Whether the engine may still sample what nobody hears."""
        return client in self._left

    def has(self, rid: str) -> bool:
        """Whether an engine may still sample the request."""
        return bool(self._where(rid))

    async def gone(self, rid: str) -> None:
        """Return when no engine samples the request."""
        for left in self._where(rid):
            with suppress(TimeoutError):
                async with asyncio.timeout_at(left.until_s):
                    await asyncio.shield(left.gone)

    async def emptied(self, client: EngineClient) -> None:
        """Return when nothing is left at the engine."""
        while left := list(self._left.get(client, {}).values()):
            await asyncio.wait([request.gone for request in left])

    def ended(self, client: EngineClient) -> None:
        """Its process has ended, and all with it."""
        for rid in list(self._left.get(client, {})):
            self._forget(client, rid)
        asking = self._asking.pop(client, None)
        if asking is not None:
            asking.cancel()

    async def close(self) -> None:
        asking = list(self._asking.values())
        for client in list(self._left):
            self.ended(client)
        await asyncio.gather(*asking, return_exceptions=True)

    def _where(self, rid: str) -> list[_Left]:
        """It, and all that it may be among, while an engine may sample it."""
        if not self._left:
            return []
        now_s = asyncio.get_running_loop().time()
        found = (here.get(name) for here in self._left.values() for name in (rid, EVERYTHING))
        return [left for left in found if left is not None and left.until_s > now_s]

    async def _ask(self, client: EngineClient) -> None:
        """Owned by `ended` and `close`; it ends with the last of what is left."""
        while here := list(self._left.get(client, ())):
            for rid in here:
                if await abort(client, rid, _PATIENT_ABORT_S) is LetGo.UNKNOWN:
                    break
                self._forget(client, rid)
            else:
                continue
            await asyncio.sleep(RETRY_S)
        self._asking.pop(client, None)

    def _forget(self, client: EngineClient, rid: str) -> None:
        here = self._left[client]
        here.pop(rid).gone.set_result(None)
        if not here:
            del self._left[client]
            self._emptied()
