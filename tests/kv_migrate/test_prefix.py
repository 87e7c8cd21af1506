"""Moving a prefix between two engines: what continues is what would have been, and nothing wrong is ever cached."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from aiohttp import web
from engine.processes import engine_process
from engine.tiny_models import FAMILIES, make_model

from gyre.engine.access import http_key
from gyre.engine.client import Chunk, EngineClient, GenerateRequest
from gyre.engine.local.core import EngineConfig, EngineCore
from gyre.engine.local.kv_exchange import KvExchange
from gyre.engine.local.server import EngineServer
from gyre.kv_migrate.prefix import move_prefix
from gyre.kv_migrate.tcp import TcpTransport

torch.set_num_threads(1)

SECRET = b"a secret of the engines"
BLOCK = 16
LIMIT_S = 120.0


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int


@asynccontextmanager
async def serving(
    model: Path,
    *,
    version: int = 1,
    secret: bytes | None = SECRET,
    block_tokens: int = BLOCK,
    cache_tokens: int = 16384,
) -> AsyncIterator[EngineClient]:
    """A whole engine behind real sockets, in this process."""
    core = EngineCore(EngineConfig(model, version, block_tokens, cache_tokens, prompt_tokens_per_step=64))
    exchange = None if secret is None else KvExchange(await TcpTransport.open(secret))
    server = EngineServer(core, exchange, secret or b"")
    runner = web.AppRunner(server.application(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with EngineClient(f"http://127.0.0.1:{port}", key=(secret or b"").decode()) as client:
            yield client
    finally:
        await server.close()
        await runner.cleanup()
        if exchange is not None:
            await exchange.close()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", "llama")


def prompt(length: int, salt: int = 0) -> list[int]:
    return [3 + (7 * i + i * i + salt * 13) % 300 for i in range(length)]


def whole_blocks(tokens: int) -> int:
    """Tokens of a sequence that can come from the cache: its last token is always computed."""
    return (tokens - 1) // BLOCK * BLOCK


def request(ids: list[int], max_new_tokens: int, *, version: int = 1, seed: int | None = None) -> GenerateRequest:
    temperature = 0.0 if seed is None else 1.0
    rid = uuid.uuid4().hex
    return GenerateRequest(rid, ids, max_new_tokens, temperature, seed=seed, version=version, ignore_eos=True)


async def sample(engine: EngineClient, wanted: GenerateRequest, stop_after: int | None = None) -> Answer:
    """The whole answer, or what there is once `stop_after` tokens have come and the request was aborted."""
    chunks: list[Chunk] = []

    async def stop() -> None:
        # Without a first token to wait for: a moment after the engine has the request, while it reads the prompt.
        if stop_after == 0:
            while not (await engine.loads()).running:  # noqa: ASYNC110 - the engine's state
                await asyncio.sleep(0)
        else:
            await enough.wait()
        await engine.abort(wanted.rid)

    enough = asyncio.Event()
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        stopping = None if stop_after is None else tasks.create_task(stop())
        async for chunk in engine.generate(wanted):
            chunks.append(chunk)
            if stop_after and sum(len(item.token_ids) for item in chunks) >= stop_after:
                enough.set()
        if stopping is not None and not enough.is_set():
            stopping.cancel()
    return Answer(
        [token for chunk in chunks for token in chunk.token_ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        chunks[-1].cached_tokens,
    )


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "sampled with a seed"])
async def test_requests_stopped_anywhere_and_continued_elsewhere_are_as_if_never_stopped(
    model: Path, seeded: bool
) -> None:
    """Stopped on A at random points, during the prompt too, moved together, continued on B."""
    noise, total = random.Random(3), 60

    async def stopped_and_continued(source: EngineClient, target: EngineClient, whole: Answer, index: int) -> None:
        ids, seed = prompts[index], index if seeded else None
        stop_after = noise.choice([0, 1, 15, 16, 17, 40])
        start = await sample(source, request(ids, total, seed=seed), stop_after)
        so_far = ids + start.token_ids
        assert len(start.token_ids) < total
        report = await move_prefix(source, target, so_far, 1, LIMIT_S)
        if start.token_ids:
            # Stopped while it read its prompt, it leaves the blocks it had come to; else all of them.
            assert report.reason == ""
        rest = await sample(target, request(so_far, total - len(start.token_ids), seed=seed))
        assert start.token_ids + rest.token_ids == whole.token_ids
        assert start.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        if start.token_ids:
            assert rest.cached_tokens == whole_blocks(len(so_far))

    prompts = [prompt(noise.randrange(1, 300), salt=index) for index in range(7)]
    async with serving(model) as reference, serving(model) as source, serving(model) as target:
        uninterrupted = [
            await sample(reference, request(ids, total, seed=index if seeded else None))
            for index, ids in enumerate(prompts)
        ]
        async with asyncio.TaskGroup() as tasks:
            for index, whole in enumerate(uninterrupted):
                tasks.create_task(stopped_and_continued(source, target, whole, index))


async def test_a_move_reports_what_moved_and_moves_nothing_twice(llama: Path) -> None:
    ids = prompt(100)
    async with serving(llama) as source, serving(llama) as target:
        await sample(source, request(ids, 1))
        first = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert (first.blocks, first.tokens, first.reason) == (6, 96, "")
        # 2 layers, keys and values, 2 heads of 16 floats a token.
        assert first.bytes == 6 * BLOCK * 2 * 2 * 2 * 16 * 4
        again = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert (again.blocks, again.bytes, again.reason) == (0, 0, "")
        longer = ids + prompt(40, salt=1)
        await sample(source, request(longer, 1))
        assert (await move_prefix(source, target, longer, 1, LIMIT_S)).blocks == 2, "only what the target lacks"


async def test_the_block_of_the_last_token_is_not_asked_for(llama: Path) -> None:
    """The last sampled token was never read: a prefix that ends with its block lacks that block's KV everywhere."""
    ids = prompt(40)
    async with serving(llama) as source, serving(llama) as target:
        answer = await sample(source, request(ids, 8))
        report = await move_prefix(source, target, ids + answer.token_ids, 1, LIMIT_S)
        assert (report.blocks, report.reason) == (2, "")
        assert (await move_prefix(source, target, [5], 1, LIMIT_S)).reason == ""


async def test_kv_of_another_version_is_refused_and_recomputed(llama: Path, tmp_path: Path) -> None:
    """C14: migration of version-1 KV to a version-2 engine."""
    other = make_model(tmp_path / "other", "llama", seed=5)
    ids = prompt(100)
    async with serving(llama) as source, serving(other, version=2) as target:
        await sample(source, request(ids, 4))
        before = await sample(target, request(ids, 10, version=2))
        await target.flush_cache()
        for version in (1, 2):
            report = await move_prefix(source, target, ids, version, LIMIT_S)
            assert report.blocks == 0
            assert "version" in report.reason
        after = await sample(target, request(ids, 10, version=2))
        assert after.cached_tokens == 0
        assert after.token_ids == before.token_ids


async def test_engines_of_another_layout_exchange_nothing(llama: Path) -> None:
    ids = prompt(100)
    async with serving(llama) as source, serving(llama, block_tokens=8) as target:
        await sample(source, request(ids, 4))
        report = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert report.blocks == 0
        assert "layouts differ" in report.reason


async def test_what_the_source_has_lost_is_recomputed(llama: Path) -> None:
    ids = prompt(100)
    async with serving(llama) as source, serving(llama) as target:
        whole = await sample(source, request(ids, 10))
        await source.flush_cache()
        await sample(source, request(ids[:50], 1))
        report = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert report.blocks == 3
        assert report.reason == "3 of 6 blocks were gone or found no room"
        answer = await sample(target, request(ids, 10))
        assert answer.cached_tokens == 48
        assert answer.token_ids == whole.token_ids


async def test_a_target_without_room_recomputes_and_the_source_goes_on(llama: Path) -> None:
    ids = prompt(200)
    async with serving(llama) as source, serving(llama, cache_tokens=256) as target:
        whole = await sample(source, request(ids, 10))
        # A live request holds half of the target's memory.
        busy = target.generate(request(prompt(100, salt=9), 60))
        await anext(busy)
        await target.pause("in_place")
        report = await move_prefix(source, target, ids, 1, LIMIT_S)
        assert 0 < report.blocks < 12
        assert "no room" in report.reason
        await target.resume()
        assert (await sample(target, request(ids, 10))).token_ids == whole.token_ids
        assert (await sample(source, request(ids, 10))).token_ids == whole.token_ids
        await busy.aclose()


@pytest.mark.parametrize("secret", [None, b"another secret entirely"], ids=["none", "another"])
async def test_engines_that_do_not_share_a_secret_exchange_nothing(llama: Path, secret: bytes | None) -> None:
    ids = prompt(100)
    async with serving(llama) as source, serving(llama, secret=secret) as target:
        await sample(source, request(ids, 4))
        for one, two in ((source, target), (target, source)):
            report = await move_prefix(one, two, ids, 1, LIMIT_S)
            assert report.blocks == 0
        assert (await sample(target, request(ids, 1))).cached_tokens == 0


async def test_memory_can_be_released_right_after_a_move_and_then_nothing_moves(llama: Path) -> None:
    ids = prompt(300)
    async with serving(llama) as source, serving(llama) as target:
        for salt in range(5):
            await source.resume_memory()
            await sample(source, request(prompt(300, salt), 1))
            assert (await move_prefix(source, target, prompt(300, salt), 1, LIMIT_S)).blocks == 18
            await source.release_memory()
        report = await move_prefix(source, target, prompt(301, salt=77), 1, LIMIT_S)
        assert (report.blocks, "released" in report.reason) == (0, True)
        report = await move_prefix(target, source, ids, 1, LIMIT_S)
        assert (report.blocks, "released" in report.reason) == (0, True)


async def test_a_source_that_is_frozen_or_killed_costs_no_more_than_the_deadline(llama: Path, tmp_path: Path) -> None:
    ids = prompt(200)
    (tmp_path / "secret").write_bytes(SECRET)
    with engine_process(tmp_path / "source", llama, "--secret-file", str(tmp_path / "secret")) as process:
        async with EngineClient(process.url, key=http_key(SECRET.decode())) as source, serving(llama) as target:
            whole = await sample(source, request(ids, 10))
            process.signal(signal.SIGSTOP)
            frozen = await move_prefix(source, target, ids, 1, 0.4)
            assert (frozen.blocks, frozen.reason) == (0, "not done within 0.4 s")
            # Its blocks can be asked for directly as well: the pull has a deadline of its own.
            lack = await target.kv_lack(ids, 1)
            pulled = await target.kv_pull(process.kv_address, lack.missing, 1, lack.layout, 0.3)
            assert (pulled.blocks, "within 0.3 s" in pulled.reason) == (0, True)
            process.signal(signal.SIGCONT)
            os.kill(process.process.pid, signal.SIGKILL)
            process.process.wait(LIMIT_S)
            killed = await move_prefix(source, target, ids, 1, LIMIT_S)
            assert killed.blocks == 0
            assert killed.reason
            answer = await sample(target, request(ids, 10))
            assert answer.cached_tokens == 0
            assert answer.token_ids == whole.token_ids
