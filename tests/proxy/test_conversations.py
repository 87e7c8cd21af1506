"""Random harnesses against one run's session: whatever they drop, rewrite, repeat and interleave, the tree tells the truth."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.actors.messages import OpenRun
from gyre.ids import CallId, RunId
from gyre.proxy.conversation import Finish, body_digest
from gyre.proxy.dialects.dialect import Dialect
from gyre.proxy.dialects.openai_chat import OpenAIChat
from gyre.proxy.rendering import Rendering
from gyre.proxy.sampling import Ending, Stretch
from gyre.proxy.session import Call, Session
from gyre.trajectory.journal import JournalRecord, encode, read

from .model_folder import byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
DIALECT: Dialect = OpenAIChat()
TOKENIZER = byte_tokenizer()
ANSWERS = (
    "<think>\nhm\n</think>\n\nA plain answer.",
    'Look.\n<tool_call>\n{"name": "bash", "arguments": {"b": 2.0,  "a": "x"}}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"n": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"n": 2}}\n</tool_call>',
    "",
    "\n  spaced  \n",
    "<think>\nnever closed",
    "<tool_call>\n{broken\n</tool_call>",
)


@pytest.fixture(scope="module")
def rendering(model_dir: Path) -> Rendering:
    return Rendering(model_dir, thinking=True)


def new_session(rendering: Rendering) -> Session:
    opened = OpenRun(RunId("r"), 1, "key", "scripted", 1.0, 400)
    return Session(opened, rendering, {DIALECT.name: DIALECT})


@dataclass
class Harness:
    """One thread of a harness, and how it treats what it is told."""

    session: Session
    draw: Callable[[Any], Any]
    messages: list[dict[str, Any]]
    journal: list[JournalRecord] = field(default_factory=list)
    calls: list[CallId] = field(default_factory=list)

    def turn(self) -> None:
        body = {"model": "m", "messages": self.messages, "tools": TOOLS}
        digest = body_digest(body)
        call = self.session.find(digest)
        if call is None:
            call, records = self.session.begin(DIALECT.parse(body), body, digest, DIALECT, {}, 10**6, 0.0)
            self.journal += records
            self.sample(call)
            self.calls.append(call.id)
        delivered = self.session.deliver(call.id)
        self.journal += [] if delivered is None else [delivered]
        message = DIALECT.body(self.session.reply(call, "m"))["choices"][0]["message"]
        if self.draw(st.booleans()):  # a retry of what was just answered
            assert self.session.find(digest) is call
        self.take_over(message)

    def sample(self, call: Call) -> None:
        answer = self.draw(st.sampled_from(ANSWERS))
        tokens = array("i", TOKENIZER.encode(answer + "<|im_end|>", add_special_tokens=False).ids)
        cut = self.draw(st.one_of(st.none(), st.integers(1, len(tokens))))
        tokens = tokens[:cut]
        finish = Finish.STOP if tokens[-1] == TOKENIZER.token_to_id("<|im_end|>") else Finish.LENGTH
        versions = array("i", [1]) * len(tokens)
        self.journal.append(self.session.sampled(call, Stretch(tokens, array("f", [-1.0]) * len(tokens), versions)))
        self.journal.append(self.session.end(call, Ending(finish, "", None, 0, False, 0, 0.0)))

    def take_over(self, message: dict[str, Any]) -> None:
        """Send the answer back next time, as harnesses do: thinking dropped or kept, arguments anew, text trimmed."""
        back: dict[str, Any] = {"role": "assistant", "content": message["content"]}
        if self.draw(st.booleans()) and "reasoning_content" in message:
            back["reasoning_content"] = message["reasoning_content"].strip()
        if isinstance(back["content"], str) and self.draw(st.booleans()):
            back["content"] = back["content"].strip()
        calls = message.get("tool_calls") or []
        if calls:
            back["tool_calls"] = calls
            if self.draw(st.booleans()):
                back["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": rewritten(call["function"]["arguments"])}}
                    for call in calls
                ]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"out {call['id'][-3:]}"} for call in calls
            ]
            self.messages += [back, *(results[::-1] if self.draw(st.booleans()) else results)]
        else:
            self.messages += [back, {"role": "user", "content": self.draw(st.sampled_from(["go on", "again", "ok"]))}]


def rewritten(arguments: str) -> str:
    return json.dumps(
        {key: int(value) if isinstance(value, float) else value for key, value in sorted(json.loads(arguments).items())}
    )


def check(session: Session) -> None:
    tree = session.tree
    assert not tree.check()
    given = sum(tree.prompt_tokens(call) + tree.output_tokens(call) for call in tree.calls)
    assert tree.tokens <= given
    lineages = tree.select(1000)
    counted = sum(sum(lineage.arrays()[1]) for lineage in lineages)
    assert counted == sum(tree.output_tokens(call) for call in tree.calls if tree.delivered(call))


def assert_extends(session: Session, calls: list[CallId]) -> None:
    tree = session.tree
    for first, then in pairwise(calls):
        known = tree.prompt_ids(first) + tree.output_ids(first)
        assert tree.prompt_ids(then)[: len(known)] == known


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_interleaved_threads_each_stay_one_lineage(rendering: Rendering, data: st.DataObject) -> None:
    session = new_session(rendering)
    threads = [
        Harness(session, data.draw, [{"role": "system", "content": text}, {"role": "user", "content": "Task."}])
        for text in ("Main.", "Search.", "Plan.")
    ]
    for _ in range(data.draw(st.integers(1, 8))):
        data.draw(st.sampled_from(threads)).turn()
    for thread in threads:
        assert_extends(session, thread.calls)
    check(session)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rewrites_of_history_branch_and_never_lose_or_double_a_token(rendering: Rendering, data: st.DataObject) -> None:
    session = new_session(rendering)
    harness = Harness(
        session, data.draw, [{"role": "system", "content": "Main."}, {"role": "user", "content": "Task."}]
    )
    for _ in range(data.draw(st.integers(2, 7))):
        harness.turn()
        messages = harness.messages
        rewrite = data.draw(st.sampled_from(["none", "none", "cut", "edit", "compact", "insert"]))
        if rewrite == "cut":  # back to an earlier turn
            ends = [place for place, message in enumerate(messages) if message["role"] != "assistant" and place > 0]
            harness.messages = messages[: data.draw(st.sampled_from(ends)) + 1]
        elif rewrite == "edit":
            place = data.draw(st.integers(1, len(messages) - 1))
            if messages[place]["role"] != "assistant":
                harness.messages = [*messages[:place], {**messages[place], "content": "edited"}, *messages[place + 1 :]]
        elif rewrite == "compact":
            turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
            kept = messages[turns[-1] :]
            harness.messages = [messages[0], {"role": "user", "content": "Summary: it went well."}, *kept]
        elif rewrite == "insert":
            said = {"role": "assistant", "content": "I was never sampled."}
            harness.messages = [*messages, said, {"role": "user", "content": "really?"}]
        check(session)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_session_read_from_its_journal_goes_on_as_the_one_that_wrote_it(
    rendering: Rendering, data: st.DataObject
) -> None:
    session = new_session(rendering)
    harness = Harness(
        session, data.draw, [{"role": "system", "content": "Main."}, {"role": "user", "content": "Task."}]
    )
    for _ in range(data.draw(st.integers(1, 4))):
        harness.turn()
    frames = b"GYREJRN1" + b"".join(encode(record) for record in harness.journal)
    restored = new_session(rendering)
    restored.restore(read(frames).records)
    assert restored.trace(5) == session.trace(5)
    body = {"model": "m", "messages": harness.messages, "tools": TOOLS}
    conversation = DIALECT.parse(body)
    begun = [one.begin(conversation, body, b"d", DIALECT, {}, 10**6, 0.0)[0] for one in (session, restored)]
    assert (begun[0].id, begun[0].base, begun[0].suffix, begun[0].thread, begun[0].role) == (
        begun[1].id,
        begun[1].base,
        begun[1].suffix,
        begun[1].thread,
        begun[1].role,
    )
    # And cut anywhere, what is left is a sound session too.
    cut = data.draw(st.integers(8, len(frames)))
    part = new_session(rendering)
    part.restore(read(frames[:cut]).records)
    assert not part.tree.check()
