"""Who is silent for too long is lost; what is ours to wait for is nobody's silence."""

from __future__ import annotations

import asyncio

import pytest

from gyre.kv_migrate.silence import Silence
from gyre.kv_migrate.transport import SourceLost

FOREVER_S = 3600.0


async def test_a_source_that_says_nothing_is_lost() -> None:
    silence = Silence("tcp:a:1", 0.01)
    with pytest.raises(SourceLost, match=r"nothing came from tcp:a:1 for 0\.01 s"):
        async with silence:
            await asyncio.sleep(FOREVER_S)
    assert silence.over


async def test_what_is_waited_for_on_our_side_does_not_count_and_the_count_goes_on_after_it() -> None:
    silence = Silence("tcp:a:1", 0.02)

    async def pull() -> None:
        async with silence:
            with silence.ours():
                with silence.ours():
                    await asyncio.sleep(0.1)
                silence.heard()
                await asyncio.sleep(0.1)
            assert not silence.over
            await asyncio.sleep(FOREVER_S)

    with pytest.raises(SourceLost):
        await pull()


async def test_without_a_limit_only_the_deadline_ends_it() -> None:
    async def pull() -> None:
        async with asyncio.timeout(0.02), Silence("tcp:a:1", None) as silence:
            silence.heard()
            await asyncio.sleep(FOREVER_S)

    with pytest.raises(TimeoutError):
        await pull()


async def test_the_errors_of_a_pull_pass_through_also_when_it_was_silent() -> None:
    async def pull() -> None:
        async with Silence("tcp:a:1", 0.01) as silence:
            try:
                await asyncio.sleep(FOREVER_S)
            except asyncio.CancelledError:
                silence.heard()
                raise ValueError("its own") from None

    with pytest.raises(ValueError, match="its own"):
        await pull()
