"""The thread that owns the core: commands between steps, and what happens when something raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre.engine.local.core import EngineConfig, EngineCore
from gyre.engine.local.requests import Output, read_request
from gyre.engine.local.thread import EngineThread
from gyre.errors import BadInput, Unavailable

from .tiny_models import make_model

LIMIT_S = 120.0


@pytest.fixture
def core(tmp_path: Path) -> EngineCore:
    return EngineCore(EngineConfig(make_model(tmp_path / "m"), 0))


@pytest.fixture
async def outputs() -> list[Output]:
    return []


@pytest.fixture
async def thread(core: EngineCore, outputs: list[Output]) -> AsyncIterator[EngineThread]:
    thread = EngineThread(core, outputs.extend)
    yield thread
    if not thread.failed.done():
        await thread.stop()


def endless(rid: str) -> object:
    return {"rid": rid, "input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}


async def tokens_come(outputs: list[Output]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not any(output.token_ids for output in outputs):  # noqa: ASYNC110 - another thread fills it
            await asyncio.sleep(0.005)


async def test_a_command_runs_in_the_middle_of_sampling_and_its_outputs_come_before_its_result(
    thread: EngineThread, outputs: list[Output]
) -> None:
    await thread.call(lambda core: core.submit(read_request(endless("r"), "")))
    await tokens_come(outputs)
    await thread.call(lambda core: core.abort("r"))
    assert outputs[-1].finish is not None
    assert sum(len(output.token_ids) for output in outputs) == outputs[-1].completion_tokens


async def test_a_command_that_raises_tells_its_caller_and_sampling_goes_on(
    thread: EngineThread, outputs: list[Output]
) -> None:
    await thread.call(lambda core: core.submit(read_request(endless("r"), "")))
    with pytest.raises(BadInput, match="live request"):
        await thread.call(lambda core: core.submit(read_request(endless("r"), "")))
    await tokens_come(outputs)


async def test_a_step_that_raises_is_the_end_and_says_why(core: EngineCore, thread: EngineThread) -> None:
    def out_of_memory() -> bool:
        raise MemoryError("no room for the batch")

    core.step = out_of_memory  # type: ignore[method-assign]
    await thread.call(lambda core: core.submit(read_request(endless("r"), "")))
    with pytest.raises(MemoryError, match="no room"):
        await asyncio.wait_for(thread.failed, LIMIT_S)


async def test_commands_after_the_end_are_refused(core: EngineCore) -> None:
    thread = EngineThread(core, lambda _: None)
    await thread.stop()
    with pytest.raises(Unavailable):
        await thread.call(lambda core: core.load)
