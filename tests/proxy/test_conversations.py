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
from gyre.ids import CallId, GroupId, RunId
from gyre.proxy.conversation import Finish, request_digest
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
    opened = OpenRun(RunId("r"), GroupId("g"), 1, "key", "scripted", 1.0, 400)
    return Session(opened, rendering, {DIALECT.name: DIALECT})


@dataclass
class Harness:
    """One thread of a harness, and how it treats what it is told."""

    session: Session
    draw: Callable[[Any], Any]
    messages: list[dict[str, Any]]
    journal: list[JournalRecord] = field(default_factory=list)
    calls: list[CallId] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    said: dict[CallId, array[int]] = field(default_factory=dict)
    """What was sampled for each call."""
    asked: Call | None = None
    """The call that is being sampled."""

    def turn(self) -> None:
        self.ask()
        self.hear()

    def ask(self) -> None:
        body = {"model": "m", "messages": self.messages, "tools": TOOLS}
        digest = request_digest(DIALECT.name, body)
        self.asked = self.session.find(digest, self.headers)
        if self.asked is None:
            conversation = DIALECT.parse(body)
            self.asked, records = self.session.begin(conversation, body, digest, DIALECT, self.headers, 10**6, 0.0)
            self.journal += records
            self.calls.append(self.asked.id)
        if self.draw(st.booleans()):  # a retry while it is sampled, or after
            assert self.session.find(digest, self.headers) is self.asked

    def hear(self, *, lost: bool = False) -> None:
        """The call ends, and its answer arrives; a `lost` one does not, and the harness asks again or goes on alone."""
        call = self.asked
        assert call is not None
        self.asked = None
        if call.answer is None:
            self.sample(call)
        if lost:
            if self.draw(st.booleans()):
                self.messages = [*self.messages, {"role": "user", "content": "that did not work"}]
            return
        delivered = self.session.deliver(call.id)
        self.journal += [] if delivered is None else [delivered]
        self.take_over(DIALECT.body(self.session.reply(call, "m"))["choices"][0]["message"])

    def rewrite(self) -> None:
        """Do to the history what harnesses, or people, may do to it."""
        messages = self.messages
        match self.draw(st.sampled_from(["none", "none", "cut", "edit", "compact", "insert"])):
            case "cut":  # back to an earlier turn
                ends = [place for place, message in enumerate(messages) if message["role"] != "assistant" and place > 0]
                self.messages = messages[: self.draw(st.sampled_from(ends)) + 1]
            case "edit":
                place = self.draw(st.integers(1, len(messages) - 1))
                if messages[place]["role"] != "assistant":
                    self.messages = [
                        *messages[:place],
                        {**messages[place], "content": "edited"},
                        *messages[place + 1 :],
                    ]
            case "compact":
                turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
                kept = messages[turns[-1] :] if turns else []
                self.messages = [messages[0], {"role": "user", "content": "Summary: it went well."}, *kept]
            case "insert":
                said = {"role": "assistant", "content": "I was never sampled."}
                self.messages = [*messages, said, {"role": "user", "content": "really?"}]
            case _:
                pass

    def sample(self, call: Call) -> None:
        answer = self.draw(st.sampled_from(ANSWERS))
        tokens = array("i", TOKENIZER.encode(answer + "<|im_end|>", add_special_tokens=False).ids)
        cut = self.draw(st.one_of(st.none(), st.integers(1, len(tokens))))
        tokens = tokens[:cut]
        self.said[call.id] = tokens
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
        harness.rewrite()
        check(session)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_threads_do_at_once_every_sampled_token_is_in_one_node_and_counts_once(
    rendering: Rendering, data: st.DataObject
) -> None:
    session = new_session(rendering)
    journal: list[JournalRecord] = []
    threads = [
        Harness(
            session,
            data.draw,
            [{"role": "system", "content": system}, {"role": "user", "content": "Task."}],
            journal,
            headers={"x-session-id": name, **({"x-parent-session-id": "main"} if name != "main" else {})},
        )
        for system, name in (("Main.", "main"), ("Agent.", "one"), ("Agent.", "two"))  # two of one kind, with one task
    ]
    for _ in range(data.draw(st.integers(1, 14))):
        thread = data.draw(st.sampled_from(threads))
        if thread.asked is None:
            thread.rewrite()
            thread.ask()
        else:
            thread.hear(lost=data.draw(st.sampled_from([False, False, True])))
    check(session)
    tree, radix = session.tree, session.tree._radix
    said = {call: tokens for thread in threads for call, tokens in thread.said.items()}
    assert set(tree.calls) == set(said)
    for call, tokens in said.items():
        assert tree.output_ids(call) == tokens
        assert tree.parent(call) != call
    # Sampled nodes have the tokens of all answers, and no more: none is there twice, and none is shared.
    sampled = [node for node in range(len(radix.parent)) if radix.sampled[node]]
    assert sum(radix.length[node] for node in sampled) == sum(map(len, said.values()))
    assert sum(session.forks.values()) == sum(tree.forks.values())
    # What the journal holds is the same run, with the same forks.
    restored = new_session(rendering)
    restored.restore(read(b"GYREJRN1" + b"".join(map(encode, journal))).records)
    assert restored.trace(5) == session.trace(5)
    assert [call.id for call in restored.unfinished()] == [thread.asked.id for thread in order_of(threads)]


def order_of(threads: list[Harness]) -> list[Harness]:
    """Those that wait for an answer not yet sampled, by when they asked."""
    waiting = [thread for thread in threads if thread.asked is not None and thread.asked.answer is None]
    return sorted(waiting, key=lambda thread: thread.asked.seq if thread.asked else 0)


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
    assert (begun[0].id, begun[0].base, begun[0].suffix, begun[0].chain, begun[0].part) == (
        begun[1].id,
        begun[1].base,
        begun[1].suffix,
        begun[1].chain,
        begun[1].part,
    )
    # And cut anywhere, what is left is a sound session too.
    cut = data.draw(st.integers(8, len(frames)))
    part = new_session(rendering)
    part.restore(read(frames[:cut]).records)
    assert not part.tree.check()
