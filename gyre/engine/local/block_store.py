"""The KV blocks of the engine: their bytes, their index, and what peers may do with them.

The core takes and publishes blocks; a peer asks which blocks are here, holds some while it reads them, or hands over
blocks it had. Every exchange names the weights, their version and the layout: what differs is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gyre.engine.local.kv_memory import KvMemory, layout_name
from gyre.engine.local.prefix_cache import PrefixCache
from gyre.engine.local.shape import ModelShape
from gyre.errors import Refused
from gyre.kv_migrate.manifest import Manifest


class BlockStore:
    """`index` says which block is whose; `memory` has the bytes, or is None while it is released."""

    def __init__(
        self, shape: ModelShape, model: str, version: int, blocks: int, block_tokens: int, dtype: torch.dtype
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.model = model
        """Which weights the blocks are of."""
        self.version = version
        self.layout = layout_name(shape, block_tokens, dtype)
        self.index = PrefixCache(blocks)
        self.memory: KvMemory | None = None
        self.resume()
        self.block_bytes = self.memory.block_bytes if self.memory is not None else 0

    def forget(self) -> None:
        """Drop every published block; memory that nobody holds goes back to the system."""
        self.index.flush()
        if self.memory is not None and self.index.unused:
            self.memory.zero()

    def release(self) -> None:
        """Give the memory back. Refused while anybody holds a block."""
        if not self.index.unused:
            raise Refused("memory cannot be released while KV blocks are being read")
        self.index.flush()
        self.memory = None

    def resume(self) -> None:
        if self.memory is None:
            self.memory = KvMemory(self._shape, self.blocks, self.block_tokens, self._dtype)

    # ------------------------------------------------------------------------------------------ peers

    def lack(self, names: Sequence[bytes], version: int) -> list[bytes]:
        """Which of a prefix's blocks are not here. Those that are become the last to be evicted."""
        self._check_version(version)
        self.index.release(self.index.match(names))
        return [name for name in names if name not in self.index]

    def lease(self, manifest: Manifest) -> list[tuple[int, memoryview] | None]:
        """Hold blocks for a reader: number and bytes of each, None where it is not here. End it with `end_lease`."""
        memory = self.check(manifest)
        leased: list[tuple[int, memoryview] | None] = []
        for name in manifest.blocks:
            found = self.index.match([name])
            leased.append((found[0], memory.view(found[0])) if found else None)
        return leased

    def end_lease(self, blocks: Sequence[int]) -> None:
        self.index.release(blocks)

    def commit(self, received: Sequence[tuple[bytes, memoryview]], manifest: Manifest) -> int:
        """Take over blocks that a peer sent, whole and checked, in their prefix's order. Returns how many found room.

        Refused, with nothing taken, when the weights, the version or the layout are others by now.
        """
        memory = self.check(manifest)
        for name, data in received:
            if len(data) != memory.block_bytes:
                raise Refused(f"block {name.hex()} has {len(data)} bytes, not {memory.block_bytes}")
        new = [(name, data) for name, data in received if name not in self.index]
        # The start of a prefix is worth more than its end: without room for all, the first ones are kept.
        blocks = self.index.allocate(min(len(new), self.index.available)) or []
        for block, (name, data) in zip(blocks, new, strict=False):
            memory.view(block)[:] = data
            self.index.publish(block, name)
        self.index.release(blocks)
        return len(blocks) + len(received) - len(new)

    def check(self, manifest: Manifest) -> KvMemory:
        """The memory, when weights, version and layout are those that it holds."""
        memory = self._check_version(manifest.version)
        if manifest.model != self.model:
            raise Refused(f"KV of model {manifest.model} was asked for, and this engine's weights are {self.model}")
        if manifest.layout != self.layout:
            raise Refused(f"KV of layout {manifest.layout} was asked for, and this engine's is {self.layout}")
        return memory

    def _check_version(self, version: int) -> KvMemory:
        if version != self.version:
            raise Refused(f"KV of version {version} was asked for, and this engine holds version {self.version}")
        if self.memory is None:
            raise Refused("the engine's memory is released")
        return self.memory
