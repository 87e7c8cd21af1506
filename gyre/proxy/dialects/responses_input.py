"""What an OpenAI Responses request brings: its items back as messages, its tools as the model is given them.

An assistant's turn comes as several items: reasoning, message, a call for each tool. Items that bear ids of one answer
of ours are one message again, wherever the harness put its results among them; so are neighbours without such ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre.proxy.conversation import Message, Speaker, ToolCall, ToolForm
from gyre.proxy.dialects.shapes import as_list, as_mapping, as_text, quoted, text_of
from gyre.proxy.faults import bad_request

_SPEAKERS = {
    "system": Speaker.SYSTEM,
    "developer": Speaker.SYSTEM,
    "user": Speaker.USER,
    "assistant": Speaker.ASSISTANT,
}
_CALLS = ("function_call", "custom_tool_call")
_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kinds of content that are text, with the field that holds it."""
_MINTED = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]*")
_RUN_BY_THE_HARNESS = frozenset({"local_shell", "shell", "apply_patch", "computer", "computer_use_preview"})
"""Tools whose calls have a form of their own, which no model is given here; the others that are left out run at a
server, and there is none."""


# ------------------------------------------------------------------------------------------ tools


@dataclass(frozen=True)
class Tools:
    """`offered` as the model is given them; `forms` of those that the harness knows in another form."""

    offered: tuple[Mapping[str, Any], ...]
    forms: Mapping[str, ToolForm]

    def given_name(self, name: str, namespace: str) -> str:
        """The name under which the model knows the harness's tool."""
        found = (given for given, form in self.forms.items() if (form.name, form.namespace) == (name, namespace))
        return next(found, name)


def read_tools(value: object) -> Tools:
    offered: list[Mapping[str, Any]] = []
    forms: dict[str, ToolForm] = {}
    taken: set[str] = set()

    def add(entry: Mapping[str, Any], at: str, namespace: str) -> None:
        kind = text_of(entry, "type", f"{at}.type")
        if kind not in ("function", "custom"):
            if kind in _RUN_BY_THE_HARNESS:
                raise bad_request(
                    f"{at}.type: {quoted(kind)} is not supported; offer it as a function or a custom tool"
                )
            return
        form = ToolForm(text_of(entry, "name", f"{at}.name"), namespace, freeform=kind == "custom")
        given = form.name if form.name not in taken else f"{namespace}__{form.name}"
        taken.add(given)
        if form != ToolForm(given):
            forms[given] = form
        function = _freeform(entry, at) if form.freeform else _function(entry, at)
        offered.append({"type": "function", "function": {"name": given, **function}})

    for place, item in enumerate(as_list(value, "tools")):
        at = f"tools[{place}]"
        entry = as_mapping(item, at)
        if entry.get("type") != "namespace":
            add(entry, at, "")
            continue
        namespace = text_of(entry, "name", f"{at}.name")
        for inner, tool in enumerate(as_list(entry.get("tools"), f"{at}.tools")):
            add(as_mapping(tool, f"{at}.tools[{inner}]"), f"{at}.tools[{inner}]", namespace)
    return Tools(tuple(offered), forms)


def _function(entry: Mapping[str, Any], at: str) -> dict[str, Any]:
    parameters = entry.get("parameters")
    return {
        "description": text_of(entry, "description", f"{at}.description", ""),
        "parameters": {} if parameters is None else as_mapping(parameters, f"{at}.parameters"),
    }


def _freeform(entry: Mapping[str, Any], at: str) -> dict[str, Any]:
    description = text_of(entry, "description", f"{at}.description", "")
    if entry.get("format") is not None:
        grammar = as_mapping(entry["format"], f"{at}.format")
        definition = text_of(grammar, "definition", f"{at}.format.definition", "")
        if definition:
            syntax = text_of(grammar, "syntax", f"{at}.format.syntax", "")
            description += f"\n\nThe input follows this {syntax} grammar:\n{definition}"
    properties = {"input": {"type": "string"}}
    return {
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": ["input"]},
    }


# ------------------------------------------------------------------------------------------ items


@dataclass
class _Turn:
    """An assistant's turn while its items come in."""

    stem: str = ""
    """Of our answer that it is, as far as its ids say so."""
    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def message(self, answer_id: str) -> Message:
        return Message(
            speaker=Speaker.ASSISTANT,
            text="".join(self.texts),
            reasoning="\n".join(self.thoughts),
            tool_calls=tuple(self.calls),
            ids=(*(call.id for call in self.calls), *([f"{answer_id}{self.stem}"] if self.stem else ())),
        )


def read_input(value: object, tools: Tools, answer_id: str) -> list[Message]:
    """The messages of `input`. `answer_id` is what stands before the stem in the id of an answer of ours."""
    if isinstance(value, str):
        return [Message(Speaker.USER, value)]
    read: list[Message | _Turn] = []
    for place, item in enumerate(as_list(value, "input")):
        at = f"input[{place}]"
        entry = as_mapping(item, at)
        kind = text_of(entry, "type", f"{at}.type", "message")
        if kind not in _ITEMS:
            raise bad_request(f"{at}.type: {quoted(kind)} is not supported; one of {', '.join(_ITEMS)}")
        if kind.endswith("_output"):
            call = text_of(entry, "call_id", f"{at}.call_id")
            read.append(Message(Speaker.TOOL, _text(entry.get("output"), f"{at}.output", "\n"), tool_call_id=call))
        elif kind != "message":
            _add_to_turn(_turn_of(read, entry), kind, entry, at, tools)
        else:
            role = text_of(entry, "role", f"{at}.role")
            speaker = _SPEAKERS.get(role)
            if speaker is None:
                raise bad_request(f"{at}.role: {quoted(role)} is not allowed; one of {', '.join(_SPEAKERS)}")
            if speaker is Speaker.ASSISTANT:
                _turn_of(read, entry).texts.append(_text(entry.get("content"), f"{at}.content", ""))
            else:
                read.append(Message(speaker, _text(entry.get("content"), f"{at}.content", "\n")))
    return [one.message(answer_id) if isinstance(one, _Turn) else one for one in read]


def _turn_of(read: list[Message | _Turn], entry: Mapping[str, Any]) -> _Turn:
    """The turn that an assistant's item belongs to: the last one, or a new one.

    An item without an id of ours goes with what stands before it. So does a call behind a text whose id was taken out; a
    text or a thought of ours begins a turn of its own behind what another said.
    """
    stem = _stem(entry)
    begins = bool(stem) and entry.get("type") not in _CALLS
    behind_results = False
    for one in reversed(read):
        if isinstance(one, _Turn):
            another = bool(stem and one.stem) or (begins and bool(one.texts or one.calls))
            if (stem and stem == one.stem) or not (behind_results or another):
                one.stem = one.stem or stem
                return one
            break
        if one.speaker is not Speaker.TOOL:
            break
        behind_results = True
    turn = _Turn(stem)
    read.append(turn)
    return turn


def _stem(entry: Mapping[str, Any]) -> str:
    """What an item's ids say of the answer that it is part of, or empty."""
    for key in ("encrypted_content", "call_id", "id"):
        value = entry.get(key)
        if isinstance(value, str) and (found := _MINTED.fullmatch(value)) is not None:
            return found[1]
    return ""


def _add_to_turn(turn: _Turn, kind: str, entry: Mapping[str, Any], at: str, tools: Tools) -> None:
    if kind == "reasoning":
        turn.thoughts += _thoughts(entry, at)
        return
    name = text_of(entry, "name", f"{at}.name")
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": text_of(entry, "input", f"{at}.input", "")}, ensure_ascii=False)
    else:
        arguments = text_of(entry, "arguments", f"{at}.arguments", "") or "{}"
    given = tools.given_name(name, text_of(entry, "namespace", f"{at}.namespace", ""))
    turn.calls.append(ToolCall(text_of(entry, "call_id", f"{at}.call_id"), given, arguments))


def _thoughts(entry: Mapping[str, Any], at: str) -> Iterable[str]:
    """The reasoning in the clear: its text where an item has that, else its summary."""
    for key in ("content", "summary"):
        if entry.get(key):
            parts = as_list(entry[key], f"{at}.{key}")
            return [
                text_of(as_mapping(part, f"{at}.{key}[{place}]"), "text", f"{at}.{key}[{place}].text")
                for place, part in enumerate(parts)
            ]
    return ()


def _text(content: object, at: str, between: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, item in enumerate(as_list(content, at)):
        part = as_mapping(item, f"{at}[{place}]")
        kind = text_of(part, "type", f"{at}[{place}].type")
        named = _TEXTS.get(kind)
        if named is None:
            raise bad_request(f"{at}[{place}].type: {quoted(kind)} is not supported; this model reads text only")
        texts.append(as_text(part.get(named), f"{at}[{place}].{named}"))
    return between.join(texts)
