"""OpenAI Chat Completions.

Honoured: text in every role (system and developer messages stand where they were put), function tools, `tool_choice`
`auto` and `none`, `stop`, `max_tokens` and `max_completion_tokens`, `seed`, `reasoning_content` both ways. Behind an
assistant's turn at the list's end another one begins. Refused: images, audio and files, `n` over 1, tools that are no
functions, a tool choice that forces a call. All else is taken and kept in the journal; `parallel_tool_calls` and
`response_format` as wishes, `temperature` and `top_p` in favour of the run's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.proxy.conversation import Conversation, Finish, Message, Reply, Speaker, ToolCall, in_call_order
from gyre.proxy.dialects.openai_forms import openai_fault, openai_model
from gyre.proxy.dialects.shapes import (
    as_list,
    as_mapping,
    as_text,
    check_number,
    count_of,
    flag_of,
    offers_tools,
    quoted,
    seed_of,
    text_of,
    texts_of,
)
from gyre.proxy.faults import Fault, bad_request
from gyre.proxy.json_text import clean

_SPEAKERS = {
    "system": Speaker.SYSTEM,
    "developer": Speaker.SYSTEM,
    "user": Speaker.USER,
    "assistant": Speaker.ASSISTANT,
    "tool": Speaker.TOOL,
}


class OpenAIChat:
    name = "openai-chat"

    # ------------------------------------------------------------------------------------------ requests

    def parse(self, body: Mapping[str, Any]) -> Conversation:
        if (count_of(body, "n", 1) or 1) != 1:
            raise bad_request("n: only 1 is supported")
        check_number(body, "temperature", 0, 2)
        check_number(body, "top_p", 0, 1)
        listed = as_list(body.get("messages"), "messages")
        if not listed:
            raise bad_request("messages: at least one message is expected")
        messages = [_message(item, f"messages[{place}]") for place, item in enumerate(listed)]
        tools = [] if body.get("tools") is None else as_list(body["tools"], "tools")
        offered = tuple(_tool(item, f"tools[{place}]") for place, item in enumerate(tools))
        asked = [count_of(body, key, 1) for key in ("max_tokens", "max_completion_tokens")]
        limits = [limit for limit in asked if limit is not None]
        options = body.get("stream_options")
        return Conversation(
            messages=in_call_order(messages),
            tools=offered if offers_tools(body.get("tool_choice"), "tool_choice") else (),
            stop=texts_of(body, "stop", 16),
            max_tokens=min(limits, default=None),
            seed=seed_of(body, "seed"),
            stream=flag_of(body, "stream"),
            include_usage=options is not None and flag_of(as_mapping(options, "stream_options"), "include_usage"),
            model=text_of(body, "model", "model"),
        )

    def mint(self, stem: str, place: int) -> str:
        return f"call_{stem}{place:x}"

    def message_id(self, stem: str) -> str:
        return f"chatcmpl-{stem}"

    # ------------------------------------------------------------------------------------------ answers

    def body(self, reply: Reply) -> dict[str, Any]:
        answer = reply.answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.tool_calls else "")}
        message["refusal"] = None
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [_call(call) for call in answer.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}
        return {**_envelope(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def events(self, reply: Reply, *, include_usage: bool) -> list[bytes]:
        answer = reply.answer
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if answer.reasoning:
            deltas.append({"reasoning_content": answer.reasoning})
        if answer.text:
            deltas.append({"content": answer.text})
        deltas += [{"tool_calls": [{"index": place, **_call(call)}]} for place, call in enumerate(answer.tool_calls)]
        choices: list[list[Any]] = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
        choices.append([{"index": 0, "delta": {}, "finish_reason": _finish(reply)}])
        envelope = _envelope(reply, "chat.completion.chunk")
        if include_usage:
            envelope["usage"] = None
        chunks = [{**envelope, "choices": choice} for choice in choices]
        if include_usage:
            chunks.append({**envelope, "choices": [], "usage": _usage(reply)})
        return [*(_event(chunk) for chunk in chunks), b"data: [DONE]\n\n"]

    def model(self, name: str) -> dict[str, Any]:
        return openai_model(name)

    def models(self, name: str) -> dict[str, Any]:
        return {"object": "list", "data": [openai_model(name)]}

    def heartbeat(self) -> bytes:
        return b": held\n\n"

    # ------------------------------------------------------------------------------------------ faults

    def fault(self, fault: Fault) -> tuple[int, dict[str, Any]]:
        return openai_fault(fault, "messages")

    def fault_event(self, fault: Fault) -> bytes:
        return _event(self.fault(fault)[1])


def _message(item: object, field: str) -> Message:
    entry = as_mapping(item, field)
    role = text_of(entry, "role", f"{field}.role")
    speaker = _SPEAKERS.get(role)
    if speaker is None:
        raise bad_request(f"{field}.role: {quoted(role)} is not allowed; one of {', '.join(_SPEAKERS)}")
    calls: tuple[ToolCall, ...] = ()
    if speaker is Speaker.ASSISTANT and entry.get("tool_calls") is not None:
        listed = as_list(entry["tool_calls"], f"{field}.tool_calls")
        calls = tuple(_tool_call(call, f"{field}.tool_calls[{place}]") for place, call in enumerate(listed))
    content = entry.get("content")
    if content is None and speaker is not Speaker.ASSISTANT:
        raise bad_request(f"{field}.content: this field is required")
    reasoning = entry.get("reasoning_content") or entry.get("reasoning")
    return Message(
        speaker=speaker,
        text="" if content is None else _text(content, f"{field}.content"),
        reasoning=reasoning if speaker is Speaker.ASSISTANT and isinstance(reasoning, str) else "",
        tool_calls=calls,
        tool_call_id=text_of(entry, "tool_call_id", f"{field}.tool_call_id") if speaker is Speaker.TOOL else "",
        ids=tuple(call.id for call in calls),
    )


def _text(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for place, item in enumerate(as_list(content, field)):
        part = as_mapping(item, f"{field}[{place}]")
        kind = text_of(part, "type", f"{field}[{place}].type")
        if kind not in ("text", "refusal"):
            raise bad_request(f"{field}[{place}].type: {quoted(kind)} is not supported; this model reads text only")
        parts.append(as_text(part.get(kind), f"{field}[{place}].{kind}"))
    return "".join(parts)


def _tool_call(item: object, field: str) -> ToolCall:
    entry = as_mapping(item, field)
    function = as_mapping(entry.get("function"), f"{field}.function")
    return ToolCall(
        id=text_of(entry, "id", f"{field}.id", ""),
        name=text_of(function, "name", f"{field}.function.name"),
        arguments=text_of(function, "arguments", f"{field}.function.arguments", "{}"),
    )


def _tool(item: object, field: str) -> Mapping[str, Any]:
    entry = as_mapping(item, field)
    kind = text_of(entry, "type", f"{field}.type", "function")
    if kind != "function":
        raise bad_request(f"{field}.type: {quoted(kind)} is not supported; only functions are")
    function = as_mapping(entry.get("function"), f"{field}.function")
    text_of(function, "name", f"{field}.function.name")
    return {"type": "function", "function": dict(function)}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(reply: Reply) -> str:
    if reply.answer.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if reply.answer.tool_calls else "stop"


def _usage(reply: Reply) -> dict[str, Any]:
    answer = reply.answer
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


def _envelope(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.message_id, "object": kind, "created": reply.created_unix_s, "model": reply.model}


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + clean(chunk) + b"\n\n"
