"""What a request says, whatever dialect it came in: the records that the dialects make and the session reads.

A `Message` keeps what rendering and recognition need, and nothing of the dialect's form. Its key is what stays of it
when a harness sends it back: an assistant turn's key leaves out the thinking (harnesses drop or trim it) and reads tool
arguments as values, since harnesses write them anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, cast

import xxhash

from gyre.proxy.json_text import exact


class Speaker(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str
    """JSON text."""


class Message(NamedTuple):
    # A tuple, since a run's history of thousands is compared with the one before it at every call.
    speaker: Speaker
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a tool's message: the call that it answers."""
    ids: tuple[str, ...] = ()
    """Ids in it that the proxy may have minted, its tool calls' among them."""


@dataclass(frozen=True)
class ToolForm:
    """What the harness calls a tool whose name or arguments the model is given in another form."""

    name: str
    namespace: str = ""
    freeform: bool = False
    """Whether a call's input is plain text; the model is given a function with the one argument `input`."""


@dataclass(frozen=True)
class Conversation:
    """One request. `tools` are in the form `{"type": "function", "function": {…}}`."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    stop: tuple[str, ...]
    max_tokens: int | None
    seed: int | None
    stream: bool
    include_usage: bool
    """Whether a stream ends with a chunk of usage numbers (OpenAI asks for it; Anthropic always has it)."""
    model: str
    """As asked for; the answer names it back."""
    forms: Mapping[str, ToolForm] = field(default_factory=dict[str, ToolForm])
    """Of tools that the harness knows in another form, by the name that the model is given."""


class Finish(StrEnum):
    STOP = "stop"
    """The policy ended its turn."""
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy said, parsed out of its token ids."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    stop_sequence: str
    """The stop sequence that ended it, or empty."""
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    """Of the output."""
    cached_tokens: int
    """Prompt tokens whose KV the engine still had."""


@dataclass(frozen=True)
class Reply:
    """An answer on its way to the harness, with the names it goes under there."""

    message_id: str
    model: str
    created_unix_s: int
    answer: Answer
    forms: Mapping[str, ToolForm] = field(default_factory=dict[str, ToolForm])
    """The request's."""
    max_tokens: int | None = None
    """The request's own limit; the run's may be lower."""


def in_call_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with each run of tool results in the order of the calls they answer, however they came back."""
    out: list[Message] = []
    results: list[Message] = []
    order: dict[str, int] = {}
    for message in messages:
        if message.speaker is Speaker.TOOL:
            results.append(message)
            continue
        if results:
            out += sorted(results, key=lambda result: order.get(result.tool_call_id, len(order)))
            results = []
        out.append(message)
        if message.speaker is Speaker.ASSISTANT:
            order = {call.id: place for place, call in enumerate(message.tool_calls)}
    return (*out, *sorted(results, key=lambda result: order.get(result.tool_call_id, len(order))))


def message_key(message: Message) -> bytes:
    """What identifies a message at its place in a conversation."""
    if message.speaker is Speaker.ASSISTANT:
        return answer_key(message.text, message.tool_calls)
    return digest(message.speaker.value, message.text)


def answer_key(text: str, tool_calls: Sequence[ToolCall]) -> bytes:
    """What identifies an assistant's turn by its content: its text, trimmed, and its tool calls as values."""
    calls = [part for call in tool_calls for part in (call.name, canonical_json(call.arguments))]
    return digest(Speaker.ASSISTANT.value, text.strip(), *calls)


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    return digest("tools", exact(list(tools), sort_keys=True))


def request_digest(dialect: str, body: Mapping[str, Any]) -> bytes:
    """What a retry has in common with its first: the parsed body, whatever its key order, `stream` and limits aside.

    An answer has its dialect's ids, so no other dialect's request repeats it.
    """
    kept = {key: value for key, value in body.items() if key not in _NOT_OF_THE_CALL}
    return digest("request", dialect, exact(kept, sort_keys=True))


_NOT_OF_THE_CALL = frozenset({"stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens"})


def canonical_json(text: str) -> str:
    """JSON text in one form for equal values: keys in order, no spaces, 1.0 as 1. Other text as it is."""
    try:
        return json.dumps(_integral(json.loads(text)), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text.strip()


def _integral(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integral(item) for item in cast(list[Any], value)]
    if isinstance(value, dict):
        return {key: _integral(item) for key, item in cast(dict[str, Any], value).items()}
    return value


def digest(*parts: str | bytes) -> bytes:
    """A digest of the parts, in which no part can pass for the end of another."""
    pieces: list[bytes] = []
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        pieces += (len(data).to_bytes(8, "little"), data)
    return xxhash.xxh3_128_digest(b"".join(pieces))
