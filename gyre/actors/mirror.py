"""A mirror of the records under one prefix, kept true by a watch: what an actor reads instead of asking the store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from gyre.store.protocol import Compacted
from gyre.store.typed import TypedStore, Versioned

T = TypeVar("T")


class Mirror(Generic[T]):
    """Records by key. `follow` is run by its actor as a task; `on_change` is called after the first listing and after
    every change. After a compaction it lists again, so nothing is missed but intermediate values."""

    def __init__(self, store: TypedStore, prefix: str, cls: type[T], *, suffix: str = "") -> None:
        self._store = store
        self._prefix = prefix
        self._cls = cls
        self._suffix = suffix
        self.items: dict[str, Versioned[T]] = {}
        self.listed = False
        """Whether it has been listed once: until then nothing is known, which is not to say that there is nothing."""
        self.dropped: set[str] = set()
        """Keys whose records are over: they change no more, and nobody has to walk over them again."""

    @property
    def records(self) -> list[T]:
        return [item.record for item in self.items.values()]

    def put(self, item: Versioned[T]) -> None:
        """Take what a transaction of our own has just written, before the watch brings it."""
        known = self.items.get(item.key)
        if item.key in self.dropped:
            return
        if known is None or known.mod_revision < item.mod_revision:
            self.items[item.key] = item

    def drop(self, key: str) -> None:
        """Hold this record no more, whatever the watch brings."""
        self.items.pop(key, None)
        self.dropped.add(key)

    async def follow(self, on_change: Callable[[], None]) -> None:
        while True:
            listing = await self._store.range(self._prefix, self._cls, suffix=self._suffix)
            self.items = {item.key: item for item in listing.items if item.key not in self.dropped}
            self.listed = True
            on_change()
            try:
                async with aclosing(
                    self._store.watch(self._prefix, self._cls, listing.revision + 1, suffix=self._suffix)
                ) as changes:
                    async for change in changes:
                        if change.now is not None:
                            self.put(change.now)
                        else:
                            self.items.pop(change.key, None)
                        on_change()
            except Compacted:
                continue
