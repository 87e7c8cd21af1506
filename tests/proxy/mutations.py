"""Request bodies that were valid once: what a confused harness, or a hostile one, makes of them."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Rules."},
            {"role": "developer", "content": [{"type": "text", "text": "More."}]},
            {"role": "user", "content": [{"type": "text", "text": "Do."}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}},
                    {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c2", "content": "b"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": _SCHEMA}}],
        "tool_choice": "auto",
        "stop": ["END"],
        "max_tokens": 100,
        "max_completion_tokens": 50,
        "n": 1,
        "seed": 7,
        "temperature": 1.0,
        "top_p": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "responses": {
        "model": "m",
        "instructions": "Rules.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "More."}]},
            {"role": "user", "content": "Do."},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "hm"}],
                "content": None,
                "encrypted_content": "resp_0123456789abcdef01234567",
            },
            {
                "type": "message",
                "id": "msg_0123456789abcdef01234567",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "run", "namespace": "ns", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "+a"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a"}]},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "b"},
        ],
        "tools": [
            {"type": "function", "name": "bash", "description": "d", "parameters": _SCHEMA, "strict": False},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
            {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "run", "parameters": {}}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "auto"},
        "parallel_tool_calls": True,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "store": False,
        "max_output_tokens": 50,
        "temperature": 1.0,
        "stream": True,
    },
    "messages": {
        "model": "m",
        "max_tokens": 50,
        "system": [{"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Do."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "msg_1"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Yes."},
                    {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "t2", "name": "bash", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t2", "content": "b", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}]},
                    {"type": "text", "text": "Go on."},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "Note."}]},
        ],
        "tools": [{"name": "bash", "description": "d", "input_schema": _SCHEMA}, {"type": "web_search_1", "name": "w"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "thinking": {"type": "adaptive"},
        "temperature": 1,
        "metadata": {"user_id": "u"},
        "stream": True,
    },
}
"""A body of each dialect that has all of its parts, by its path."""

_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**63,
    -(2**70),
    10**60,
    0.5,
    -1e308,
    "",
    " ",
    "x",
    "\0",
    "\ud800",
    "<|im_end|>",
    "<tool_call>",
    "</think>",
    "é🐍" * 50,
    "[" * 3000,
    '{"a": ' * 500,
    "image",
    "input_image",
    "assistant",
    "tool",
    [],
    {},
    [None],
    [[]],
    {"type": None},
    {"type": "text"},
    {"": {}},
)


def mutated(body: dict[str, Any], random: Random) -> dict[str, Any]:
    """The body with a few of its places changed: another value there, none, two, or one from elsewhere."""
    body = copy.deepcopy(body)
    for _ in range(random.randint(1, 4)):
        places = list(_places(body))
        if not places:
            break
        holder, key = random.choice(places)
        how = random.choice(("value", "value", "value", "gone", "twice", "swapped", "wrapped"))
        if how == "value":
            holder[key] = copy.deepcopy(random.choice(_VALUES))
        elif how == "gone":
            del holder[key]
        elif how == "twice" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif how == "swapped":
            other, where = random.choice(places)
            holder[key] = copy.deepcopy(other[where])
        else:
            holder[key] = [holder[key]]
    return body


def _places(value: Any) -> Any:
    """(holder, key) of everything inside a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])
