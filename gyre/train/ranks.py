# pyright: basic
"""The ranks of one replica, as each of them sees the others: what they tell each other beside the model's own arithmetic.

All ranks run the same calls in the same order, each on its part of the model. Every method here is one that all of them
come to; it runs over host memory, on gloo. Of a replica of one rank they cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class RankPlace:
    """Which rank a process is, and where it meets the others."""

    rank: int = 0
    count: int = 1
    meeting: str = ""
    """A file, empty at first, that no other user can open."""
    device: int = 0
    """Its GPU, where there are any."""


class Ranks:
    """Made by gyre.train.megatron.start_groups. `group` is that of all ranks; None: the process's own."""

    def __init__(self, rank: int = 0, count: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.count = count
        self._group = group

    @property
    def first(self) -> bool:
        """Whether this is the one that reads and writes for all."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks come to the end of the block, or all raise: what one could not do is done by none.

        Who has raised nothing itself raises what the first that did has. Nothing in the block may be one of these
        methods, or the model's.
        """
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.count == 1:
                raise
            mine = error
        if self.agree(mine is None):
            return
        told = self._tell_each(None if mine is None else (type(mine), str(mine)))
        if mine is not None:
            raise mine
        of, text = next(found for found in told if found is not None)
        raise of.__new__(of, text)  # its text alone: it may be made of other things

    def agree(self, holds: bool) -> bool:
        """Whether it holds on every rank."""
        if self.count == 1:
            return holds
        fails = torch.tensor(0 if holds else 1)
        dist.all_reduce(fails, op=dist.ReduceOp.MAX, group=self._group)
        return not int(fails)

    def hear(self, value: T) -> T:
        """What the first rank says; the others' value is not looked at."""
        if self.count == 1:
            return value
        said = [value]
        dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def hear_all(self, value: T) -> list[T]:
        """What each rank says, in their order."""
        return [value] if self.count == 1 else self._tell_each(value)

    def gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, of one shape and contiguous; nothing on any but the first."""
        if self.count == 1:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self.count)] if self.first else None
        dist.gather(part, parts, dst=0, group=self._group)
        return parts or []

    def scatter(self, parts: Sequence[Tensor], into: Tensor) -> None:
        """Fill `into` with this rank's of the parts that the first gives; the others give none."""
        if self.count == 1:
            into.copy_(parts[0])
        else:
            dist.scatter(into, list(parts) if self.first else None, src=0, group=self._group)

    def _tell_each(self, value: T) -> list[T]:
        told: list[Any] = [None] * self.count
        dist.all_gather_object(told, value, group=self._group)
        return told


ALONE = Ranks()
