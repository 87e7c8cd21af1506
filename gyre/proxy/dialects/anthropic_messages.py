"""Anthropic Messages.

Honoured: text in every role (system messages in the middle of the list too), thinking both ways, tools, `tool_choice`
`auto` and `none`, `stop_sequences`, `max_tokens`, `count_tokens`. Refused: images and documents, in tool results as
well, a tool choice that forces a call, a list that ends with an assistant's turn: none is continued; tools that the client
runs and whose schema the server would know (`bash_…`, `computer_…`, `memory_…`, `text_editor_…`). Left out: tools that
a server runs, thinking that was redacted. All else is taken and kept in the journal; `thinking`, `output_config`
and `disable_parallel_tool_use` as wishes, `temperature` and `top_p` in favour of the run's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gyre.proxy.conversation import Conversation, Finish, Message, Reply, Speaker, ToolCall, in_call_order
from gyre.proxy.dialects.shapes import (
    as_list,
    as_mapping,
    as_text,
    check_number,
    count_of,
    flag_of,
    offers_tools,
    quoted,
    text_of,
    texts_of,
)
from gyre.proxy.faults import Fault, FaultKind, bad_request
from gyre.proxy.json_text import clean

_SPEAKERS = {"system": Speaker.SYSTEM, "user": Speaker.USER, "assistant": Speaker.ASSISTANT}
_RUN_BY_THE_CLIENT = ("bash_", "computer_", "memory_", "text_editor_")
"""How the kinds of tool begin whose schema only Anthropic's own models know; the others without one run at a server."""
_FAULTS = {
    FaultKind.BAD_REQUEST: (400, "invalid_request_error"),
    FaultKind.TOO_LONG: (400, "invalid_request_error"),
    FaultKind.UNAUTHORIZED: (401, "authentication_error"),
    FaultKind.NOT_FOUND: (404, "not_found_error"),
    FaultKind.CLOSED: (410, "invalid_request_error"),
    FaultKind.TOO_LARGE: (413, "request_too_large"),
    FaultKind.UNAVAILABLE: (503, "api_error"),
}
_FINISH = {Finish.STOP: "end_turn", Finish.STOP_SEQUENCE: "stop_sequence", Finish.LENGTH: "max_tokens"}


class AnthropicMessages:
    name = "anthropic-messages"

    # ------------------------------------------------------------------------------------------ requests

    def parse(self, body: Mapping[str, Any]) -> Conversation:
        return self._parse(body, count_of(body, "max_tokens", 1), required=True)

    def parse_count(self, body: Mapping[str, Any]) -> Conversation:
        """The conversation of a `count_tokens` body, which has no limit of its own."""
        return self._parse(body, None, required=False)

    def _parse(self, body: Mapping[str, Any], max_tokens: int | None, *, required: bool) -> Conversation:
        if required and max_tokens is None:
            raise bad_request("max_tokens: this field is required")
        check_number(body, "temperature", 0, 1)
        check_number(body, "top_p", 0, 1)
        messages: list[Message] = []
        system = body.get("system")
        if system is not None:
            messages.append(Message(Speaker.SYSTEM, _joined(_texts(system, "system"))))
        listed = as_list(body.get("messages"), "messages")
        if not listed:
            raise bad_request("messages: at least one message is expected")
        for place, item in enumerate(listed):
            messages += _messages(item, f"messages.{place}")
        if required and messages[-1].speaker is Speaker.ASSISTANT:
            raise bad_request(
                f"messages.{len(listed) - 1}: no assistant's turn is continued; the list must not end with one"
            )
        tools = () if body.get("tools") is None else _tools(body["tools"])
        return Conversation(
            messages=in_call_order(messages),
            tools=tools if offers_tools(body.get("tool_choice"), "tool_choice") else (),
            stop=texts_of(body, "stop_sequences", 64),
            max_tokens=max_tokens,
            seed=None,
            stream=flag_of(body, "stream"),
            include_usage=True,
            model=text_of(body, "model", "model"),
        )

    def mint(self, stem: str, place: int) -> str:
        return f"toolu_{stem}{place:x}"

    def message_id(self, stem: str) -> str:
        return f"msg_{stem}"

    # ------------------------------------------------------------------------------------------ answers

    def body(self, reply: Reply) -> dict[str, Any]:
        return {**_envelope(reply), "content": _blocks(reply), **_end(reply), "usage": _usage(reply)}

    def events(self, reply: Reply, *, include_usage: bool) -> list[bytes]:
        usage = _usage(reply)
        start = {**_envelope(reply), "content": [], "stop_reason": None, "stop_sequence": None}
        events = [_event("message_start", {"message": {**start, "usage": {**usage, "output_tokens": 0}}})]
        for place, block in enumerate(_blocks(reply)):
            empty, deltas = _parts(block)
            events.append(_event("content_block_start", {"index": place, "content_block": empty}))
            events += [_event("content_block_delta", {"index": place, "delta": delta}) for delta in deltas]
            events.append(_event("content_block_stop", {"index": place}))
        events.append(_event("message_delta", {"delta": _end(reply), "usage": usage}))
        events.append(_event("message_stop", {}))
        return events

    def model(self, name: str) -> dict[str, Any]:
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

    def models(self, name: str) -> dict[str, Any]:
        return {"data": [self.model(name)], "has_more": False, "first_id": name, "last_id": name}

    def heartbeat(self) -> bytes:
        return _event("ping", {})

    # ------------------------------------------------------------------------------------------ faults

    def fault(self, fault: Fault) -> tuple[int, dict[str, Any]]:
        status, kind = _FAULTS[fault.kind]
        message = str(fault)
        if fault.kind is FaultKind.TOO_LONG:
            message = f"prompt is too long: {fault.prompt_tokens} tokens > {fault.context_tokens} maximum"
        return status, {"type": "error", "error": {"type": kind, "message": message}}

    def fault_event(self, fault: Fault) -> bytes:
        return _event("error", {"error": self.fault(fault)[1]["error"]})


def _messages(item: object, field: str) -> list[Message]:
    """One entry of the list; a user's entry with tool results becomes a message for each, and one for its text."""
    entry = as_mapping(item, field)
    role = text_of(entry, "role", f"{field}.role")
    speaker = _SPEAKERS.get(role)
    if speaker is None:
        raise bad_request(f"{field}.role: {quoted(role)} is not allowed; one of {', '.join(_SPEAKERS)}")
    content = entry.get("content")
    if speaker is Speaker.ASSISTANT:
        return [_assistant(content, f"{field}.content")]
    results: list[Message] = []
    if isinstance(content, list) and speaker is Speaker.USER:
        rest: list[Any] = []
        for place, block in enumerate(as_list(content, field)):
            if isinstance(block, dict) and as_mapping(block, field).get("type") == "tool_result":
                results.append(_tool_result(as_mapping(block, field), f"{field}.content.{place}"))
            else:
                rest.append(block)
        if results and not rest:
            return results
        content = rest
    return [*results, Message(speaker, _joined(_texts(content, f"{field}.content")))]


def _assistant(content: object, field: str) -> Message:
    if isinstance(content, str):
        return Message(Speaker.ASSISTANT, content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    ids: list[str] = []
    for place, item in enumerate(as_list(content, field)):
        at = f"{field}.{place}"
        block = as_mapping(item, at)
        kind = text_of(block, "type", f"{at}.type")
        if kind == "text":
            texts.append(as_text(block.get("text"), f"{at}.text"))
        elif kind == "thinking":
            thoughts.append(text_of(block, "thinking", f"{at}.thinking", ""))
            ids.append(text_of(block, "signature", f"{at}.signature", ""))
        elif kind == "tool_use":
            arguments = json.dumps(as_mapping(block.get("input"), f"{at}.input"), ensure_ascii=False)
            calls.append(ToolCall(text_of(block, "id", f"{at}.id"), text_of(block, "name", f"{at}.name"), arguments))
        elif kind != "redacted_thinking":
            raise bad_request(f"{at}.type: {quoted(kind)} is not supported in an assistant's message")
    return Message(
        speaker=Speaker.ASSISTANT,
        text="".join(texts),
        reasoning="".join(thoughts),
        tool_calls=tuple(calls),
        ids=(*(call.id for call in calls), *(name for name in ids if name)),
    )


def _tool_result(block: Mapping[str, Any], field: str) -> Message:
    content = block.get("content")
    text = "" if content is None else _joined(_texts(content, f"{field}.content"))
    return Message(Speaker.TOOL, text, tool_call_id=text_of(block, "tool_use_id", f"{field}.tool_use_id"))


def _texts(content: object, field: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts: list[str] = []
    for place, item in enumerate(as_list(content, field)):
        at = f"{field}.{place}"
        block = as_mapping(item, at)
        kind = text_of(block, "type", f"{at}.type")
        if kind != "text":
            raise bad_request(f"{at}.type: {quoted(kind)} is not supported; this model reads text only")
        texts.append(as_text(block.get("text"), f"{at}.text"))
    return texts


def _joined(texts: list[str]) -> str:
    return "\n".join(text for text in texts if text)


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """The client's own tools. A server tool (`web_search_…`) is left out; there is no server here to run it."""
    tools: list[Mapping[str, Any]] = []
    for place, item in enumerate(as_list(value, "tools")):
        entry = as_mapping(item, f"tools.{place}")
        function: dict[str, Any] = {"name": text_of(entry, "name", f"tools.{place}.name")}
        if "input_schema" not in entry:
            kind = text_of(entry, "type", f"tools.{place}.type", "custom")
            if kind.startswith(_RUN_BY_THE_CLIENT):
                raise bad_request(
                    f"tools.{place}.type: {quoted(kind)} is not supported; offer it as a tool with an input_schema"
                )
            if kind != "custom":
                continue
            raise bad_request(f"tools.{place}.input_schema: this field is required")
        function["description"] = text_of(entry, "description", f"tools.{place}.description", "")
        function["parameters"] = as_mapping(entry["input_schema"], f"tools.{place}.input_schema")
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    answer = reply.answer
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": reply.message_id})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


def _parts(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and the deltas that fill it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _end(reply: Reply) -> dict[str, Any]:
    answer = reply.answer
    reason = _FINISH[answer.finish]
    if answer.tool_calls and answer.finish is Finish.STOP:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": answer.stop_sequence or None}


def _usage(reply: Reply) -> dict[str, int]:
    answer = reply.answer
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
    }


def _envelope(reply: Reply) -> dict[str, Any]:
    return {"id": reply.message_id, "type": "message", "role": "assistant", "model": reply.model}


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    payload = clean({"type": name, **data})
    return b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"
