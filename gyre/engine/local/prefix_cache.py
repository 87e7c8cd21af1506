"""Which block of KV memory holds which tokens: reference counts, the index by block name, eviction.

Pure bookkeeping over block numbers. A block is free, or held by someone, or idle: published under a name, held by
nobody, and evicted when room is needed, the longest unused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PrefixCache:
    """Hands out the numbers 0 … `blocks` - 1. Every number it hands out has to come back through `release`."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._name: list[bytes | None] = [None] * blocks
        self._by_name: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def published(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._by_name

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest leading run of `names` that is here; the caller now holds them."""
        found: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._hold(block)
        return found

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of undefined content, held by the caller; None when there are not so many."""
        if count > self.available:
            return None
        while len(self._free) < count:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self._free.append(block)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def publish(self, block: int, name: bytes) -> None:
        """Let others find the held `block` under `name`. When the name is taken the block stays its holder's own."""
        if name not in self._by_name and self._name[block] is None:
            self._by_name[name] = block
            self._name[block] = name

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back, in their order in the sequence: a prefix's end is evicted before its start."""
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if self._holders[block] > 0:
                continue
            if self._name[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def flush(self) -> None:
        """Forget every name. Blocks that are held stay with their holders."""
        self._free.extend(self._idle)
        self._idle.clear()
        for block in self._by_name.values():
            self._name[block] = None
        self._by_name.clear()

    @property
    def unused(self) -> bool:
        """Nobody holds a block."""
        return self.available == self.blocks

    def _hold(self, block: int) -> None:
        self._holders[block] += 1
        self._idle.pop(block, None)

    def _forget(self, block: int) -> None:
        name = self._name[block]
        if name is not None:
            del self._by_name[name]
            self._name[block] = None
