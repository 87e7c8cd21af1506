"""Requests that are stopped on one real SGLang and continued on another: as if they had never been stopped.

The two engines are started once. The tests come in the order of what they do to the first: it is asked, put under
pressure, given other weights, frozen, and in the end killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine.tiny_models import make_model

from gyre.engine.access import http_key
from gyre.engine.client import EngineClient, EngineGone, EngineRefused, GenerateRequest
from gyre.kv_migrate.prefix import MoveReport, move_prefix
from real_sglang.pair import PAGE_TOKENS, SECRET, Engine, ready, start
from real_sglang.servers import MISSING

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

# In float32 the order in which a batch is added up moves no token's rank.
SHAPE = {
    "vocab_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TOTAL = 64
"""Tokens that each request samples."""
NOISE = 1e-4
"""The most that a recompute moves a log-prob."""
MOVE_S = 60.0
LIMIT_S = 240.0
SLOW_BYTES_S = 100_000.0
POOL_TOKENS = 12288
FLAGS = (
    *("--max-total-tokens", str(POOL_TOKENS), "--hicache-ratio", "1.25"),
    *("--chunked-prefill-size", "256", "--dtype", "float32"),
    "--enable-deterministic-inference",  # else it heeds no seed
)
ROOM = ("--hicache-ratio", "3")
"""Of the engine that takes all over at once. What arrives has to find room beside the pages that are on the device too, which
SGLang does not drop from the host's pool; and what is on its way may fill half of that pool. Else the rest is recomputed."""


@dataclass(frozen=True)
class Pair:
    a: Engine
    b: Engine
    folder: Path
    models: tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    models = (make_model(folder / "v1", seed=1, **SHAPE), make_model(folder / "v2", seed=2, **SHAPE))
    engines: list[Engine] = []
    try:
        for name, room in (("a", ()), ("b", ROOM)):
            engines.append(start(name, models[0], 1, folder, *FLAGS, *room))
        for engine in engines:
            ready(engine)
        yield Pair(engines[0], engines[1], folder, models)
    finally:
        for engine in engines:
            engine.end()


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    cached_tokens: int = -1


@asynccontextmanager
async def clients(pair: Pair) -> AsyncIterator[tuple[EngineClient, EngineClient]]:
    key = http_key(SECRET)
    async with (
        asyncio.timeout(LIMIT_S),
        EngineClient(pair.a.url, key=key) as a,
        EngineClient(pair.b.url, key=key) as b,
    ):
        yield a, b


async def sample(
    client: EngineClient,
    ids: Sequence[int],
    tokens: int,
    key: int,
    *,
    temperature: float = 0.0,
    seed: int | None = None,
    stop_after: int | None = None,
    into: Answer | None = None,
) -> Answer:
    """`key` is the version that the request is cached under. With `stop_after` it is stopped at so many tokens, with a
    `seed` it is sampled at temperature 1."""
    rid, answer, stopping = f"r{random.getrandbits(64):x}", into or Answer(), None
    temperature = temperature if seed is None else 1.0
    request = GenerateRequest(rid, list(ids), tokens, temperature, seed=seed, ignore_eos=True, version=key)
    if stop_after == 0:
        stopping = asyncio.ensure_future(_stop_while_it_reads(client, rid))
    async for chunk in client.generate(request):
        answer.token_ids += chunk.token_ids
        answer.logprobs += chunk.logprobs
        answer.cached_tokens = chunk.cached_tokens
        if stop_after and len(answer.token_ids) >= stop_after and stopping is None:
            stopping = asyncio.ensure_future(client.abort(rid))
    if stopping is not None and stop_after == 0:
        stopping.cancel()
    elif stopping is not None:
        await stopping
    return answer


async def _stop_while_it_reads(client: EngineClient, rid: str) -> None:
    """Again and again: the engine knows nothing of a request that has not come yet."""
    await asyncio.sleep(random.uniform(0.0, 0.1))
    while True:
        await client.abort(rid)
        await asyncio.sleep(0.02)


async def when_idle(order: Callable[[], Awaitable[None]]) -> None:
    """SGLang refuses to flush while it still writes to its host pool what a request has left."""
    while True:
        try:
            return await order()
        except EngineRefused:
            await asyncio.sleep(0.01)


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(3, SHAPE["vocab_size"]) for _ in range(tokens)]


def whole_blocks(tokens: int) -> int:
    """Of the prefix the last token is computed in any case."""
    return (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


@dataclass(frozen=True)
class Moved:
    start: Answer
    report: MoveReport
    rest: Answer
    whole: Answer


async def stopped_and_continued(
    a: EngineClient,
    b: EngineClient,
    whole: Answer,
    ids: list[int],
    stop_after: int,
    key: int = 1,
    seed: int | None = None,
) -> Moved:
    start = await sample(a, ids, TOTAL, key, seed=seed, stop_after=stop_after)
    so_far = ids + start.token_ids
    report = await move_prefix(a, b, so_far, key, MOVE_S)
    return Moved(start, report, await continued(b, so_far, start, key, seed), whole)


async def continued(b: EngineClient, so_far: list[int], start: Answer, key: int, seed: int | None = None) -> Answer:
    left = TOTAL - len(start.token_ids)
    return await sample(b, so_far, left, key, seed=seed) if left else Answer()


def as_if_never_stopped(moved: Moved) -> None:
    assert moved.start.token_ids + moved.rest.token_ids == moved.whole.token_ids
    assert moved.start.logprobs + moved.rest.logprobs == pytest.approx(moved.whole.logprobs, abs=NOISE)


async def all_whole(b: EngineClient, prompts: Sequence[list[int]], key: int, *, seeded: bool = False) -> list[Answer]:
    """What each gives when nothing stops it. Its cache is one of its own: no other request reads a key's pages."""
    seeds = range(len(prompts)) if seeded else [None] * len(prompts)
    asked = (sample(b, ids, TOTAL, key, seed=seed) for ids, seed in zip(prompts, seeds, strict=True))
    return list(await asyncio.gather(*asked))


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "at a temperature with a seed"])
async def test_twenty_requests_stopped_anywhere_are_continued_elsewhere(pair: Pair, seeded: bool) -> None:
    noise = random.Random(5)
    prompts = [prompt(20 * seeded + number, noise.randrange(20, 700)) for number in range(20)]
    stops = [noise.choice([0, 1, 7, 16, 17, 30]) for _ in prompts]
    async with clients(pair) as (a, b):
        whole = await all_whole(b, prompts, key=90 + seeded, seeded=seeded)
        moves = await asyncio.gather(
            *(
                stopped_and_continued(a, b, *request, seed=seed if seeded else None)
                for seed, request in enumerate(zip(whole, prompts, stops, strict=True))
            )
        )
    reading = 0
    for ids, moved in zip(prompts, moves, strict=True):
        as_if_never_stopped(moved)
        reading += not moved.start.token_ids
        if not moved.start.token_ids:
            assert moved.rest.cached_tokens == moved.report.tokens
        if 0 < len(moved.start.token_ids) < TOTAL:
            assert moved.report.reason == ""
            assert moved.rest.cached_tokens == whole_blocks(len(ids) + len(moved.start.token_ids))
    assert reading, "none was stopped while it read its prompt"
    assert any(moved.start.token_ids and moved.rest.token_ids for moved in moves)


async def test_requests_that_share_a_prefix_move_together(pair: Pair) -> None:
    shared = prompt(100, 320)
    prompts = [shared + prompt(seed, 50) for seed in range(101, 107)]
    async with clients(pair) as (a, b):
        whole = await all_whole(b, prompts, key=92)
        moves = await asyncio.gather(
            *(stopped_and_continued(a, b, answer, ids, 20) for answer, ids in zip(whole, prompts, strict=True))
        )
    for ids, moved in zip(prompts, moves, strict=True):
        as_if_never_stopped(moved)
        assert moved.rest.cached_tokens == whole_blocks(len(ids) + len(moved.start.token_ids))


async def test_sampled_tokens_have_the_log_probs_that_a_recompute_gives(pair: Pair) -> None:
    """At a temperature. Without a seed each request has noise of its own."""
    ids = prompt(200, 300)
    async with clients(pair) as (a, b):
        start = await sample(a, ids, TOTAL, 1, temperature=1.0, stop_after=20)
        so_far = ids + start.token_ids
        report = await move_prefix(a, b, so_far, 1, MOVE_S)
        rest = await sample(b, so_far, TOTAL - len(start.token_ids), 1, temperature=1.0)
        assert report.reason == ""
        assert rest.cached_tokens == whole_blocks(len(so_far))
        other = await sample(a, ids, TOTAL, 1, temperature=1.0)
        sampled = start.token_ids + rest.token_ids
        assert other.token_ids != sampled
        told = start.logprobs + rest.logprobs
        assert len(sampled) == TOTAL
        assert await scored(a, ids, sampled, key=93) == pytest.approx(told, abs=NOISE)


async def scored(client: EngineClient, ids: list[int], sampled: list[int], key: int) -> list[float]:
    """The log-prob of each sampled token after those before it, computed anew."""
    body = {
        "input_ids": ids + sampled,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": str(key),
    }
    answer = await client._post("/generate", body)  # pyright: ignore[reportPrivateUsage]
    return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][len(ids) :]]


async def test_a_source_under_pressure_evicts_what_it_likes_and_nothing_is_wrong(pair: Pair) -> None:
    prompts = [prompt(seed, 400) for seed in range(300, 308)]
    flood = [prompt(seed, 600) for seed in range(400, 430)]
    early = prompt(299, 400)
    async with clients(pair) as (a, b):
        await sample(a, early, 1, 1)
        while (await a.kv_lack(early, 1)).missing:  # noqa: ASYNC110 - another process' state
            await asyncio.sleep(0.05)
        whole = await all_whole(b, prompts, key=94)
        *moves, _ = await asyncio.gather(
            *(stopped_and_continued(a, b, answer, ids, 12) for answer, ids in zip(whole, prompts, strict=True)),
            asyncio.gather(*(sample(a, ids, 4, 1) for ids in flood)),
        )
        for moved in moves:
            as_if_never_stopped(moved)
        assert (await a.kv_lack(early, 1)).missing, "the pressure was too low to evict anything"


async def test_a_source_that_is_flushed_while_it_is_read_gives_nothing_wrong(pair: Pair) -> None:
    prompts = [prompt(seed, 300) for seed in range(450, 456)]
    async with clients(pair) as (a, b):
        whole = await all_whole(b, prompts, key=99)
        starts = await asyncio.gather(*(sample(a, ids, TOTAL, 1, stop_after=20) for ids in prompts))
        so_far = [ids + start.token_ids for ids, start in zip(prompts, starts, strict=True)]
        # The first goes ahead of the others, which take seconds.
        rates = (0.0, *[SLOW_BYTES_S] * (len(so_far) - 1))
        moves = [
            asyncio.ensure_future(move_prefix(a, b, ids, 1, MOVE_S, bytes_s))
            for ids, bytes_s in zip(so_far, rates, strict=True)
        ]
        await moves[0]
        assert not all(move.done() for move in moves), "none was being read any more"
        await when_idle(a.flush_cache)
        reports = await asyncio.gather(*moves)
        rests = await asyncio.gather(*(continued(b, *each, key=1) for each in zip(so_far, starts, strict=True)))
    assert reports[0].blocks
    assert any(report.reason for report in reports[1:]), "nothing was lost"
    for moved in map(Moved, starts, reports, rests, whole):
        as_if_never_stopped(moved)


async def test_kv_of_a_version_that_is_over_is_never_read(pair: Pair) -> None:
    """Stopped under version 1 on A, continued under version 2 on B: pages of both were in both pools, and among B's arrivals."""
    prompts = [prompt(seed, 200) for seed in range(500, 506)]
    async with clients(pair) as (a, b):
        starts = await asyncio.gather(*(sample(a, ids, TOTAL, 1, stop_after=20) for ids in prompts))
        so_far = [ids + start.token_ids for ids, start in zip(prompts, starts, strict=True)]
        moved = await asyncio.gather(*(move_prefix(a, b, ids, 1, MOVE_S) for ids in so_far))
        assert all(report.blocks for report in moved)
        await when_idle(lambda: b.update_weights(str(pair.models[1]), 2))
        assert (await move_prefix(a, b, so_far[0], 2, MOVE_S)).reason.endswith("the prefix is of version 2")
        await when_idle(lambda: a.update_weights(str(pair.models[1]), 2))
        whole = await all_whole(a, so_far, key=95)
        continued = await asyncio.gather(*(sample(b, ids, TOTAL, 2) for ids in so_far))
        for answer, right in zip(continued, whole, strict=True):
            assert answer.cached_tokens == 0
            assert answer.token_ids == right.token_ids
            assert answer.logprobs == pytest.approx(right.logprobs, abs=NOISE)
        # And what A has computed under the new version moves as before.
        ids = prompts[0] + prompt(507, 100)
        (right,) = await all_whole(a, [ids], key=96)
        moved_again = await stopped_and_continued(a, b, right, ids, 10, key=2)
        as_if_never_stopped(moved_again)
        assert moved_again.rest.cached_tokens == whole_blocks(len(ids) + len(moved_again.start.token_ids))


@pytest.mark.parametrize("all_of_it", [False, True], ids=["its schedulers", "all of it"])
async def test_a_frozen_source_is_given_up_when_it_is_silent(pair: Pair, all_of_it: bool) -> None:
    """The processes that sample hang, and the one that answers HTTP does not know it; or that hangs as well."""
    prompts = [prompt(seed, 200) for seed in range(620, 640) if (seed % 2 == 0) is all_of_it]
    async with clients(pair) as (a, b):
        whole = await all_whole(b, prompts, key=97)
        starts = await asyncio.gather(*(sample(a, ids, TOTAL, 2, stop_after=20) for ids in prompts))
        so_far = [ids + start.token_ids for ids, start in zip(prompts, starts, strict=True)]
        frozen = pair.a.processes() if all_of_it else pair.a.schedulers()
        for process in frozen:
            os.kill(process, signal.SIGSTOP)
        try:
            moving = (move_prefix(a, b, ids, 2, MOVE_S, silence_s=0.45) for ids in so_far)
            reports = await asyncio.gather(*moving)
            # one that began after another had waited in vain does not wait at all
            given_up = {f"{a.url} said nothing for 0.45 s", f"{a.url} said nothing a moment ago and is left alone"}
            assert {report.reason for report in reports} <= given_up
            assert "left alone" in (await move_prefix(a, b, so_far[0], 2, MOVE_S, silence_s=0.45)).reason
            rests = await asyncio.gather(*(continued(b, *each, key=2) for each in zip(so_far, starts, strict=True)))
        finally:
            for process in frozen:
                os.kill(process, signal.SIGCONT)
    for moved in map(Moved, starts, reports, rests, whole):
        as_if_never_stopped(moved)
        assert moved.rest.cached_tokens == 0


async def test_a_source_that_is_killed_while_it_samples_costs_a_recompute(pair: Pair) -> None:
    prompts = [prompt(seed, 200) for seed in range(700, 720)]
    async with clients(pair) as (a, b):
        whole = await all_whole(b, prompts, key=98)
        starts = [Answer() for _ in prompts]
        sampling = [
            asyncio.ensure_future(sample(a, ids, TOTAL, 2, into=start))
            for ids, start in zip(prompts, starts, strict=True)
        ]
        while sum(len(start.token_ids) for start in starts) < TOTAL:  # noqa: ASYNC110 - what the engine has sent
            await asyncio.sleep(0.01)
        pair.a.end()
        ends = await asyncio.gather(*sampling, return_exceptions=True)
        assert any(isinstance(end, EngineGone) for end in ends), "none was being sampled any more"
        so_far = [ids + start.token_ids for ids, start in zip(prompts, starts, strict=True)]
        reports = await asyncio.gather(*(move_prefix(a, b, ids, 2, MOVE_S) for ids in so_far))
        assert all(report.reason for report in reports)
        rests = await asyncio.gather(*(continued(b, *each, key=2) for each in zip(so_far, starts, strict=True)))
    for moved in map(Moved, starts, reports, rests, whole):
        as_if_never_stopped(moved)
