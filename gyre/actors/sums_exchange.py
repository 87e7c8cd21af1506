# pyright: basic
"""Gradient sums over gyre.kv_migrate: the satellite's replica offers them, and the core's pulls them block by block.

So they are checked, resumed and encrypted as KV is, and may be larger than any message and any staging memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gyre.actors.messages_replica import StageSums
from gyre.errors import Refused
from gyre.kv_migrate.manifest import Manifest
from gyre.kv_migrate.staging import Staging
from gyre.kv_migrate.transport import BlockLease, Transport
from gyre.train.sums import BLOCK_BYTES, Sums, block_count, from_wire, numbers_of

_PART_BLOCKS = 256
"""Pulled at a time, into staging memory of that size."""


class SumsExchange:
    """Made with an open transport, which it serves from."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._offered: dict[str, Sums] = {}
        transport.register(self)

    @contextmanager
    def offered(self, sums: Sums) -> Generator[StageSums]:
        """What tells the core's replica where they are to be had; they are while the block runs."""
        self._offered[sums.transfer] = sums
        try:
            yield StageSums(
                transfer=sums.transfer,
                layout_hash=sums.layout_hash,
                version=sums.version,
                micro_steps=sums.micro_steps,
                dtype=sums.dtype,
                numbers=sums.numbers,
                source=self._transport.describe(),
                epoch=self._transport.epoch,
            )
        finally:
            del self._offered[sums.transfer]

    async def fetch(self, order: StageSums, within_s: float) -> Tensor:
        """All the numbers, as float32. Raises Refused, BadInput or Unavailable when they do not come whole in time."""
        values = torch.empty(order.numbers, dtype=torch.float32)
        count = block_count(order.numbers, order.dtype)
        staging = Staging(min(count, _PART_BLOCKS) * BLOCK_BYTES)
        until_s = asyncio.get_running_loop().time() + within_s
        for first in range(0, count, _PART_BLOCKS):
            part = range(first, min(first + _PART_BLOCKS, count))
            manifest = _manifest(order, part)
            left_s = until_s - asyncio.get_running_loop().time()
            received = await self._transport.pull(order.source, manifest, BLOCK_BYTES, staging, left_s)
            if len(received.blocks) < len(part):
                raise Refused(f"of {len(part)} blocks of transfer {order.transfer} {len(received.blocks)} came whole")
            begin = numbers_of(first, order.dtype)
            into = values[begin : begin + numbers_of(len(part), order.dtype)]
            await asyncio.to_thread(from_wire, staging.view, order.dtype, into)
        return values

    async def lease(self, manifest: Manifest) -> BlockLease:
        """BlockSource.lease"""
        transfer, _, _ = manifest.transfer.rpartition("/")
        sums = self._offered.get(transfer)
        if sums is None or (manifest.model, manifest.version, manifest.layout) != _terms(sums):
            raise Refused(f"the sums of transfer {transfer} are not offered here")
        places = [int.from_bytes(name, "big") * BLOCK_BYTES for name in manifest.blocks]
        if not all(place < len(sums.data) for place in places):
            raise Refused(f"transfer {transfer} has {len(sums.data) // BLOCK_BYTES} blocks")
        return _Lease([sums.data[place : place + BLOCK_BYTES] for place in places])


class _Lease:
    """The bytes are a copy that nobody changes; they live as long as someone refers to them."""

    def __init__(self, blocks: Sequence[memoryview | None]) -> None:
        self.blocks = blocks

    def intact(self, number: int) -> bool:
        return True

    def end(self) -> None:
        self.blocks = ()


def _manifest(order: StageSums, part: range) -> Manifest:
    model, version, layout = _terms(order)
    names = tuple(place.to_bytes(4, "big") for place in part)
    return Manifest(f"{order.transfer}/{part.start}", order.epoch, model, version, layout, names)


def _terms(sums: Sums | StageSums) -> tuple[str, int, str]:
    return sums.layout_hash, sums.version, f"{sums.dtype} x {sums.numbers}"
