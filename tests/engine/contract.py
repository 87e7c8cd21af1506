"""What every sampling engine has to do for Gyre, through the client. Any engine joins by the `engine` fixture."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gyre.engine.client import Chunk, EngineRefused, GenerateRequest, VersionSpan

from .conftest import Answer, EngineUnderTest, collect
from .processes import LIMIT_S

LONG = 1500
"""Tokens of an answer that is still being sampled when the test acts on it."""


def new_rid() -> str:
    return uuid.uuid4().hex


def whole_blocks(engine: EngineUnderTest, tokens: int) -> int:
    """Tokens of a sequence that can come from the cache: the last token is always computed."""
    return (tokens - 1) // engine.block_tokens * engine.block_tokens


class Live:
    """A request whose stream is read in the background; `first` tokens have come when it is entered."""

    def __init__(self, engine: EngineUnderTest, request: GenerateRequest, first: int) -> None:
        self.request = request
        self._engine = engine
        self._first = first
        self._chunks: list[Chunk] = []
        self._grown = asyncio.Event()

    async def __aenter__(self) -> Live:
        self._task = asyncio.ensure_future(self._read())
        await self.has(self._first)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    @property
    def token_ids(self) -> list[int]:
        return collect(self._chunks).token_ids

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def has(self, tokens: int) -> None:
        """Return when so many tokens have come."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.token_ids) < tokens:
                self._grown.clear()
                await self._grown.wait()

    async def aborted(self) -> Answer:
        """What there is when it is aborted now."""
        await self._engine.client.abort(self.request.rid)
        return await self.answer()

    async def answer(self) -> Answer:
        async with asyncio.timeout(LIMIT_S):
            await self._task
        return collect(self._chunks)

    async def _read(self) -> None:
        async for chunk in self._engine.client.generate(self.request):
            self._chunks.append(chunk)
            self._grown.set()


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await holds():  # noqa: ASYNC110 - what is waited for is in another process
            await asyncio.sleep(0.02)


# ---------------------------------------------------------------------------------------------- sampling


async def test_an_answer_has_the_tokens_asked_for_each_with_its_logprob_and_version(engine: EngineUnderTest) -> None:
    answer = await engine.run(engine.request(new_rid(), max_new_tokens=12))
    assert len(answer.token_ids) == len(answer.logprobs) == 12
    assert all(logprob <= 0 for logprob in answer.logprobs)
    assert answer.last.finish is not None
    assert answer.last.finish.kind == "length"
    assert answer.last.version_spans == (VersionSpan(1, 0, 12),)
    assert answer.last.prompt_tokens == 40


async def test_only_the_last_chunk_has_a_finish_and_no_token_comes_twice(engine: EngineUnderTest) -> None:
    answer = await engine.run(engine.request(new_rid(), max_new_tokens=200))
    assert [chunk.finish is None for chunk in answer.chunks] == [True] * (len(answer.chunks) - 1) + [False]
    assert len(answer.chunks) > 5, "tokens are streamed as they come"
    assert len(answer.token_ids) == 200


async def test_tokens_gather_for_as_long_as_they_may_but_for_the_first_and_the_last(engine: EngineUnderTest) -> None:
    answer = await engine.run(engine.request(new_rid(), max_new_tokens=200, stream_interval=16))
    sizes = [len(chunk.token_ids) for chunk in answer.chunks]
    assert sum(sizes) == 200
    assert sizes[0] < 16, "the first token is there at once"
    assert len(sizes) <= 2 + 200 // 16
    assert answer.last.version_spans == (VersionSpan(1, 0, 200),)


async def test_what_has_gathered_is_there_when_a_request_is_aborted(engine: EngineUnderTest) -> None:
    async with Live(engine, engine.request(new_rid(), max_new_tokens=LONG, stream_interval=LONG), first=1) as live:
        await asyncio.sleep(0.1)
        await engine.client.abort(live.request.rid)
        stopped = await live.answer()
    assert stopped.last.finish is not None
    assert stopped.last.finish.kind == "abort"
    assert len(stopped.token_ids) > 1


async def test_a_stop_token_ends_the_answer_and_is_its_last_token(engine: EngineUnderTest) -> None:
    # SGLang looks at no stop token where it ignores the model's own.
    free = await engine.run(engine.request(new_rid(), max_new_tokens=12, ignore_eos=False))
    stop = free.token_ids[5]
    answer = await engine.run(engine.request(new_rid(), max_new_tokens=12, ignore_eos=False, stop_token_ids=[stop]))
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert answer.last.finish is not None
    assert (answer.last.finish.kind, answer.last.finish.matched) == ("stop", stop)


async def test_greedy_answers_repeat_and_the_second_reads_its_prefix_from_the_cache(engine: EngineUnderTest) -> None:
    first = await engine.run(engine.request(new_rid(), 100))
    second = await engine.run(engine.request(new_rid(), 100))
    assert second.token_ids == first.token_ids
    assert first.last.cached_tokens == 0
    assert second.last.cached_tokens == whole_blocks(engine, 100)


async def test_the_next_call_of_a_dialog_reads_prompt_and_answer_from_the_cache(engine: EngineUnderTest) -> None:
    request = engine.request(new_rid(), 50, max_new_tokens=40)
    first = await engine.run(request)
    # The answer's last token has no KV yet: it was sampled and never read.
    dialog = [*request.input_ids, *first.token_ids]
    second = await engine.run(engine.request(new_rid(), [*dialog, 5, 6, 7]))
    assert second.last.cached_tokens == whole_blocks(engine, len(dialog))


async def test_requests_sampled_together_give_what_each_gives_alone(engine: EngineUnderTest) -> None:
    prompts = [[3 + (i * 31 + j * (i + 3)) % 290 for j in range(5 + 11 * i)] for i in range(12)]
    together = await asyncio.gather(*(engine.run(engine.request(new_rid(), prompt)) for prompt in prompts))
    await engine.client.flush_cache()
    alone = [await engine.run(engine.request(new_rid(), prompt)) for prompt in prompts]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


async def test_a_prompt_longer_than_the_context_is_refused_and_the_engine_goes_on(engine: EngineUnderTest) -> None:
    with pytest.raises(EngineRefused) as refusal:
        await engine.run(engine.request(new_rid(), 4000))
    assert refusal.value.status == 400
    assert len((await engine.run(engine.request(new_rid()))).token_ids) == 12


# ---------------------------------------------------------------------------------------------- stopping


async def test_an_aborted_request_keeps_its_tokens_and_its_prefix_stays_in_the_cache(engine: EngineUnderTest) -> None:
    async with Live(engine, engine.request(new_rid(), 60, max_new_tokens=LONG), first=50) as live:
        await engine.client.abort(live.request.rid)
        stopped = await live.answer()
    assert stopped.last.finish is not None
    assert stopped.last.finish.kind == "abort"
    assert 50 <= len(stopped.token_ids) == len(stopped.logprobs) < LONG
    so_far = [*live.request.input_ids, *stopped.token_ids]
    rest = await engine.run(engine.request(new_rid(), so_far, max_new_tokens=30))
    assert rest.last.cached_tokens == whole_blocks(engine, len(so_far))
    whole = await engine.run(engine.request(new_rid(), 60, max_new_tokens=len(stopped.token_ids) + 30))
    assert stopped.token_ids + rest.token_ids == whole.token_ids


async def test_aborting_a_request_that_is_not_there_is_no_error(engine: EngineUnderTest) -> None:
    await engine.client.abort(new_rid())


async def test_abort_all_ends_every_request(engine: EngineUnderTest) -> None:
    async with (
        Live(engine, engine.request(new_rid(), 20, max_new_tokens=LONG), first=3) as one,
        Live(engine, engine.request(new_rid(), 30, max_new_tokens=LONG), first=3) as two,
    ):
        await engine.client.abort_all()
        finishes = [(await live.answer()).last.finish for live in (one, two)]
    assert [finish.kind for finish in finishes if finish] == ["abort", "abort"]


async def test_a_client_that_goes_away_frees_its_place(engine: EngineUnderTest) -> None:
    async def one_runs() -> bool:
        return (await engine.client.loads()).running == 1

    async def idle() -> bool:
        loads = await engine.client.loads()
        return loads.running == loads.waiting == 0

    async with Live(engine, engine.request(new_rid(), max_new_tokens=LONG), first=3):
        await eventually(one_runs)  # SGLang counts every few steps
    await eventually(idle)


# ---------------------------------------------------------------------------------------------- pausing


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_request_goes_on_as_if_nothing_had_been(engine: EngineUnderTest, mode: str) -> None:
    async with Live(engine, engine.request(new_rid(), 60, max_new_tokens=LONG), first=20) as live:
        await engine.client.pause(mode)  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        reached = len(live.token_ids)
        await asyncio.sleep(0.1)
        assert len(live.token_ids) == reached, "nothing is sampled while paused"
        assert not live.ended
        await engine.client.resume()
        await live.has(reached + 30)
        stopped = await live.aborted()
    whole = await engine.run(engine.request(new_rid(), 60, max_new_tokens=len(stopped.token_ids)))
    assert stopped.token_ids == whole.token_ids


async def test_pausing_by_abort_ends_requests_and_holds_new_ones_until_resumed(engine: EngineUnderTest) -> None:
    async with Live(engine, engine.request(new_rid(), max_new_tokens=LONG), first=5) as live:
        await engine.client.pause("abort")
        finish = (await live.answer()).last.finish
        assert finish is not None
        assert finish.kind == "abort"
    async with Live(engine, engine.request(new_rid()), first=0) as held:
        await asyncio.sleep(0.2)
        assert held.token_ids == []
        await engine.client.resume()
        assert len((await held.answer()).token_ids) == 12


async def test_the_cache_is_not_flushed_under_a_request_that_is_paused_in_place(engine: EngineUnderTest) -> None:
    async with Live(engine, engine.request(new_rid(), max_new_tokens=LONG), first=5):
        await engine.client.pause("in_place")
        with pytest.raises(EngineRefused):
            await engine.client.flush_cache()


# ---------------------------------------------------------------------------------------------- weights and memory


async def test_new_weights_are_reported_and_sampled_from_and_old_kv_is_a_miss(engine: EngineUnderTest) -> None:
    """C14: a prefix cached under version 1, asked under version 2."""
    old = await engine.run(engine.request(new_rid(), 100))
    await engine.client.update_weights(str(engine.other_model), 2)
    assert (await engine.client.info()).version == 2
    new = await engine.run(engine.request(new_rid(), 100, version=2))
    assert new.last.cached_tokens == 0
    assert new.last.version_spans == (VersionSpan(2, 0, 12),)
    assert new.token_ids != old.token_ids
    await engine.client.update_weights(str(engine.model), 3)
    back = await engine.run(engine.request(new_rid(), 100, version=3))
    assert back.last.cached_tokens == 0
    assert back.token_ids == old.token_ids


async def test_a_key_of_another_version_is_a_miss(engine: EngineUnderTest) -> None:
    await engine.run(engine.request(new_rid(), 100, version=1))
    other = await engine.run(engine.request(new_rid(), 100, version=7))
    assert other.last.cached_tokens == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_an_update_under_a_paused_request_shows_in_its_version_spans(engine: EngineUnderTest, mode: str) -> None:
    async with Live(engine, engine.request(new_rid(), 60, max_new_tokens=LONG), first=20) as live:
        await engine.client.pause(mode)  # type: ignore[arg-type]
        if mode == "in_place" and not engine.updates_in_place:
            with pytest.raises(EngineRefused):
                await engine.client.update_weights(str(engine.other_model), 2)
        else:
            await engine.client.update_weights(str(engine.other_model), 2)
        reached = len(live.token_ids)
        await engine.client.resume()
        await live.has(reached + 30)
        answer = await live.aborted()
    first, *then = answer.last.version_spans
    assert (first.version, first.start) == (1, 0)
    if mode == "in_place" and not engine.updates_in_place:
        assert (first.end, then) == (len(answer.token_ids), [])
    else:
        assert 20 <= first.end < len(answer.token_ids)
        assert then == [VersionSpan(2, first.end, len(answer.token_ids))]


async def test_weights_that_cannot_be_read_are_refused_and_the_old_ones_stay(engine: EngineUnderTest) -> None:
    before = await engine.run(engine.request(new_rid()))
    with pytest.raises(EngineRefused):
        await engine.client.update_weights(str(engine.model / "nowhere"), 2)
    assert (await engine.client.info()).version == 1
    assert (await engine.run(engine.request(new_rid()))).token_ids == before.token_ids


async def test_the_folder_of_weights_in_shared_memory_may_go_once_they_are_loaded(engine: EngineUnderTest) -> None:
    before = await engine.run(engine.request(new_rid()))
    with TemporaryDirectory(dir="/dev/shm") as folder:
        model = shutil.copytree(engine.other_model, Path(folder) / "v00000002")
        await engine.client.update_weights(str(model), 2)
        loaded = await engine.run(engine.request(new_rid(), version=2))
    after = await engine.run(engine.request(new_rid(), 80, version=2))
    again = await engine.run(engine.request(new_rid(), version=2))
    assert after.last.version_spans[0].version == 2
    assert again.token_ids == loaded.token_ids != before.token_ids
    await engine.client.release_memory()
    await engine.client.resume_memory()
    await engine.client.update_weights(str(engine.model), 3)
    assert (await engine.run(engine.request(new_rid(), version=3))).token_ids == before.token_ids


async def test_memory_released_and_resumed_serves_again(engine: EngineUnderTest) -> None:
    before = await engine.run(engine.request(new_rid(), 100))
    await engine.client.release_memory()
    await engine.client.resume_memory()
    await engine.client.update_weights(str(engine.model), 2)
    after = await engine.run(engine.request(new_rid(), 100, version=2))
    assert after.token_ids == before.token_ids
    assert after.last.cached_tokens == 0


async def test_a_flushed_cache_is_empty(engine: EngineUnderTest) -> None:
    await engine.run(engine.request(new_rid(), 100))
    await engine.client.flush_cache()
    assert (await engine.run(engine.request(new_rid(), 100))).last.cached_tokens == 0


async def test_an_idle_engine_is_healthy_and_says_what_it_serves(engine: EngineUnderTest) -> None:
    await engine.client.health()
    info = await engine.client.info()
    assert (info.version, info.model_path) == (1, str(engine.model))
    loads = await engine.client.loads()
    assert (loads.running, loads.waiting) == (0, 0)
