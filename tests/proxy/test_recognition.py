"""Where a request stands among the run's calls: what is new is followed, and what was followed before is not again."""

from __future__ import annotations

import pytest

from gyre.harness.wire import GENERIC
from gyre.ids import CallId
from gyre.proxy import recognition
from gyre.proxy.conversation import Answer, Finish, Message, Speaker, ToolCall
from gyre.proxy.recognition import Threads
from gyre.proxy.volatile import SystemPrompts

SYSTEM = Message(Speaker.SYSTEM, "You work. Today is 2026-11-28.")
TASK = Message(Speaker.USER, "Task.")
CALL = ToolCall("call_1", "bash", '{"x": 1.0}')
RESULT = Message(Speaker.TOOL, "out", tool_call_id="call_1")


def turn(text: str, *calls: ToolCall, ids: tuple[str, ...] = ()) -> Message:
    return Message(Speaker.ASSISTANT, text, tool_calls=calls, ids=(*(call.id for call in calls), *ids))


def answer(text: str, *calls: ToolCall) -> Answer:
    return Answer(text, "", calls, Finish.STOP, "", 0, 0, 0, 0)


def threads() -> Threads:
    return Threads(SystemPrompts(GENERIC))


def known(*history: tuple[list[Message], str, Answer, tuple[str, ...]]) -> Threads:
    """Threads with these calls: (the prompt's messages, its id, its answer, the ids minted for it)."""
    found = threads()
    for messages, call, said, ids in history:
        walk = found.walk(messages, (), "")
        found.add(CallId(call), walk.chain, "", said, ids)
    return found


def test_of_a_history_that_grew_only_what_is_new_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []
    extend = recognition._extend
    monkeypatch.setattr(
        recognition, "_extend", lambda chain, tag, text: (followed.append(text), extend(chain, tag, text))
    )
    found = known(([SYSTEM, TASK], "a", answer("", CALL), ("call_1",)))
    assert len(followed) == 2
    later = SYSTEM._replace(text="You work. Today is 2026-11-29.")
    history = [later, TASK, turn("", CALL._replace(arguments='{"x":1}')), RESULT]
    grown = found.walk(history, (), "")
    assert followed[2:] == ["a", "out"]
    assert (grown.base, grown.new_from, grown.turns) == ("a", 3, (None, None, "a", None))
    # A walk from the start says the same.
    assert known(([SYSTEM, TASK], "a", answer("", CALL), ("call_1",))).walk(history, (), "") == grown


@pytest.mark.parametrize(
    ("said", "ids", "back", "is_it"),
    [
        (answer("", CALL), ("m", "call_1"), turn("", CALL._replace(name="invalid", arguments="{}")), True),
        (answer("words", CALL), ("m", "call_1"), turn("", CALL), True),
        (answer("words", CALL), ("m", "call_1"), turn("words", ids=("m",)), False),
        (answer("some words"), ("m",), turn("some", ids=("m",)), False),
        (answer("some words"), ("m",), turn("", ids=("m",)), False),
        (answer("  \n"), ("m",), turn("(no content)", ids=("m",)), True),
        (answer(" words\n"), (), turn("words"), True),
        (answer("words"), (), turn("other words"), False),
    ],
    ids=[
        "its call under another name",
        "its text dropped",
        "its call missing",
        "half of its text",
        "only its thinking",
        "blank text filled in",
        "trimmed",
        "another text",
    ],
)
def test_a_turn_is_the_answer_that_it_is_the_whole_of(
    said: Answer, ids: tuple[str, ...], back: Message, is_it: bool
) -> None:
    walk = known(([TASK], "a", said, ids)).walk([TASK, back, RESULT], (), "")
    assert (walk.base == "a") is is_it


def test_of_two_equal_answers_a_threads_own_is_meant_before_a_newer_one() -> None:
    found = threads()
    for call, name in (("mine", "one"), ("theirs", "two")):
        walk = found.walk([TASK], (), name)
        found.add(CallId(call), walk.chain, name, answer("Yes."), ())
    history = [TASK, turn("Yes."), Message(Speaker.USER, "On.")]
    assert found.walk(history, (), "one").base == "mine"
    assert found.walk(history, (), "two").base == "theirs"
    assert found.walk(history, (), "three").base == "theirs"


def test_a_request_that_goes_on_without_an_answer_names_the_call_whose_answer_it_was() -> None:
    found = known(([TASK], "a", answer("Yes."), ()))
    assert found.walk([TASK, Message(Speaker.USER, "Again.")], (), "").left == "a"
    assert found.walk([TASK, turn("Yes."), Message(Speaker.USER, "On.")], (), "").left is None


def test_no_message_passes_for_the_end_of_another() -> None:
    one = threads().walk([Message(Speaker.USER, "ab"), Message(Speaker.USER, "c")], (), "")
    assert one.chain != threads().walk([Message(Speaker.USER, "a"), Message(Speaker.USER, "bc")], (), "").chain
    assert one.chain != threads().walk([Message(Speaker.USER, "ab"), Message(Speaker.TOOL, "c")], (), "").chain
    assert one.chain != threads().walk(one_with_tools := [Message(Speaker.USER, "ab")], ({"name": "t"},), "").chain
    assert threads().walk(one_with_tools, (), "").begins
