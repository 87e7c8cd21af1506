"""What people ask a node for and its actors do without: the job's groups, steps and switches.

They are followed only while somebody asks. A cluster's nodes need not hear of all that happens for a person who looks at
one of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gyre.actors.mirror import Mirror
from gyre.errors import Unavailable
from gyre.store.records import GroupRecord, Keys, StepRecord, SwitchRecord
from gyre.store.typed import TypedStore

KEPT_S = 30.0
"""After the last question."""
LISTED_S = 2.0
"""For the store to answer; who asks while the store is away sees what was seen last, or nothing."""


class Shown:
    """`follow` is run by its actor as a task."""

    def __init__(self, store: TypedStore, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._asked = asyncio.Event()
        self._asked_s = 0.0
        self._changed = asyncio.Event()
        self._forget()

    def _forget(self) -> None:
        root = self._keys.root
        self.groups = Mirror(self._store, f"{root}groups/", GroupRecord)
        self.steps = Mirror(self._store, f"{root}steps/", StepRecord)
        self.switches = Mirror(self._store, f"{root}switches/", SwitchRecord)

    @property
    def _mirrors(self) -> tuple[Mirror[Any], ...]:
        return (self.groups, self.steps, self.switches)

    @property
    def listed(self) -> bool:
        """Whether they are known; else they are empty, which is not to say that there is nothing."""
        return all(mirror.listed for mirror in self._mirrors)

    async def look(self) -> bool:
        """Until they are as they are now, and from then on for a while. False when the store does not answer."""
        self._asked_s = asyncio.get_running_loop().time()
        self._asked.set()
        try:
            async with asyncio.timeout(LISTED_S):
                while not self.listed:
                    self._changed.clear()
                    await self._changed.wait()
                await self._store.store.get(self._keys.job)  # what is listed stays so while the store is away
        except (TimeoutError, Unavailable):
            return False
        return True

    async def follow(self) -> None:
        while True:
            await self._asked.wait()
            async with asyncio.TaskGroup() as tasks:
                following = [tasks.create_task(mirror.follow(self._changed.set)) for mirror in self._mirrors]
                while (left_s := self._left_s()) > 0:  # noqa: ASYNC110  # time is what it waits for
                    await asyncio.sleep(left_s)
                for each in following:
                    each.cancel()
            self._forget()
            if self._left_s() <= 0:  # nobody has asked while it ended
                self._asked.clear()

    def _left_s(self) -> float:
        return self._asked_s + KEPT_S - asyncio.get_running_loop().time()
