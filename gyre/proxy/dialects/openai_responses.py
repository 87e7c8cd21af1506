"""OpenAI Responses, without a memory at the server: each request brings its whole history.

Honoured: instructions, text in every item and role, function tools, custom tools (the model is given a function with
the one argument `input`), namespaces, `tool_choice` `auto` and `none`, `max_output_tokens`. Refused: what would need
stored responses (`previous_response_id`, `conversation`, `prompt`, `background`), images and files, a tool choice that
forces a call, tools of the harness with call forms of their own. Left out: tools that a server runs. All else is taken
and kept in the journal, `parallel_tool_calls`, `text.format` and `reasoning` as wishes among it. An answer does not
repeat the request's own fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gyre.proxy.conversation import Conversation, Finish, Message, Reply, Speaker, ToolCall, ToolForm, in_call_order
from gyre.proxy.dialects.openai_forms import openai_fault, openai_model
from gyre.proxy.dialects.responses_input import Tools, read_input, read_tools
from gyre.proxy.dialects.shapes import as_text, check_number, count_of, flag_of, offers_tools, text_of
from gyre.proxy.faults import Fault, FaultKind, bad_request
from gyre.proxy.json_text import clean

_STORED = ("previous_response_id", "conversation", "prompt")
_ANSWER_ID = "resp_"
_CALL_ID = "call_"


class OpenAIResponses:
    name = "openai-responses"

    # ------------------------------------------------------------------------------------------ requests

    def parse(self, body: Mapping[str, Any]) -> Conversation:
        for key in _STORED:
            if body.get(key) is not None:
                raise bad_request(f"{key}: it is not supported; no response is kept here, send the whole history")
        if flag_of(body, "background"):
            raise bad_request("background: true is not supported; no response is kept here")
        check_number(body, "temperature", 0, 2)
        check_number(body, "top_p", 0, 1)
        tools = read_tools(body["tools"]) if body.get("tools") is not None else Tools((), {})
        messages: list[Message] = []
        if body.get("instructions") is not None:
            messages.append(Message(Speaker.SYSTEM, as_text(body["instructions"], "instructions")))
        messages += read_input(body.get("input"), tools, _ANSWER_ID)
        if not messages:
            raise bad_request("input: at least one item is expected")
        return Conversation(
            messages=in_call_order(messages),
            tools=tools.offered if offers_tools(body.get("tool_choice"), "tool_choice") else (),
            stop=(),
            max_tokens=count_of(body, "max_output_tokens", 1),
            seed=None,
            stream=flag_of(body, "stream"),
            include_usage=True,
            model=text_of(body, "model", "model"),
            forms=tools.forms,
        )

    def mint(self, stem: str, place: int) -> str:
        return f"{_CALL_ID}{stem}{place:x}"

    def message_id(self, stem: str) -> str:
        return f"{_ANSWER_ID}{stem}"

    # ------------------------------------------------------------------------------------------ answers

    def body(self, reply: Reply) -> dict[str, Any]:
        output = list(_output(reply))
        if not _cut_as_asked(reply):
            return {**_envelope(reply, "completed"), "output": output, "usage": _usage(reply)}
        cut = {"incomplete_details": {"reason": "max_output_tokens"}}
        return {**_envelope(reply, "incomplete"), **cut, "output": output, "usage": _usage(reply)}

    def events(self, reply: Reply, *, include_usage: bool) -> list[bytes]:
        whole = self.body(reply)
        begun = _envelope(reply, "in_progress")
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for place, item in enumerate(whole["output"]):
            events += _item_events(item, place)
        events.append({"type": f"response.{whole['status']}", "response": whole})
        return [_event({**event, "sequence_number": number}) for number, event in enumerate(events)]

    def model(self, name: str) -> dict[str, Any]:
        return openai_model(name)

    def models(self, name: str) -> dict[str, Any]:
        return {"object": "list", "data": [openai_model(name)]}

    def heartbeat(self) -> bytes:
        return b": held\n\n"

    # ------------------------------------------------------------------------------------------ faults

    def fault(self, fault: Fault) -> tuple[int, dict[str, Any]]:
        return openai_fault(fault, "input")

    def fault_event(self, fault: Fault) -> bytes:
        """An `error`, at which the official clients raise, and the `response.failed` that others wait for."""
        error = self.fault(fault)[1]["error"]
        said = {"code": error["code"], "message": error["message"], "param": error["param"]}
        code = "server_error" if fault.kind is FaultKind.UNAVAILABLE else "invalid_prompt"
        failed = {
            **_empty(f"{_ANSWER_ID}failed", 0, "", "failed"),
            "error": {"code": code, "message": error["message"]},
        }
        return _event({"type": "error", **said, "error": error, "sequence_number": 0}) + _event(
            {"type": "response.failed", "response": failed, "sequence_number": 1}
        )


def _cut_as_asked(reply: Reply) -> bool:
    """Whether the answer ends at the request's own limit. One that ends at the run's is told as complete: codex names no
    limit, asks again where an answer is incomplete, would be told the same, and give up."""
    answer = reply.answer
    return answer.finish is Finish.LENGTH and reply.max_tokens is not None and answer.output_tokens >= reply.max_tokens


def _envelope(reply: Reply, status: str) -> dict[str, Any]:
    return _empty(reply.message_id, reply.created_unix_s, reply.model, status)


def _empty(name: str, created_unix_s: int, model: str, status: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "response",
        "created_at": created_unix_s,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _output(reply: Reply) -> Iterator[dict[str, Any]]:
    answer = reply.answer
    stem = reply.message_id.removeprefix(_ANSWER_ID)
    if answer.reasoning:
        yield {
            "id": f"rs_{stem}",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": answer.reasoning}],
            "encrypted_content": reply.message_id,
        }
    if answer.text:
        yield {
            "id": f"msg_{stem}",
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if _cut_as_asked(reply) and not answer.tool_calls else "completed",
            "content": [_text_part(answer.text)],
        }
    for call in answer.tool_calls:
        yield _call(call, reply.forms.get(call.name, ToolForm(call.name)))


def _call(call: ToolCall, form: ToolForm) -> dict[str, Any]:
    tail = call.id.removeprefix(_CALL_ID)
    named: dict[str, Any] = {"call_id": call.id, "name": form.name, "status": "completed"}
    if form.namespace:
        named["namespace"] = form.namespace
    if form.freeform:
        return {"id": f"ctc_{tail}", "type": "custom_tool_call", **named, "input": _freeform_input(call.arguments)}
    return {"id": f"fc_{tail}", "type": "function_call", **named, "arguments": call.arguments}


def _freeform_input(arguments: str) -> str:
    """The text that a freeform tool is given; arguments in another form are that text as they are."""
    value = json.loads(arguments)
    text = value.get("input")
    return text if isinstance(text, str) and len(value) == 1 else arguments


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item_events(item: Mapping[str, Any], place: int) -> Iterator[dict[str, Any]]:
    """An item as it is added, filled and done."""
    at: dict[str, Any] = {"item_id": item["id"], "output_index": place}
    match item["type"]:
        case "reasoning":
            text = item["summary"][0]["text"]
            empty = {**item, "summary": []}
            part = {**at, "summary_index": 0}
            filled = [
                {"type": "response.reasoning_summary_part.added", **part, "part": {"type": "summary_text", "text": ""}},
                {"type": "response.reasoning_summary_text.delta", **part, "delta": text},
                {"type": "response.reasoning_summary_text.done", **part, "text": text},
                {"type": "response.reasoning_summary_part.done", **part, "part": item["summary"][0]},
            ]
        case "message":
            text = item["content"][0]["text"]
            empty = {**item, "status": "in_progress", "content": []}
            part = {**at, "content_index": 0}
            filled = [
                {"type": "response.content_part.added", **part, "part": _text_part("")},
                {"type": "response.output_text.delta", **part, "delta": text, "logprobs": []},
                {"type": "response.output_text.done", **part, "text": text, "logprobs": []},
                {"type": "response.content_part.done", **part, "part": item["content"][0]},
            ]
        case "custom_tool_call":
            empty = {**item, "status": "in_progress", "input": ""}
            filled = [
                {"type": "response.custom_tool_call_input.delta", **at, "delta": item["input"]},
                {"type": "response.custom_tool_call_input.done", **at, "input": item["input"]},
            ]
        case _:
            empty = {**item, "status": "in_progress", "arguments": ""}
            done = {**at, "name": item["name"], "arguments": item["arguments"]}
            filled = [
                {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]},
                {"type": "response.function_call_arguments.done", **done},
            ]
    yield {"type": "response.output_item.added", "output_index": place, "item": empty}
    yield from filled
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _usage(reply: Reply) -> dict[str, Any]:
    answer = reply.answer
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
    }


def _event(data: Mapping[str, Any]) -> bytes:
    payload = clean(data)
    return b"event: " + data["type"].encode() + b"\ndata: " + payload + b"\n\n"
