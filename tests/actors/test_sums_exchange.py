"""Gradient sums from one replica to another over real connections: whole and right, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from gyre.actors import sums_exchange
from gyre.actors.sums_exchange import SumsExchange
from gyre.errors import BadInput, Refused, Unavailable
from gyre.ids import MicroStepId
from gyre.kv_migrate.greeting import SharedSecret
from gyre.kv_migrate.tcp import TcpTransport
from gyre.train.sums import Sums, to_wire

NUMBERS = 1_000_003
"""Some blocks, and a part of one."""

Make = Callable[..., Awaitable[SumsExchange]]


@pytest_asyncio.fixture
async def make() -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        async def opened(secret: bytes = b"secret") -> SumsExchange:
            transport = await TcpTransport.open(SharedSecret(secret))
            stack.push_async_callback(transport.close)
            return SumsExchange(transport)

        yield opened


def some(dtype: str) -> tuple[torch.Tensor, Sums]:
    values = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(3)) * 1e-6
    data, error = to_wire(values, dtype)
    return values, Sums("t", "layout", 7, (MicroStepId("m"),), dtype, NUMBERS, data, error)


@pytest.mark.parametrize("part_blocks", [1, 3, 256])
async def test_they_come_as_they_were_sent(make: Make, part_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_exchange, "_PART_BLOCKS", part_blocks)
    satellite, core = await make(), await make()
    values, sums = some("float32")
    with satellite.offered(sums) as order:
        assert torch.equal(await core.fetch(order, 30.0), values)
        assert torch.equal(await core.fetch(order, 30.0), values), "an answer that was lost is asked for again"


async def test_rounded_ones_come_rounded(make: Make) -> None:
    satellite, core = await make(), await make()
    values, sums = some("bfloat16")
    with satellite.offered(sums) as order:
        came = await core.fetch(order, 30.0)
    assert torch.equal(came, values.to(torch.bfloat16).float())
    assert float((came - values).norm() / values.norm()) == pytest.approx(sums.error, rel=1e-3)
    assert ((came - values).abs() <= values.abs() / 256).all()


async def test_what_is_not_offered_any_more_or_is_something_else_is_refused(make: Make) -> None:
    satellite, core = await make(), await make()
    _, sums = some("float32")
    with satellite.offered(sums) as order:
        for changed in (
            {"transfer": "u"},
            {"version": 8},
            {"layout_hash": "other"},
            {"numbers": 5},
            {"dtype": "bfloat16"},
        ):
            with pytest.raises(Refused, match="not offered"):
                await core.fetch(replace(order, **changed), 30.0)
    with pytest.raises(Refused, match="not offered"):
        await core.fetch(order, 30.0)


async def test_a_stranger_gets_nothing_and_a_replica_that_is_gone_is_given_up(make: Make) -> None:
    satellite, stranger, core = await make(), await make(b"another"), await make()
    _, sums = some("float32")
    with satellite.offered(sums) as order:
        with pytest.raises((Refused, Unavailable)):
            await stranger.fetch(order, 5.0)
        with pytest.raises(Unavailable):
            await core.fetch(replace(order, source="tcp:127.0.0.1:9"), 5.0)
        with pytest.raises(BadInput):
            await core.fetch(replace(order, source="mooncake:127.0.0.1:9"), 5.0)
