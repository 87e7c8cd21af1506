"""The official `openai` client against the proxy's Responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gyre.proxy.dialects.openai_responses import OpenAIResponses
from gyre.proxy.faults import Fault, FaultKind

from .conftest import Proxy, StartProxy
from .test_openai_client import ANSWERS

BASH = {
    "type": "function",
    "name": "bash",
    "description": "Run a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "spawn_agent", "parameters": {"type": "object", "properties": {}}},
        {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}},
    ],
}
TOOLS: Any = [BASH, PATCH, AGENTS, {"type": "web_search", "external_web_access": False}]
SAID = {
    **ANSWERS,
    "Patch.": '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+é"}}\n</tool_call>',
    "Odd patch.": '<tool_call>\n{"name": "apply_patch", "arguments": {"patch": "x"}}\n</tool_call>',
    "Spawn.": '<tool_call>\n{"name": "spawn_agent", "arguments": {"message": "look"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "multi_agent_v1__bash", "arguments": {}}\n</tool_call>',
    "All.": "<think>\nAll of it.\n</think>\n\nI look.\n" + ANSWERS["Both."],
}


def script(head: str) -> str:
    last = head.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return SAID.get(last, "Done.")


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> Proxy:
    proxy = await start_proxy(script, thinking=True)
    await proxy.open("r1")
    return proxy


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{proxy.base('r1')}/v1", api_key="any", max_retries=0) as client:
        yield client


def back(answer: Response) -> list[Any]:
    """The answer's items as a harness sends them back."""
    return [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]


def result(item: Any, output: Any) -> dict[str, Any]:
    kind = "custom_tool_call_output" if item.type == "custom_tool_call" else "function_call_output"
    return {"type": kind, "call_id": item.call_id, "output": output}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


# ------------------------------------------------------------------------------------------ answers


async def test_a_text_answer_with_its_usage(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="policy", input="Say hello.", instructions="Be kind.", store=False)
    assert answer.output_text == "Hello there."
    assert (answer.status, answer.model, answer.object) == ("completed", "policy", "response")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("Hello there.") + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_every_body_is_what_the_official_types_say(client: openai.AsyncOpenAI) -> None:
    for text in SAID:
        raw = await client.responses.with_raw_response.create(model="m", input=text, tools=TOOLS)
        TypeAdapter(Response).validate_json(raw.text, strict=True)


async def test_reasoning_text_and_parallel_calls_are_items_in_order(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="m", input="All.", tools=TOOLS)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = answer.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.summary] == ["All of it."]
    assert reasoning.encrypted_content
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    assert message.content[0].text.strip() == "I look."
    assert first.type == second.type == "function_call"
    assert [json.loads(call.arguments) for call in (first, second)] == [{"command": "a"}, {"command": "b"}]
    assert len({item.id for item in answer.output} | {first.call_id, second.call_id}) == 6
    assert answer.usage is not None
    thought = len("\nAll of it.\n") + 2  # a tag is one token
    assert answer.usage.output_tokens_details.reasoning_tokens == thought


async def test_calls_come_back_under_the_names_that_the_harness_gave(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="m", input="Spawn.", tools=TOOLS)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.namespace, call.name) for call in calls] == [
        ("multi_agent_v1", "spawn_agent"),
        ("multi_agent_v1", "bash"),
    ]
    answer = await client.responses.create(model="m", input="List.", tools=TOOLS)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.namespace, call.name) == (None, "bash")


async def test_a_custom_tool_is_called_with_text(client: openai.AsyncOpenAI) -> None:
    for text, given in (("Patch.", "*** Begin\n+é"), ("Odd patch.", '{"patch": "x"}')):
        answer = await client.responses.create(model="m", input=text, tools=TOOLS)
        (call,) = answer.output
        assert call.type == "custom_tool_call"
        assert (call.name, call.input) == ("apply_patch", given)


async def test_max_output_tokens_leaves_the_answer_incomplete(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="m", input="Count.", max_output_tokens=7)
    assert (answer.output_text, answer.status) == ("one two", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


# ------------------------------------------------------------------------------------------ streams


async def test_a_stream_holds_the_same_answer(client: openai.AsyncOpenAI) -> None:
    for text in SAID:
        whole = await client.responses.create(model="m", input=text, tools=TOOLS)
        async with client.responses.stream(model="m", input=text, tools=TOOLS) as stream:
            streamed = await stream.get_final_response()
        assert streamed.model_dump(exclude={"output"}) == whole.model_dump(exclude={"output"})
        assert back(streamed) == back(whole)


async def test_every_event_is_what_the_official_types_say_and_they_are_numbered(client: openai.AsyncOpenAI) -> None:
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    for text, limit in ((text, limit) for text in SAID for limit in (None, 3)):
        asked: dict[str, Any] = {"model": "m", "input": text, "tools": TOOLS, "max_output_tokens": limit}
        kinds: list[str] = []
        async with client.responses.with_streaming_response.create(**asked, stream=True) as response:
            blocks = (await response.text()).strip().split("\n\n")
        for number, block in enumerate(blocks):
            name, _, data = block.partition("\ndata: ")
            event = adapter.validate_json(data, strict=True)
            assert (f"event: {event.type}", event.sequence_number) == (name, number)
            kinds.append(event.type)
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] in ("response.completed", "response.incomplete")
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")


@pytest.mark.parametrize("named", [None, 100])
async def test_an_answer_cut_at_the_runs_own_limit_is_complete(proxy: Proxy, named: int | None) -> None:
    url = await proxy.open("short", max_tokens=7)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        answer = await client.responses.create(model="m", input="Count.", max_output_tokens=named)
    assert (answer.output_text, answer.status) == ("one two", "completed")


async def test_a_cut_stream_ends_as_incomplete(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model="m", input="Count.", max_output_tokens=3, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "one"


# ------------------------------------------------------------------------------------------ histories


async def test_an_answer_that_comes_back_as_items_is_one_turn_of_one_lineage(
    client: openai.AsyncOpenAI, proxy: Proxy
) -> None:
    items: list[Any] = [{"role": "developer", "content": "Rules."}, user("All.")]
    for turn in range(3):
        answer = await client.responses.create(model="m", input=items, tools=TOOLS, instructions="Main.")
        items += back(answer)
        calls = [item for item in answer.output if item.type == "function_call"]
        items += [result(call, [{"type": "input_text", "text": f"out {turn}"}]) for call in calls] or [user("All.")]
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens > 0
    session = proxy.session("r1")
    assert not session.tree.forks
    assert len(session.tree.calls) == 3
    trace = await proxy.close("r1")
    assert (trace.calls, len(trace.lineages)) == (3, 1)


KEPT: list[Any] = [
    lambda items: [item for item in items if item["type"] != "reasoning"],
    lambda items: [{key: value for key, value in item.items() if key != "id"} for item in items],
    lambda items: [items[0], *items[2:], items[1]],  # the message behind the calls
    lambda items: [items[0], {**items[0], "summary": []}, *items[1:]],  # an item kept from a stream that broke
]


@pytest.mark.parametrize("kept", KEPT)
async def test_a_turn_is_known_whatever_becomes_of_its_items(
    client: openai.AsyncOpenAI, proxy: Proxy, kept: Any
) -> None:
    answer = await client.responses.create(model="m", input=[user("All.")], tools=TOOLS)
    results = [result(item, "out") for item in answer.output if item.type == "function_call"]
    await client.responses.create(model="m", input=[user("All."), *kept(back(answer)), *results], tools=TOOLS)
    tree = proxy.session("r1").tree
    first, then = tree.calls
    known = tree.prompt_ids(first) + tree.output_ids(first)
    assert tree.prompt_ids(then)[: len(known)] == known


async def test_results_between_the_calls_of_one_answer_do_not_split_it(
    client: openai.AsyncOpenAI, proxy: Proxy
) -> None:
    answer = await client.responses.create(model="m", input=[user("Both.")], tools=TOOLS)
    first, second = back(answer)
    outs = [result(item, text) for item, text in zip(answer.output, ("one", "two"), strict=True)]
    await client.responses.create(model="m", input=[user("Both."), first, outs[0], second, outs[1]], tools=TOOLS)
    assert not proxy.session("r1").tree.forks
    tree = proxy.session("r1").tree
    text = proxy.engines["a"].text(list(tree.prompt_ids(tree.calls[-1])))
    assert text.index("one") < text.index("two")
    assert len((await proxy.close("r1")).lineages) == 1


async def test_custom_and_namespaced_calls_of_a_foreign_history_are_read(
    client: openai.AsyncOpenAI, proxy: Proxy
) -> None:
    items: list[Any] = [
        user("go"),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "xyz"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "+a"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        {"type": "function_call", "call_id": "c2", "name": "bash", "namespace": "multi_agent_v1", "arguments": ""},
        {"type": "function_call_output", "call_id": "c2", "output": ""},
        {"role": "assistant", "content": [{"type": "output_text", "text": "So far."}]},
        {"role": "system", "content": "Note."},
    ]
    await client.responses.create(model="m", input=items, tools=TOOLS)
    tree = proxy.session("r1").tree
    text = proxy.engines["a"].text(list(tree.prompt_ids(tree.calls[0])))
    assert '{"name": "apply_patch", "arguments": {"input": "+a"}}' in text
    assert '{"name": "multi_agent_v1__bash", "arguments": {}}' in text
    assert "<|im_start|>assistant\n" in text
    assert text.index("So far.") < text.index("Note.")
    assert "This lark" not in text
    assert "follows this lark grammar:\\nstart: /.+/" in text
    assert "web_search" not in text


# ------------------------------------------------------------------------------------------ what cannot be


async def test_too_long_a_prompt_is_the_error_that_makes_harnesses_compact(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(script, context_tokens=100)
    await proxy.open("r1")
    async with openai.AsyncOpenAI(base_url=f"{proxy.base('r1')}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="x" * 200)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


async def test_a_wrong_key_is_an_authentication_error(proxy: Proxy) -> None:
    async with openai.AsyncOpenAI(base_url=f"{proxy.base('r1')}x/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.responses.create(model="m", input="Say hello.")


async def test_what_is_not_kept_cannot_be_had_again(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="m", input="Say hello.")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: it is not supported; no response is kept"):
        await client.responses.create(model="m", input="More.", previous_response_id=answer.id)


REFUSED: list[Any] = [
    ({"input": []}, "input: at least one item is expected"),
    ({"input": None}, "input: an array is expected, not null"),
    ({"instructions": ["x"]}, "instructions: a string is expected, not an array"),
    ({"background": True}, "background: true is not supported"),
    ({"conversation": "c"}, "conversation: it is not supported; no response is kept here"),
    ({"max_output_tokens": -5}, "max_output_tokens: -5 is not allowed; at least 1"),
    ({"tools": [{"type": "local_shell"}]}, "tools[0].type: 'local_shell' is not supported; offer it as a function"),
    ({"tool_choice": "required"}, "tool_choice: 'required' is not supported, no call can be forced"),
    ({"tool_choice": {"type": "function", "name": "bash"}}, "tool_choice: 'function' is not supported"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role: 'robot' is not allowed"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: 'item_reference' is not supported"),
    (
        {"input": [user("x"), {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[1].content[0].type: 'input_image' is not supported; this model reads text only",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        "input[0].output[0].type: 'input_image' is not supported; this model reads text only",
    ),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id: this field is required"),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary: an array is expected, not a string"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
async def test_what_cannot_be_is_named(proxy: Proxy, fields: dict[str, Any], message: str) -> None:
    status, answer = await proxy.post("r1", "responses", {"model": "m", "input": "x", **fields})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["param"] == message.partition(":")[0]
    assert answer["error"]["message"].startswith(message), answer


async def test_tools_may_be_withheld_and_wishes_are_taken(client: openai.AsyncOpenAI, proxy: Proxy) -> None:
    wishes: Any = {
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
    }
    await client.responses.create(model="m", input="Say hello.", tools=TOOLS, tool_choice="none", **wishes)
    text = proxy.engines["a"].text(proxy.engines["a"].requests[0]["input_ids"])
    assert "Run a command." not in text


async def test_a_fault_in_a_stream_is_an_error_to_the_client_and_a_failed_response_to_others() -> None:
    data = OpenAIResponses().fault_event(Fault(FaultKind.CLOSED, "the run is closed"))
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    error, failed = (adapter.validate_json(block.partition(b"\ndata: ")[2]) for block in data.strip().split(b"\n\n"))
    assert (error.type, error.code, error.message) == ("error", "run_closed", "the run is closed")
    assert failed.type == "response.failed"


async def test_an_answer_behind_an_assistants_turn_of_another_is_recognised(
    client: openai.AsyncOpenAI, proxy: Proxy
) -> None:
    asked: list[Any] = [{"role": "user", "content": "Do."}, {"role": "assistant", "content": "Yes."}]
    for _ in range(2):
        answer = await client.responses.create(model="m", input=asked)
        asked = [*asked, *back(answer), {"role": "user", "content": "Go on."}]
    trace = await proxy.close("r1")
    assert (trace.calls, trace.forks, len(trace.lineages)) == (2, {}, 1)
