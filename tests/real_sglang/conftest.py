"""One SGLang for all of this folder's tests, brought back to its first state after each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from engine.conftest import EngineUnderTest
from engine.tiny_models import make_model

from gyre.engine.sglang.control import SglangClient

from .servers import BLOCK_TOKENS, KEY, MISSING, Server, sglang_server


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "qwen3", "qwen3"), make_model(folder / "other", "qwen3", seed=1)


@pytest.fixture(scope="session")
def server(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if MISSING:
        pytest.skip(MISSING)
    with sglang_server(tmp_path_factory.mktemp("sglang"), models[0]) as serving:
        yield serving


@pytest.fixture
async def engine(server: Server, models: tuple[Path, Path]) -> AsyncIterator[EngineUnderTest]:
    async with SglangClient(server.url, key=KEY, idle_s=3.0) as client:
        yield EngineUnderTest(client, server.model, models[1], BLOCK_TOKENS, updates_in_place=False)
        await client.abort_all()
        await client.resume()
        await client.update_weights(str(server.model), 1)
