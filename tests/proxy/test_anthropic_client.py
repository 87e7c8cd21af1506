"""The official `anthropic` client against the proxy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from gyre.proxy.journal_writer import read_journal
from gyre.trajectory.journal import CallStarted

from .conftest import Proxy, StartProxy
from .test_openai_client import ANSWERS, script

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


# ------------------------------------------------------------------------------------------ forms


async def test_every_body_and_event_is_what_the_official_types_say(client: anthropic.AsyncAnthropic) -> None:
    events: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    for text, limit in ((text, limit) for text in ANSWERS for limit in (100, 3)):
        asked = {"model": "m", "max_tokens": limit, "messages": ask(text), "tools": TOOLS}
        raw = await client.messages.with_raw_response.create(**asked)
        TypeAdapter(Message).validate_json(await raw.text(), strict=True)
        async with client.messages.with_streaming_response.create(**asked, stream=True) as response:
            blocks = (await response.text()).strip().split("\n\n")
        kinds = [events.validate_json(block.partition("\ndata: ")[2], strict=True).type for block in blocks]
        assert [f"event: {kind}" for kind in kinds] == [block.partition("\n")[0] for block in blocks]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


async def test_parallel_tool_uses_have_ids_of_their_own(client: anthropic.AsyncAnthropic, proxy: Proxy) -> None:
    messages = ask("Both.")
    answer = await client.messages.create(model="m", max_tokens=200, messages=messages, tools=TOOLS)
    assert [block.input["command"] for block in answer.content] == ["a", "b"]
    assert len({block.id for block in answer.content}) == 2
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "out"} for block in answer.content]
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "Say hello."}]},
    ]
    await client.messages.create(model="m", max_tokens=200, messages=messages, tools=TOOLS)
    assert len((await proxy.close("r1")).lineages) == 1


async def test_thinking_that_was_redacted_is_read_over(client: anthropic.AsyncAnthropic) -> None:
    turn = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Yes."}]
    messages = [*ask("a"), {"role": "assistant", "content": turn}, *ask("Say hello.")]
    answer = await client.messages.create(model="m", max_tokens=50, messages=messages)
    assert answer.content[0].text == "Hello there."


async def test_a_tool_choice_is_honoured_or_refused(client: anthropic.AsyncAnthropic, proxy: Proxy) -> None:
    for choice in ({"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}):
        await client.messages.create(model="m", max_tokens=9, messages=ask("List."), tools=TOOLS, tool_choice=choice)
    offered, not_offered = (
        "Run a command." in proxy.engines["a"].text(request["input_ids"]) for request in proxy.engines["a"].requests
    )
    assert (offered, not_offered) == (True, False)
    for choice in ({"type": "any"}, {"type": "tool", "name": "bash"}):
        with pytest.raises(anthropic.BadRequestError, match=r"tool_choice: .* no call can be forced; auto or none"):
            await client.messages.create(
                model="m", max_tokens=9, messages=ask("List."), tools=TOOLS, tool_choice=choice
            )


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
UNREAD = [
    ([IMAGE], "messages.0.content.0.type: 'image'"),
    ([{"type": "text", "text": "see"}, IMAGE], "messages.0.content.1.type: 'image'"),
    (
        [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}, IMAGE]}],
        "messages.0.content.0.content.1.type: 'image'",
    ),
    ([{"type": "document", "source": IMAGE["source"]}], "messages.0.content.0.type: 'document'"),
]


@pytest.mark.parametrize(("content", "where"), UNREAD)
async def test_what_is_no_text_is_refused_where_it_stands(
    client: anthropic.AsyncAnthropic, content: list, where: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
    assert caught.value.body["error"]["message"] == f"{where} is not supported; this model reads text only"


async def test_an_assistants_turn_is_not_continued(client: anthropic.AsyncAnthropic) -> None:
    messages = [*ask("Count."), {"role": "assistant", "content": "one two"}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.1: no assistant's turn is continued"):
        await client.messages.create(model="m", max_tokens=9, messages=messages)


async def test_models_are_listed_and_told_in_the_clients_own_form(client: anthropic.AsyncAnthropic) -> None:
    assert [model.id async for model in await client.models.list()] == ["byte-qwen"]
    # A harness asks for the name that it was given; every name is this model's.
    model = await client.models.retrieve("claude-any")
    assert (model.id, model.type) == ("claude-any", "model")
    raw = await client.models.with_raw_response.list()
    assert set(json.loads(await raw.text())) == {"data", "has_more", "first_id", "last_id"}


async def test_what_there_is_not_is_not_found(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.list()


async def test_a_body_over_the_limit_is_too_large(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(script, request_bytes=1000)
    await proxy.open("r1")
    async with anthropic.AsyncAnthropic(base_url=proxy.base("r1"), api_key="any", max_retries=0) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(model="m", max_tokens=5, messages=ask("x" * 2000))
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (413, "request_too_large")


async def test_unknown_fields_are_taken_and_kept_in_the_journal(client: anthropic.AsyncAnthropic, proxy: Proxy) -> None:
    extra = {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}, "output_config": {"effort": "x"}}
    await client.messages.create(model="m", max_tokens=9, messages=ask("List."), extra_body=extra, system="S")
    (folder,) = (proxy.gateway.config.journal_dir / "open").glob("*/*")
    (started,) = [record for record in read_journal(folder) if isinstance(record, CallStarted)]
    body = json.loads(started.request)["body"]
    assert body == {"model": "m", "max_tokens": 9, **extra}
