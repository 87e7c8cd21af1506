"""The official `openai` client against the proxy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from .conftest import Proxy, StartProxy

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
ANSWERS = {
    "Say hello.": "Hello there.",
    "List.": 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
    "Both.": '<tool_call>\n{"name": "bash", "arguments": {"command": "a"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "b"}}\n</tool_call>',
    "Broken.": "Now:<tool_call>\n{not json}\n</tool_call>",
    "Think.": "<think>\nIt is simple.\n</think>\n\nYes.",
    "Count.": "one two three four",
}


def script(head: str) -> str:
    last = head.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return ANSWERS.get(last, "Done.")


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    proxy = await start_proxy(script, thinking=True)
    await proxy.open("r1")
    return proxy


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{proxy.base('r1')}/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_text_answer_with_its_usage(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="policy", messages=ask("Say hello."))
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "policy"
    assert answer.usage is not None
    # One token a byte, and the turn's end.
    assert answer.usage.completion_tokens == len("Hello there.") + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_tool_call_and_the_turn_after_it(client: openai.AsyncOpenAI, proxy: Proxy) -> None:
    messages: list = ask("List.")
    answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is not None
    assert message.content.strip() == "I look."
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("bash", {"command": "ls"})
    messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "a.txt"}]
    answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "Done."
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    trace = await proxy.close("r1")
    assert (trace.calls, len(trace.lineages)) == (2, 1)


async def test_parallel_tool_calls_have_ids_of_their_own(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="m", messages=ask("Both."), tools=TOOLS)
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments)["command"] for call in calls] == ["a", "b"]
    assert len({call.id for call in calls}) == 2


async def test_a_malformed_tool_call_is_text_that_the_harness_can_see(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="m", messages=ask("Broken."), tools=TOOLS)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == "Now:<tool_call>\n{not json}\n</tool_call>"


async def test_thinking_comes_apart_from_the_text(client: openai.AsyncOpenAI) -> None:
    message = (await client.chat.completions.create(model="m", messages=ask("Think."))).choices[0].message
    assert message.content == "Yes."
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "It is simple."


async def test_a_stream_holds_the_same_answer_and_its_usage(client: openai.AsyncOpenAI) -> None:
    for text in ("Say hello.", "List.", "Both."):
        whole = await client.chat.completions.create(model="m", messages=ask(text), tools=TOOLS)
        text_parts: list[str] = []
        calls: dict[int, list[str]] = {}
        reasons: list[str] = []
        usage = None
        stream = await client.chat.completions.create(
            model="m", messages=ask(text), tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text_parts.append(choice.delta.content or "")
                for call in choice.delta.tool_calls or []:
                    assert call.function is not None
                    calls.setdefault(call.index, []).append(f"{call.id}{call.function.name}{call.function.arguments}")
                reasons += [choice.finish_reason] if choice.finish_reason else []
        message = whole.choices[0].message
        assert "".join(text_parts) == (message.content or "")
        expected = [f"{call.id}{call.function.name}{call.function.arguments}" for call in message.tool_calls or []]
        assert ["".join(parts) for _, parts in sorted(calls.items())] == expected
        assert reasons == [whole.choices[0].finish_reason]
        assert usage == whole.usage


async def test_max_tokens_cuts_the_answer_and_says_so(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="m", messages=ask("Count."), max_tokens=7)
    assert answer.choices[0].message.content == "one two"
    assert answer.choices[0].finish_reason == "length"


async def test_a_stop_sequence_ends_the_answer_before_it(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="m", messages=ask("Count."), stop=[" three", "zzz"])
    assert answer.choices[0].message.content == "one two"
    assert answer.choices[0].finish_reason == "stop"


async def test_the_model_list_names_one_model(client: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["byte-qwen"]


async def test_a_wrong_key_is_an_authentication_error(proxy: Proxy) -> None:
    base = proxy.base("r1")[:-1] + "x"
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=ask("Say hello."))
    assert (await proxy.close("r1")).tree_tokens == 0


async def test_a_prompt_over_the_context_is_the_error_that_makes_harnesses_compact(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(script, context_tokens=100)
    await proxy.open("r1")
    async with openai.AsyncOpenAI(base_url=f"{proxy.base('r1')}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=ask("x" * 200))
        assert caught.value.code == "context_length_exceeded"
        assert "This model's maximum context length is 100 tokens" in caught.value.message
        # A prompt that leaves room for one token is answered with one token.
        answer = await client.chat.completions.create(model="m", messages=ask("y" * (99 - FRAME_TOKENS)))
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (99, 1)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=ask("y" * (100 - FRAME_TOKENS)))


FRAME_TOKENS = 1 + len("user\n") + 1 + len("\n") + 1 + len("assistant\n") + 1 + 2 + 1 + 2
"""Of a prompt with one user's message, with the empty thought that stands before an answer without thinking."""


async def test_more_than_one_choice_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="n: only 1 is supported"):
        await client.chat.completions.create(model="m", messages=ask("Say hello."), n=2)


# ------------------------------------------------------------------------------------------ forms


async def test_every_body_and_chunk_is_what_the_official_types_say(client: openai.AsyncOpenAI) -> None:
    for text, limit in ((text, limit) for text in ANSWERS for limit in (100, 3)):
        asked = {"model": "m", "messages": ask(text), "tools": TOOLS, "max_completion_tokens": limit}
        raw = await client.chat.completions.with_raw_response.create(**asked)
        TypeAdapter(ChatCompletion).validate_json(raw.text, strict=True)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with client.chat.completions.with_streaming_response.create(**asked, **options) as response:
            *chunks, done = (await response.text()).strip().split("\n\n")
        assert done == "data: [DONE]"
        for chunk in chunks:
            TypeAdapter(ChatCompletionChunk).validate_json(chunk.removeprefix("data: "), strict=True)


async def test_reasoning_tokens_are_counted_and_reasoning_may_come_back(
    client: openai.AsyncOpenAI, proxy: Proxy
) -> None:
    answer = await client.chat.completions.create(model="m", messages=ask("Think."))
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("\nIt is simple.\n") + 2
    said = answer.choices[0].message.model_dump(exclude_none=True)
    await client.chat.completions.create(model="m", messages=[*ask("Think."), said, *ask("Say hello.")])
    assert len((await proxy.close("r1")).lineages) == 1


async def test_developer_and_system_messages_stand_where_they_were_put(
    client: openai.AsyncOpenAI, proxy: Proxy
) -> None:
    messages: list = [
        {"role": "developer", "content": "First."},
        *ask("a"),
        {"role": "developer", "content": [{"type": "text", "text": "Second."}]},
        {"role": "system", "content": "Third."},
        *ask("Say hello."),
    ]
    answer = await client.chat.completions.create(model="m", messages=messages)
    assert answer.choices[0].message.content == "Hello there."
    text = proxy.engines["a"].text(proxy.engines["a"].requests[0]["input_ids"])
    assert text.index("First.") < text.index("user\na") < text.index("Second.") < text.index("Third.")


async def test_a_tool_choice_is_honoured_or_refused(client: openai.AsyncOpenAI, proxy: Proxy) -> None:
    for choice in ("auto", "none"):
        await client.chat.completions.create(
            model="m", messages=ask("Count."), tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
        )
    offered, not_offered = (
        "Run a command." in proxy.engines["a"].text(request["input_ids"]) for request in proxy.engines["a"].requests
    )
    assert (offered, not_offered) == (True, False)
    for choice in ("required", {"type": "function", "function": {"name": "bash"}}):
        with pytest.raises(openai.BadRequestError, match=r"tool_choice: .* no call can be forced; auto or none"):
            await client.chat.completions.create(model="m", messages=ask("List."), tools=TOOLS, tool_choice=choice)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}, "messages[0].content[1].type"),
        ({"role": "tool", "tool_call_id": "c", "content": [IMAGE]}, "messages[0].content[0].type"),
    ],
)
async def test_what_is_no_text_is_refused_where_it_stands(
    client: openai.AsyncOpenAI, message: dict, where: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=[message])
    assert caught.value.body["message"] == f"{where}: 'image_url' is not supported; this model reads text only"


async def test_behind_an_assistants_turn_another_begins_with_its_tokens_kept(
    client: openai.AsyncOpenAI, proxy: Proxy
) -> None:
    first = await client.chat.completions.create(model="m", messages=ask("Say hello."))
    said = {"role": "assistant", "content": first.choices[0].message.content}
    await client.chat.completions.create(model="m", messages=[*ask("Say hello."), said])
    assert len((await proxy.close("r1")).lineages) == 1


async def test_a_model_is_told_by_the_name_that_was_asked_for(client: openai.AsyncOpenAI) -> None:
    model = await client.models.retrieve("any-name")
    assert (model.id, model.object) == ("any-name", "model")
    raw = await client.models.with_raw_response.list()
    assert set(json.loads(raw.text)) == {"object", "data"}


async def test_what_there_is_not_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="m", input="x")


async def test_a_body_over_the_limit_is_too_large(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(script, request_bytes=1000)
    await proxy.open("r1")
    async with openai.AsyncOpenAI(base_url=f"{proxy.base('r1')}/v1", api_key="any", max_retries=0) as client:
        for asking in (
            client.chat.completions.create(model="m", messages=ask("x" * 2000)),
            client.responses.create(model="m", input="x" * 2000),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                await asking
            assert caught.value.status_code == 413
