"""The proxy's small pure parts, each as a table of inputs and right values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.harness.wire import GENERIC, Wire
from gyre.proxy.conversation import (
    Message,
    Speaker,
    ToolCall,
    answer_key,
    canonical_json,
    in_call_order,
    request_digest,
)
from gyre.proxy.stops import StopSearch, before_stop
from gyre.proxy.volatile import SystemPrompts

from .model_folder import byte_tokenizer

# ------------------------------------------------------------------------------------------ conversations


def test_equal_bodies_are_equal_whatever_the_key_order_the_limits_and_the_stream() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
    other = {"stream": False, "messages": [{"content": "x", "role": "user"}], "max_completion_tokens": 9, "model": "m"}
    assert request_digest("d", body) == request_digest("d", other)
    assert request_digest("d", body) != request_digest("d", {**body, "model": "n"})
    assert request_digest("d", body) != request_digest("d", {**body, "messages": []})


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
    assert SystemPrompts(GENERIC).read(one).steady == SystemPrompts(GENERIC).read(other).steady


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_is_said_does(one: str, other: str) -> None:
    assert SystemPrompts(GENERIC).read(one).steady != SystemPrompts(GENERIC).read(other).steady


def test_a_billing_header_is_left_out_of_the_prompt() -> None:
    systems = SystemPrompts(GENERIC)
    billed = systems.read("x-anthropic-billing-header: cc_version=1;\nYou are an agent.")
    assert billed.rendered == "You are an agent."
    read = systems.read("You read x-anthropic-billing-header: here.")
    assert read.rendered == "You read x-anthropic-billing-header: here."


def test_a_system_prompt_is_rendered_as_it_was_first_seen_in_the_run() -> None:
    systems = SystemPrompts(GENERIC)
    assert [systems.read(f"An agent. Today: 2026-11-{day}.").rendered for day in (28, 29)] == [
        "An agent. Today: 2026-11-28."
    ] * 2


def test_what_a_profile_does_not_name_is_not_taken_out() -> None:
    assert (
        SystemPrompts(Wire()).read("x-anthropic-billing-header: a\nHi").rendered == "x-anthropic-billing-header: a\nHi"
    )


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
