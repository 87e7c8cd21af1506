"""The proxy's small pure parts, each as a table of inputs and right values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.actors.messages import EngineRoute
from gyre.ids import CellId
from gyre.proxy.conversation import (
    Conversation,
    Message,
    Speaker,
    ToolCall,
    answer_key,
    body_digest,
    canonical_json,
    in_call_order,
)
from gyre.proxy.roles import Roles
from gyre.proxy.routing import CROWDING, choose, open_engines
from gyre.proxy.stops import StopSearch, before_stop
from gyre.proxy.volatile import steady, without_headers
from gyre.trajectory.records import LineageRole

from .model_folder import byte_tokenizer

A, B, C = CellId("a"), CellId("b"), CellId("c")


def route(cell: CellId, version: int = 3, accepting: bool = True) -> EngineRoute:
    return EngineRoute(cell, f"http://{cell}", version, accepting)


# ------------------------------------------------------------------------------------------ routing


def test_an_engine_is_open_only_if_it_accepts_at_the_authoritative_version_and_is_not_closed() -> None:
    routes = [route(A), route(B, version=2), route(C, accepting=False), route(CellId("d"))]
    assert set(open_engines(routes, 3, {CellId("d")})) == {A}
    assert open_engines(routes, 4, ()) == {}


def test_a_run_stays_where_it_was_unless_that_is_crowded() -> None:
    engines = {cell: route(cell) for cell in (A, B)}
    assert choose(engines, {}, B) == B
    assert choose(engines, {B: CROWDING}, B) == B
    assert choose(engines, {B: CROWDING + 1}, B) == A
    assert choose(engines, {A: 1}, None) == B
    assert choose(engines, {A: 1, B: 1}, C) == A
    assert choose({}, {}, A) is None


# ------------------------------------------------------------------------------------------ conversations


def test_equal_bodies_are_equal_whatever_the_key_order_the_limits_and_the_stream() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
    other = {"stream": False, "messages": [{"content": "x", "role": "user"}], "max_completion_tokens": 9, "model": "m"}
    assert body_digest(body) == body_digest(other)
    assert body_digest(body) != body_digest({**body, "model": "n"})
    assert body_digest(body) != body_digest({**body, "messages": []})


def test_arguments_are_compared_as_values() -> None:
    assert canonical_json('{"b": 1.0, "a": "\\u0041"}') == canonical_json('{"a":"A","b":1}')
    assert canonical_json('{"a": [1.0, {"b": 2.50}]}') == canonical_json('{"a":[1,{"b":2.5}]}')
    assert canonical_json('{"a": true}') != canonical_json('{"a": 1}')
    assert canonical_json(" not json ") == "not json"


def test_an_answers_key_leaves_thinking_and_margins_out() -> None:
    call = ToolCall("id1", "bash", '{"a": 1.0}')
    again = ToolCall("id2", "bash", '{"a":1}')
    assert answer_key("\n text ", (call,)) == answer_key("text", (again,))
    assert answer_key("text", (call,)) != answer_key("text", (call, call))
    assert answer_key("a", ()) != answer_key("b", ())


def test_results_take_the_order_of_their_calls() -> None:
    calls = tuple(ToolCall(name, "t", "{}") for name in ("x", "y", "z"))
    assistant = Message(Speaker.ASSISTANT, "", tool_calls=calls)
    results = [Message(Speaker.TOOL, text, tool_call_id=text) for text in ("z", "x", "y")]
    user = Message(Speaker.USER, "next")
    ordered = in_call_order([user, assistant, *results, user])
    assert [message.text for message in ordered] == ["next", "", "x", "y", "z", "next"]
    assert [message.text for message in in_call_order([assistant, *results])] == ["", "x", "y", "z"]
    stray = [Message(Speaker.TOOL, text, tool_call_id=text) for text in ("q", "p")]
    assert in_call_order(stray) == tuple(stray)


# ------------------------------------------------------------------------------------------ volatile parts

SAME = [
    ("Today is 2026-11-29.", "Today is 2026-12-01."),
    ("Now: 2026-11-29T10:11:12Z", "Now: 2026-11-30T09:00:00Z"),
    ("Date: November 29, 2026", "Date: December 1, 2026"),
    ("Date: Sun Nov 29 2026, 9:41 PM", "Date: Mon Nov 30 2026, 10:02 AM"),
    ("session 123e4567-e89b-12d3-a456-426614174000", "session 00000000-e89b-12d3-a456-42661417400f"),
    ("HEAD is 9fceb02 here", "HEAD is 1a2b3c4 here"),
    ("x\ngitStatus: M a.py\nlog 1\n\n# Next", "x\ngitStatus: clean\n\n# Next"),
    (
        "x-anthropic-billing-header: cc_version=2.1.220.316;\nHi",
        "x-anthropic-billing-header: cc_version=2.1.220.28f;\nHi",
    ),
    ("x-anthropic-billing-header: a\nHi", "Hi"),
]
DIFFERENT = [("You plan.", "You search."), ("Use 12 words.", "Use 13 words."), ("feedback", "faceless")]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_is_volatile_does_not_tell_system_prompts_apart(one: str, other: str) -> None:
    assert steady(one) == steady(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_is_said_does(one: str, other: str) -> None:
    assert steady(one) != steady(other)


def test_a_billing_header_is_left_out_of_the_prompt() -> None:
    assert without_headers("x-anthropic-billing-header: cc_version=1;\nYou are an agent.") == "You are an agent."
    assert without_headers("You read x-anthropic-billing-header: here.") == "You read x-anthropic-billing-header: here."


# ------------------------------------------------------------------------------------------ roles


def conversation(system: str, *texts: str, tools: bool = True) -> Conversation:
    messages = [Message(Speaker.SYSTEM, system)] if system else []
    messages += [Message(Speaker.USER, text) for text in texts]
    return Conversation(tuple(messages), ({},) if tools else (), (), None, None, False, False, "m")


def test_roles_are_told_apart_by_marks_openings_and_instructions() -> None:
    roles = Roles()
    title = conversation("You are a title generator. You output only a thread title.", "hi", tools=False)
    assert roles.of(title, {}) is LineageRole.AUXILIARY
    assert roles.of(conversation("Main.", "Task."), {}) is LineageRole.MAIN
    assert roles.of(conversation("Search.", "Look."), {}) is LineageRole.SUB_AGENT
    assert roles.of(conversation("Main.", "Task."), {"x-claude-code-agent-id": "1"}) is LineageRole.SUB_AGENT
    ask = "CRITICAL: Your task is to create a detailed summary of the conversation so far"
    assert roles.of(conversation("Main.", "Task.", ask), {}) is LineageRole.MAIN_SUMMARY
    assert roles.of(conversation("Search.", "Look.", ask), {}) is LineageRole.SUB_AGENT_SUMMARY
    summary = conversation("You are a context summarization agent", "[User]: …", tools=False)
    assert roles.of(summary, {}) is LineageRole.MAIN_SUMMARY
    assert roles.of(summary, {"x-openai-subagent": "collab_spawn"}) is LineageRole.SUB_AGENT_SUMMARY
    assert roles.of(conversation("Main.", "This session is being continued"), {}) is LineageRole.MAIN


def test_a_run_without_tools_or_system_prompt_has_a_main_thread() -> None:
    assert Roles().of(conversation("", "Task.", tools=False), {}) is LineageRole.MAIN


# ------------------------------------------------------------------------------------------ stop sequences

TOKENIZER = byte_tokenizer()


def found(text: str, stops: list[str]) -> tuple[str | None, int]:
    """(the stop that ends the text, tokens read until then)."""
    search = StopSearch(lambda ids: TOKENIZER.decode(list(ids), skip_special_tokens=False), stops)
    for count, token in enumerate(TOKENIZER.encode(text, add_special_tokens=False).ids, 1):
        stop = search.push(token)
        if stop is not None:
            return stop, count
    return None, -1


@settings(max_examples=60, deadline=None)
@given(st.text("ab\n€", max_size=120), st.lists(st.text("ab\n€", min_size=1, max_size=6), min_size=1, max_size=3))
def test_a_stop_sequence_is_found_at_the_token_that_completes_it(text: str, stops: list[str]) -> None:
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    stop, tokens = found(text, stops)
    if not ends:
        assert stop is None
        return
    assert stop in stops
    assert tokens == len(text[: min(ends)].encode())
    assert text.startswith(before_stop(text, stop) + stop)


def test_without_stop_sequences_nothing_is_searched() -> None:
    assert found("abc", []) == (None, -1)
    assert before_stop("abc", "") == "abc"
