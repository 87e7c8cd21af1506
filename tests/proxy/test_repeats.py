"""An equal request is answered by the call that it repeats, where that call's answer is one to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from .conftest import Proxy, StartProxy

ANSWERS = {"Count.": "one two three four", "Say nothing.": ""}


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    proxy = await start_proxy(lambda head: ANSWERS[head.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]])
    await proxy.open("r1")
    return proxy


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{proxy.base('r1')}/v1", api_key="any", max_retries=0) as client:
        yield client


async def answers(client: openai.AsyncOpenAI, text: str, *limits: int | None) -> list[str]:
    """The ids of the answers to the same request, asked with each of these limits."""
    found: list[str] = []
    for limit in limits:
        answer = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], max_tokens=limit
        )
        assert answer.usage is not None
        assert limit is None or answer.usage.completion_tokens <= limit
        found.append(answer.id)
    return found


async def test_a_whole_answer_is_given_again_whatever_more_is_allowed(client: openai.AsyncOpenAI) -> None:
    first, *others = await answers(client, "Count.", 50, 60, None)
    assert set(others) == {first}


async def test_a_request_that_allows_less_has_an_answer_of_its_own(client: openai.AsyncOpenAI) -> None:
    long, short, again = await answers(client, "Count.", 50, 5, 5)
    assert short != long
    assert again == short


async def test_an_empty_answer_that_the_harness_had_is_sampled_anew(client: openai.AsyncOpenAI, proxy: Proxy) -> None:
    assert len(set(await answers(client, "Say nothing.", None, None, None))) == 3
    trace = await proxy.close("r1")
    assert trace.forks == {"retry": 2}
    assert trace.faults == ()
