"""Requests that are stopped on one real SGLang and continued on another, whose pages Mooncake's Transfer Engine carries.

Over its own TCP, which is asked for: there is no RDMA device here. What of a move does not depend on the transport is in
test_two_engines.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.tiny_models import make_model
from kv_migrate.mooncake_library import PLACE, why_not

from gyre.kv_migrate.choice import Kind
from real_sglang.pair import RANKS, Engine, ready, session, start
from real_sglang.servers import MISSING
from real_sglang.test_two_engines import (
    FLAGS,
    SHAPE,
    Pair,
    all_whole,
    as_if_never_stopped,
    clients,
    prompt,
    stopped_and_continued,
    whole_blocks,
)

KIND = Kind.MOONCAKE_TCP


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if MISSING or why_not():
        pytest.skip(MISSING or why_not())
    folder = tmp_path_factory.mktemp("pair")
    model = make_model(folder / "v1", seed=1, **SHAPE)
    engines: list[Engine] = []
    try:
        for name in ("a", "b"):
            engines.append(start(name, model, 1, folder, *FLAGS, transport=KIND, beside=(PLACE / "site",)))
        for engine in engines:
            ready(engine)
        yield Pair(engines[0], engines[1], folder, (model, model))
    finally:
        for engine in engines:
            engine.end()


def transfer_engines(engine: Engine) -> list[int]:
    """Its processes that carry pages, and the processes that have the library are no others."""
    found = session(engine.process.pid)
    carriers = [process for process, command in found.items() if b"mooncake_child" in command]
    assert {process for process in found if has_library(process)} == set(carriers)
    return carriers


def has_library(process: int) -> bool:
    return "/mooncake/" in Path(f"/proc/{process}/maps").read_text(encoding="utf-8")


async def test_requests_stopped_on_one_engine_are_continued_on_another(pair: Pair) -> None:
    prompts = [prompt(seed, 100 + 90 * seed) for seed in range(6)]
    async with clients(pair) as (a, b):
        for client in (a, b):
            assert (await client.info()).kv_carrier == f"{KIND}: {KIND} was asked for"
        whole = await all_whole(b, prompts, key=90)
        first, *others = list(zip(whole, prompts, strict=True))
        moves = await asyncio.gather(*(stopped_and_continued(a, b, *request, stop_after=20) for request in others))
        for engine, each in (
            (pair.a, 1),
            (pair.b, 2),
        ):  # of a rank: one that serves, and one that reads from the source
            assert len(transfer_engines(engine)) == each * RANKS
        # It crashes, and nothing else with it.
        for engine in (pair.a, pair.b):
            for process in transfer_engines(engine):
                os.kill(process, signal.SIGKILL)
        moves = [await stopped_and_continued(a, b, *first, stop_after=20), *moves]
    for ids, moved in zip(prompts, moves, strict=True):
        as_if_never_stopped(moved)
        assert moved.report.reason == ""
        assert moved.rest.cached_tokens == whole_blocks(len(ids) + len(moved.start.token_ids))
