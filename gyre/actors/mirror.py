"""A mirror of the records under one prefix, kept true by a watch: what an actor reads instead of asking the store."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from gyre.store.protocol import Compacted
from gyre.store.typed import TypedStore, Versioned

T = TypeVar("T")

FOR_EVER = sys.maxsize


class Mirror(Generic[T]):
    """Records by key. `follow` is run by its actor as a task; `on_change` is called after the first listing and after
    every change. After a compaction it lists again, so nothing is missed but intermediate values."""

    def __init__(self, store: TypedStore, prefix: str, cls: type[T]) -> None:
        self._store = store
        self._prefix = prefix
        self._cls = cls
        self.items: dict[str, Versioned[T]] = {}
        self.listed = False
        """Whether it has been listed once: until then nothing is known, which is not to say that there is nothing."""
        self.dropped: dict[str, int] = {}
        """Keys whose records are over, and the last revision of each that is not looked at: nobody walks over it again."""

    @property
    def records(self) -> list[T]:
        return [item.record for item in self.items.values()]

    def put(self, item: Versioned[T]) -> None:
        """Take what a transaction of our own has just written, before the watch brings it."""
        known = self.items.get(item.key)
        if item.mod_revision <= self.dropped.get(item.key, 0):
            return
        self.dropped.pop(item.key, None)
        if known is None or known.mod_revision < item.mod_revision:
            self.items[item.key] = item

    def drop(self, key: str, revision: int = FOR_EVER) -> None:
        """Hold this record no more, whatever the watch brings; with `revision`, until it was written after that."""
        known = self.items.get(key)
        if known is None or known.mod_revision <= revision:
            self.items.pop(key, None)
            self.dropped[key] = max(revision, self.dropped.get(key, 0))

    async def follow(self, on_change: Callable[[], None]) -> None:
        while True:
            listing = await self._store.range(self._prefix, self._cls)
            self.items = {}
            for item in listing.items:
                self.put(item)
            self.listed = True
            on_change()
            try:
                async with aclosing(self._store.watch(self._prefix, self._cls, listing.revision + 1)) as changes:
                    async for change in changes:
                        if change.now is not None:
                            self.put(change.now)
                        else:
                            self.items.pop(change.key, None)
                        on_change()
            except Compacted:
                continue
