"""The official `anthropic` client against the proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import pytest

from .conftest import Proxy, StartProxy
from .test_openai_client import script

TOOLS: list = [{"name": "bash", "description": "Run a command.", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    proxy = await start_proxy(script, thinking=True)
    await proxy.open("r1")
    return proxy


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=proxy.base("r1"), api_key="any", max_retries=0) as client:
        yield client


def ask(text: str) -> list:
    return [{"role": "user", "content": text}]


async def test_a_text_answer_with_its_usage(client: anthropic.AsyncAnthropic) -> None:
    answer = await client.messages.create(model="policy", max_tokens=100, system="Be kind.", messages=ask("Say hello."))
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == "Hello there."
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    assert answer.usage.output_tokens == len("Hello there.") + 1


async def test_a_tool_use_and_the_turn_after_it(client: anthropic.AsyncAnthropic, proxy: Proxy) -> None:
    messages = ask("List.")
    answer = await client.messages.create(model="m", max_tokens=100, messages=messages, tools=TOOLS)
    assert answer.stop_reason == "tool_use"
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    use = answer.content[1]
    assert use.input == {"command": "ls"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "a.txt"}]}
    messages += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    answer = await client.messages.create(model="m", max_tokens=100, messages=messages, tools=TOOLS)
    assert answer.content[0].text == "Done."
    assert answer.usage.cache_read_input_tokens
    trace = await proxy.close("r1")
    assert (trace.calls, len(trace.lineages)) == (2, 1)


async def test_thinking_comes_as_a_signed_block_and_may_come_back(
    client: anthropic.AsyncAnthropic, proxy: Proxy
) -> None:
    messages = ask("Think.")
    answer = await client.messages.create(model="m", max_tokens=100, messages=messages)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "It is simple."
    assert answer.content[0].signature
    messages += [{"role": "assistant", "content": [block.model_dump() for block in answer.content]}, *ask("And?")]
    await client.messages.create(model="m", max_tokens=100, messages=messages)
    assert len((await proxy.close("r1")).lineages) == 1


async def test_a_stream_holds_the_same_answer(client: anthropic.AsyncAnthropic) -> None:
    for text in ("Say hello.", "List.", "Both.", "Think."):
        whole = await client.messages.create(model="m", max_tokens=100, messages=ask(text), tools=TOOLS)
        async with client.messages.stream(model="m", max_tokens=100, messages=ask(text), tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
        assert [block.model_dump(exclude={"parsed_output"}) for block in streamed.content] == [
            block.model_dump() for block in whole.content
        ]
        assert (streamed.id, streamed.stop_reason, streamed.usage.output_tokens) == (
            whole.id,
            whole.stop_reason,
            whole.usage.output_tokens,
        )


async def test_a_stop_sequence_is_named(client: anthropic.AsyncAnthropic) -> None:
    answer = await client.messages.create(model="m", max_tokens=100, messages=ask("Count."), stop_sequences=["three"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one two ", "stop_sequence", "three")


async def test_max_tokens_is_said(client: anthropic.AsyncAnthropic) -> None:
    answer = await client.messages.create(model="m", max_tokens=3, messages=ask("Count."))
    assert (answer.content[0].text, answer.stop_reason) == ("one", "max_tokens")


async def test_tokens_are_counted_without_a_call(client: anthropic.AsyncAnthropic, proxy: Proxy) -> None:
    counted = await client.messages.count_tokens(model="m", messages=ask("Say hello."))
    answer = await client.messages.create(model="m", max_tokens=5, messages=ask("Say hello."))
    assert counted.input_tokens == answer.usage.input_tokens
    assert (await proxy.close("r1")).calls == 1


async def test_a_system_message_may_stand_in_the_middle(client: anthropic.AsyncAnthropic) -> None:
    messages = [*ask("a"), {"role": "system", "content": [{"type": "text", "text": "note"}]}, *ask("Say hello.")]
    answer = await client.messages.create(model="m", max_tokens=50, messages=messages)
    assert answer.content[0].text == "Hello there."


async def test_a_prompt_over_the_context_is_the_error_that_makes_harnesses_compact(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(script, context_tokens=100)
    await proxy.open("r1")
    async with anthropic.AsyncAnthropic(base_url=proxy.base("r1"), api_key="any", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 100 maximum"):
            await client.messages.create(model="m", max_tokens=5, messages=ask("x" * 200))


async def test_a_wrong_key_is_an_authentication_error(proxy: Proxy) -> None:
    async with anthropic.AsyncAnthropic(base_url=proxy.base("r1") + "x", api_key="any", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="m", max_tokens=5, messages=ask("Say hello."))
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "no such run, or not its key"},
    }


async def test_the_greeting_and_the_beta_query_are_answered(proxy: Proxy) -> None:
    async with proxy.http.head(f"{proxy.base('r1')}/api/hello") as response:
        assert response.status == 200
    status, _ = await proxy.post("r1", "messages?beta=true", {"model": "m", "max_tokens": 5, "messages": ask("List.")})
    assert status == 200
