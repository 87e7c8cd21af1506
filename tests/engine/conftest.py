"""Engines for the contract suite: one process a family, brought back to its first state after each test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gyre.engine.client import Chunk, EngineClient, GenerateRequest

from .processes import LIMIT_S, EngineProcess, engine_process
from .tiny_models import FAMILIES, make_model

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class EngineUnderTest:
    """What the contract needs to know of an engine. `model` is served as version 1; `other_model` has other weights."""

    client: EngineClient
    model: Path
    other_model: Path
    block_tokens: int
    updates_in_place: bool = True
    """Whether weights change under a request that is paused in place. SGLang's cache, which is all requests' and says
    nothing of versions, would keep what the request has of the old ones."""

    def request(
        self, rid: str, prompt: int | list[int] = 40, max_new_tokens: int = 12, **options: object
    ) -> GenerateRequest:
        """A greedy request of a prompt of that length (always the same one), or of these ids."""
        input_ids = [3 + (7 * i + i * i) % 300 for i in range(prompt)] if isinstance(prompt, int) else prompt
        defaults: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, "version": 1}
        return GenerateRequest(rid, input_ids, max_new_tokens, **(defaults | options))  # type: ignore[arg-type]

    async def run(self, request: GenerateRequest) -> Answer:
        async with asyncio.timeout(LIMIT_S):
            return collect([chunk async for chunk in self.client.generate(request)])


@dataclass(frozen=True)
class Answer:
    """A whole stream in one."""

    token_ids: list[int]
    logprobs: list[float]
    chunks: list[Chunk]

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]


def collect(chunks: list[Chunk]) -> Answer:
    return Answer(
        [token for chunk in chunks for token in chunk.token_ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        chunks,
    )


@pytest.fixture(scope="session")
def local_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[EngineProcess, Path]]]:
    folder = tmp_path_factory.mktemp("engines")
    started: dict[str, tuple[EngineProcess, Path]] = {}
    contexts = []
    try:
        for family in FAMILIES:
            model = make_model(folder / family, family)
            other = make_model(folder / f"{family}-other", family, seed=1)
            context = engine_process(folder / f"{family}-run", model, "--block-tokens", str(BLOCK_TOKENS))
            contexts.append(context)
            started[family] = (context.__enter__(), other)
        yield started
    finally:
        for context in contexts:
            context.__exit__(None, None, None)


@pytest.fixture(params=[f"local-{family}" for family in FAMILIES])
async def engine(
    request: pytest.FixtureRequest, local_engines: dict[str, tuple[EngineProcess, Path]]
) -> AsyncIterator[EngineUnderTest]:
    process, other = local_engines[request.param.removeprefix("local-")]
    async with EngineClient(process.url) as client:
        yield EngineUnderTest(client, process.model, other, BLOCK_TOKENS)
        await client.abort_all()
        await client.resume()
        await client.resume_memory()
        await client.update_weights(str(process.model), 1)
