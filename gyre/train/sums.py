# pyright: basic
"""Gradient sums on their way between two replicas: float32 as they are, or rounded to bfloat16.

The flat buffer of a layout is one array; on the wire it is bytes in whole blocks, the last one filled up with zeros.
bfloat16 halves the bytes and keeps float32's range; each element is off by at most 1/256 of itself, and what
that comes to is measured with every transfer (`Sums.error`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gyre.ids import MicroStepId

BLOCK_BYTES = 1 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Sums:
    """One whole set of sums, as it is sent."""

    transfer: str
    layout_hash: str
    version: int
    micro_steps: tuple[MicroStepId, ...]
    dtype: str
    """`float32` or `bfloat16`."""
    numbers: int
    data: memoryview
    """The numbers in that dtype, in whole blocks."""
    error: float
    """The norm of what rounding took away, over that of the sums; 0 for float32."""

    @property
    def bytes(self) -> int:
        return self.numbers * _DTYPES[self.dtype].itemsize


def to_wire(values: Tensor, dtype: str) -> tuple[memoryview, float]:
    """(bytes in whole blocks, error) of float32 `values`; a copy."""
    wire = values.detach().to("cpu", _DTYPES[dtype], copy=True).contiguous()
    size = wire.numel() * wire.element_size()
    data = torch.zeros(block_count(wire.numel(), dtype) * BLOCK_BYTES, dtype=torch.uint8)
    data[:size] = wire.view(torch.uint8)
    norm = float(values.norm())
    exact = wire.dtype is torch.float32 or not norm
    error = 0.0 if exact else float((wire.to(values.device, torch.float32) - values).norm()) / norm
    return data.numpy().data, error


def from_wire(data: memoryview, dtype: str, into: Tensor) -> None:
    """Fill float32 `into` with as many numbers from the front of `data`."""
    into.copy_(torch.frombuffer(data, dtype=_DTYPES[dtype], count=into.numel()))


def block_count(numbers: int, dtype: str) -> int:
    return max(1, -(-numbers * _DTYPES[dtype].itemsize // BLOCK_BYTES))


def numbers_of(blocks: int, dtype: str) -> int:
    """In so many whole blocks."""
    return blocks * BLOCK_BYTES // _DTYPES[dtype].itemsize
