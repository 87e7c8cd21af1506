"""A replica's sums as another one gets them, without a transport between."""

from __future__ import annotations

import torch

from gyre.actors.messages_replica import StageSums
from gyre.train.replica import Replica
from gyre.train.sums import Sums, from_wire


def offer(sums: Sums) -> StageSums:
    return StageSums(
        sums.transfer, sums.layout_hash, sums.version, sums.micro_steps, sums.dtype, sums.numbers, "tcp:nowhere:1", 1
    )


def values(sums: Sums) -> torch.Tensor:
    found = torch.empty(sums.numbers)
    from_wire(sums.data, sums.dtype, found)
    return found


def stage(core: Replica, sums: Sums) -> None:
    core.stage(offer(sums), values(sums))
