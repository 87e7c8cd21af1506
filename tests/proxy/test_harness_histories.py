"""What five real harnesses do to the history that they send back, shape by shape, and what the tree then says.

Each test is one behaviour that was seen on the wire: compaction, kept tails, sub-agents, dropped, renamed and half answers.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gyre.actors.messages import OpenRun
from gyre.harness.profiles import claude_code, codex, opencode, qwen_code
from gyre.harness.wire import GENERIC, Wire
from gyre.ids import CallId, GroupId, RunId
from gyre.proxy.conversation import Finish, request_digest
from gyre.proxy.dialects.spoken import Spoken
from gyre.proxy.rendering import Rendering
from gyre.proxy.sampling import Ending, Stretch
from gyre.proxy.session import Call, Session
from gyre.trajectory.records import LineageRole

from .model_folder import byte_tokenizer

MAIN, MAIN_SUMMARY, SUB, SUB_SUMMARY, AUXILIARY = LineageRole
TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")
SPOKEN = Spoken()
CLAUDE_ASK = "CRITICAL: Respond with TEXT ONLY. Your task is to create a detailed summary of the conversation so far."
CONTINUED = "This session is being continued from a previous conversation. Summary: it went well."
CODEX_ASK = "You are performing a CONTEXT CHECKPOINT COMPACTION."

Body = dict[str, Any]


class Run:
    """One run's session, asked as a harness asks, in one dialect."""

    def __init__(self, rendering: Rendering, wire: Wire, dialect: str) -> None:
        opened = OpenRun(RunId("r"), GroupId("g"), 1, "key", "scripted", 1.0, 4000)
        self.dialect = SPOKEN.by_name()[dialect]
        self.session = Session(opened, rendering, SPOKEN.by_name(), wire)

    def ask(
        self,
        body: Body,
        says: str,
        headers: Mapping[str, str] | None = None,
        *,
        limit: int | None = None,
        delivered: bool = True,
    ) -> tuple[Call, Any]:
        """The call that answers `body`, sampled now as `says` unless it is a retry; and the answer's body."""
        session, headers = self.session, headers or {}
        digest = request_digest(self.dialect.name, body)
        conversation = self.dialect.parse(body)
        call = session.find(digest, headers)
        if call is None or not session.serves(call, conversation, 10**6):
            call, _ = session.begin(conversation, body, digest, self.dialect, headers, 10**6, 0.0)
            tokens = array("i", [*TOKENIZER.encode(says, add_special_tokens=False).ids, END][:limit])
            count = len(tokens)
            session.sampled(call, Stretch(tokens, array("f", [-1.0]) * count, array("i", [1]) * count))
            finish = Finish.STOP if tokens[-1] == END else Finish.LENGTH
            session.end(call, Ending(finish, "", None, 0, False, 0, 0.0))
            if delivered:
                session.deliver(call.id)
        return call, self.dialect.body(session.reply(call, "m"))

    def extends(self, first: Call, then: Call) -> bool:
        known = self.session.tree.history_ids(first.id)
        return self.session.tree.prompt_ids(then.id)[: len(known)] == known

    def holds(self, call: Call, answer_of: Call) -> bool:
        """Whether the call's prompt has the other's answer in it, as it was sampled."""
        tree = self.session.tree
        return tree.output_ids(answer_of.id).tobytes() in tree.prompt_ids(call.id).tobytes()

    def forks(self) -> dict[str, int]:
        return {reason.value: count for reason, count in self.session.forks.items()}

    def check(self) -> dict[LineageRole, int]:
        """The tree is sound and counts every delivered, trainable answer once; returns the lineages by role."""
        session, tree = self.session, self.session.tree
        trace, lineages = session.trace(100)
        assert trace.faults == ()
        sampled = sum(
            tree.output_tokens(call)
            for call in tree.calls
            if tree.delivered(call) and tree.role(call) is not LineageRole.AUXILIARY
        )
        assert sum(sum(lineage.counted) for lineage in lineages) == sampled
        roles = [lineage.role for lineage in lineages]
        return {role: roles.count(role) for role in roles}


@pytest.fixture(scope="module")
def rendering(model_dir: Path) -> Rendering:
    return Rendering(model_dir, thinking=True)


@pytest.fixture
def new_run(rendering: Rendering) -> Callable[[Wire, str], Run]:
    return lambda wire, dialect: Run(rendering, wire, dialect)


NewRun = Callable[[Wire, str], Run]


def tool_call(arguments: str = '{"x": 1}', name: str = "bash") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def thought(text: str, rest: str) -> str:
    return f"<think>\n{text}\n</think>\n\n{rest}"


# ------------------------------------------------------------------------------------------ Claude Code

ANTHROPIC = "anthropic-messages"
ANTHROPIC_TOOLS = [{"name": "bash", "description": "", "input_schema": {"type": "object", "properties": {}}}]


def claude(*messages: Any, system: str = "You are Claude Code.") -> Body:
    blocks = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.220.316;\n{system}"}]
    return {"model": "m", "max_tokens": 4000, "system": blocks, "tools": ANTHROPIC_TOOLS, "messages": list(messages)}


def said(text: str) -> Any:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def results(message: Any, *more: str) -> Any:
    blocks = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "out"}
        for block in message["content"]
        if block["type"] == "tool_use"
    ]
    return {"role": "user", "content": [*blocks, *({"type": "text", "text": text} for text in more)]}


def claude_turns(run: Run, count: int, headers: Mapping[str, str] | None = None) -> tuple[list[Any], list[Call]]:
    """The history after so many turns of thinking and a tool call, and the calls."""
    history: list[Any] = [said("Task.")]
    calls: list[Call] = []
    for turn in range(count):
        call, message = run.ask(claude(*history), thought(f"step {turn}", tool_call(f'{{"turn": {turn}.0}}')), headers)
        back = {"role": "assistant", "content": message["content"]}
        history += [back, results(message)]
        calls.append(call)
    return history, calls


def test_claude_compacts_inside_its_last_user_message_and_keeps_a_tail(new_run: NewRun) -> None:
    run = new_run(claude_code.WIRE, ANTHROPIC)
    history, calls = claude_turns(run, 3)
    last = {"role": "user", "content": [*history[-1]["content"], {"type": "text", "text": CLAUDE_ASK}]}
    summary, _ = run.ask(claude(*history[:-1], last), "<analysis>…</analysis><summary>it went well</summary>")
    assert run.extends(calls[-1], summary)
    after, message = run.ask(claude(said(CONTINUED), *history[-2:], {"role": "system", "content": "Files."}), "On.")
    assert run.holds(after, calls[-1])
    then, _ = run.ask(
        claude(
            said(CONTINUED),
            *history[-2:],
            {"role": "system", "content": "Files."},
            {"role": "assistant", "content": message["content"]},
            said("Go on."),
        ),
        "Done.",
    )
    assert run.extends(after, then)
    assert (summary.part.role, after.part.role, then.part.role) == (MAIN_SUMMARY, MAIN, MAIN)
    assert run.forks() == {"compaction": 1}
    assert run.check() == {MAIN: 1, MAIN_SUMMARY: 1}


def test_claude_summarises_only_the_older_part_after_a_prompt_that_was_too_long(new_run: NewRun) -> None:
    run = new_run(claude_code.WIRE, ANTHROPIC)
    history, calls = claude_turns(run, 4)
    older = [*history[:2], {"role": "user", "content": [*history[2]["content"], {"type": "text", "text": CLAUDE_ASK}]}]
    summary, _ = run.ask(claude(*older), "<summary>so far</summary>")
    assert run.extends(calls[0], summary)
    after, _ = run.ask(claude(said(CONTINUED), *history[-4:]), "On.")
    assert run.holds(after, calls[2])
    assert run.holds(after, calls[3])
    assert run.forks() == {"compaction": 2}
    assert run.check() == {MAIN: 2, MAIN_SUMMARY: 1}


def test_claude_asks_for_a_summary_of_a_prompt_that_was_answered_already(new_run: NewRun) -> None:
    """The instruction stands in a user message that an earlier prompt ended with: the branch begins behind the result."""
    run = new_run(claude_code.WIRE, ANTHROPIC)
    history, calls = claude_turns(run, 2)
    answered, _ = run.ask(claude(*history), "Thinking aloud.")
    last = {"role": "user", "content": [*history[-1]["content"], {"type": "text", "text": CLAUDE_ASK}]}
    summary, _ = run.ask(claude(*history[:-1], last), "<summary>so far</summary>")
    assert run.extends(calls[-1], summary)
    assert not run.holds(summary, answered)
    assert run.forks() == {"compaction": 1}
    assert run.check() == {MAIN: 1, MAIN_SUMMARY: 1}


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks: blocks,
        lambda blocks: [{**block, "signature": ""} if block["type"] == "thinking" else block for block in blocks],
        lambda blocks: [block for block in blocks if block["type"] != "thinking"],
        lambda blocks: [block for block in blocks if block["type"] != "text" or block["text"].strip()],
        lambda blocks: [
            {**block, "input": {"i": 1, "a": "x"}} if block["type"] == "tool_use" else block for block in blocks
        ],
        lambda blocks: [
            {**block, "input": {"__unparsedToolInput": {"raw": "", "len": 0}}} if block["type"] == "tool_use" else block
            for block in blocks
        ],
    ],
    ids=["as it was", "signature lost", "thinking dropped", "blank text dropped", "1.0 to 1", "input replaced"],
)
def test_claude_sends_an_answer_back_in_another_form(new_run: NewRun, change: Callable[[list[Any]], list[Any]]) -> None:
    run = new_run(claude_code.WIRE, ANTHROPIC)
    first, message = run.ask(claude(said("Task.")), thought("hm", " \n " + tool_call('{"a" : "x",  "i": 1.0}')))
    back = {"role": "assistant", "content": change(message["content"])}
    then, _ = run.ask(claude(said("Task."), back, results(message)), "Done.")
    assert run.extends(first, then)
    assert run.forks() == {}
    assert run.check() == {MAIN: 1}


def test_claude_moves_its_cache_breakpoint_and_writes_text_as_a_block_or_a_string(new_run: NewRun) -> None:
    run = new_run(claude_code.WIRE, ANTHROPIC)
    marked = {"type": "text", "text": "Reminder.", "cache_control": {"type": "ephemeral"}}
    first, message = run.ask(claude(said("Task."), {"role": "system", "content": [marked]}), tool_call())
    history = [said("Task."), {"role": "system", "content": "Reminder."}]
    back = {"role": "assistant", "content": message["content"]}
    then, _ = run.ask(claude(*history, back, results(message)), "Done.")
    assert run.extends(first, then)
    assert run.forks() == {}


def test_claude_runs_two_sub_agents_with_one_task_in_turns_and_compacts_one_of_them(new_run: NewRun) -> None:
    run = new_run(claude_code.WIRE, ANTHROPIC)
    run.ask(claude(said("Task.")), tool_call())
    first: dict[str, Call] = {}
    history: dict[str, list[Any]] = {}
    for agent in ("a", "b"):
        mark = {"x-claude-code-agent-id": agent}
        history[agent] = [said("Look.")]
        first[agent], message = run.ask(claude(*history[agent], system="Agent."), tool_call(), mark)
        history[agent] += [{"role": "assistant", "content": message["content"]}, results(message)]
    assert first["a"].id != first["b"].id, "an equal request of another sub-agent is no retry"
    for agent in ("b", "a"):
        then, _ = run.ask(claude(*history[agent], system="Agent."), "Found.", {"x-claude-code-agent-id": agent})
        assert run.extends(first[agent], then)
        assert then.part.role is SUB
    mark = {"x-claude-code-agent-id": "a"}
    asked = [*history["a"], {"role": "assistant", "content": "Found."}, said(CLAUDE_ASK)]
    summary, _ = run.ask(claude(*asked, system="Agent."), "<summary>found</summary>", mark)
    after, _ = run.ask(claude(said(CONTINUED), *history["a"][-2:], system="Agent."), "On.", mark)
    # A sub-agent of the sub-agent.
    nested, _ = run.ask(claude(said("Deeper."), system="Agent."), "Deep.", {"x-claude-code-agent-id": "c"})
    assert (summary.part.role, after.part.role, nested.part.role) == (SUB_SUMMARY, SUB, SUB)
    assert run.forks() == {"new-thread": 3, "compaction": 1}
    assert run.check() == {MAIN: 1, SUB: 3, SUB_SUMMARY: 1}


def test_claude_falls_back_to_a_request_without_a_stream(new_run: NewRun) -> None:
    run = new_run(claude_code.WIRE, ANTHROPIC)
    first, _ = run.ask({**claude(said("Task.")), "stream": True}, "Hi.", delivered=False)
    again, _ = run.ask(claude(said("Task.")), "never sampled")
    assert again is first


# ------------------------------------------------------------------------------------------ Codex

RESPONSES = "openai-responses"
CODEX_TOOLS = [{"type": "function", "name": "bash", "description": "", "parameters": {"type": "object"}}]
MAIN_THREAD = {"thread-id": "t1", "session-id": "s"}


def codex_body(*items: Any, tools: bool = True) -> Body:
    return {"model": "m", "instructions": "You are Codex.", "input": list(items), "tools": CODEX_TOOLS if tools else []}


def item(role: str, text: str) -> Any:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def codex_turn(run: Run, items: list[Any], says: str, headers: Mapping[str, str] = MAIN_THREAD) -> Call:
    """Ask, and add what came back and the tools' results to the items."""
    call, answer = run.ask(codex_body(*items), says, headers)
    items += answer["output"]
    items += [
        {"type": "function_call_output", "call_id": each["call_id"], "output": "out"}
        for each in answer["output"]
        if each["type"] == "function_call"
    ]
    return call


def test_codex_compacts_without_tools_and_goes_on_under_the_same_name(new_run: NewRun) -> None:
    run = new_run(codex.WIRE, RESPONSES)
    items = [item("developer", "Env 1."), item("user", "Task.")]
    first = codex_turn(run, items, thought("hm", tool_call('{"a" :  1.0}')))
    second = codex_turn(run, items, thought("so", tool_call()))
    assert run.extends(first, second)
    mark = {**MAIN_THREAD, "x-codex-turn-metadata": '{"request_kind":"compaction"}'}
    summary, _ = run.ask(codex_body(*items, item("user", CODEX_ASK), tools=False), "A handoff.", mark)
    fresh = [
        item("developer", "Env 2."),
        item("user", "Task."),
        item("user", "Another language model started to solve this problem. A handoff."),
    ]
    after = codex_turn(run, fresh, "On.")
    then = codex_turn(run, [*fresh, item("user", "More.")], "Done.")
    assert run.extends(after, then)
    assert (summary.part.role, after.part.role) == (MAIN_SUMMARY, MAIN)
    assert run.forks() == {"compaction": 2}
    assert run.check() == {MAIN: 2, MAIN_SUMMARY: 1}


def test_codex_keeps_the_finished_items_of_an_answer_that_broke_off(new_run: NewRun) -> None:
    run = new_run(codex.WIRE, RESPONSES)
    items = [item("user", "Task.")]
    cut, answer = run.ask(codex_body(*items), thought("hm", tool_call()), MAIN_THREAD, delivered=False)
    kept = [each for each in answer["output"] if each["type"] == "reasoning"]
    then, _ = run.ask(codex_body(*items, *kept), "Again.", MAIN_THREAD)
    assert not run.holds(then, cut), "a tool call that never arrived is not taken for one that did"
    assert not run.session.tree.delivered(cut.id)
    assert run.forks() == {"half-answer": 1}
    assert run.check() == {MAIN: 1}
    assert len(run.session.tree.output_ids(cut.id)) > 20, "the sampled tokens stand"


def test_codex_sub_agents_have_threads_of_their_own_and_tell_the_main_one_later(new_run: NewRun) -> None:
    run = new_run(codex.WIRE, RESPONSES)
    items = [item("user", "Task.")]
    first = codex_turn(run, items, tool_call())
    mark = {"thread-id": "t2", "session-id": "s", "x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t1"}
    theirs = [item("user", "Look.")]
    sub = codex_turn(run, theirs, tool_call(), mark)
    second = codex_turn(run, items, "Waiting.")
    sub_then = codex_turn(run, theirs, "Found.", mark)
    items.append(item("user", "<subagent_notification>Found.</subagent_notification>"))
    third = codex_turn(run, items, "Done.")
    assert run.extends(first, second)
    assert run.extends(second, third)
    assert run.extends(sub, sub_then)
    assert run.forks() == {"new-thread": 1}
    assert run.check() == {MAIN: 1, SUB: 1}


# ------------------------------------------------------------------------------------------ opencode, qwen, mini

CHAT = "openai-chat"
CHAT_TOOLS = [{"type": "function", "function": {"name": "bash", "description": "", "parameters": {"type": "object"}}}]


def chat(system: str, *messages: Any, tools: bool = True, **fields: Any) -> Body:
    listed = [{"role": "system", "content": system}, *messages]
    return {"model": "m", "messages": listed, **({"tools": CHAT_TOOLS} if tools else {}), **fields}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def message_of(answer: Any) -> Any:
    return answer["choices"][0]["message"]


def result(message: Any, text: str = "out") -> Any:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def test_opencode_asks_for_a_title_first_and_flattens_the_history_for_a_summary(new_run: NewRun) -> None:
    run = new_run(opencode.WIRE, CHAT)
    session = {"x-session-id": "s1"}
    title, _ = run.ask(chat("You are a title generator.", user("Task."), tools=False), "A title", session)
    first, answer = run.ask(chat("opencode.", user("Task.")), tool_call(), session)
    message = message_of(answer)
    second, _ = run.ask(chat("opencode.", user("Task."), message, result(message)), "Done.", session)
    flat = chat("You are a context summarization agent", user('[Assistant tool call]: bash({"x":1})'), tools=False)
    summary, answer = run.ask(flat, "It went well.", session)
    compacted = [user("What did we do so far?"), message_of(answer), user("Continue if you have next steps.")]
    after, _ = run.ask(chat("opencode.", *compacted), "On.", session)
    assert run.extends(first, second)
    assert run.holds(after, summary), "the summary comes back as an answer, with its own tokens"
    roles = [call.part.role for call in (title, first, summary, after)]
    assert roles == [AUXILIARY, MAIN, MAIN_SUMMARY, MAIN]
    assert set(run.forks()) == {"compaction", "new-thread"}
    assert run.check() == {MAIN: 2, MAIN_SUMMARY: 1}


@pytest.mark.parametrize(
    ("function", "said_back"),
    [
        ({"name": "invalid", "arguments": '{"tool":"bash","error":"no such tool"}'}, "The arguments are invalid"),
        ({"name": "bash", "arguments": '{"a":1,"b":"é"}'}, "out"),
        ({"name": "bash", "arguments": "{}"}, "Tool execution aborted"),
    ],
    ids=["renamed", "written anew", "half an answer"],
)
def test_opencode_changes_a_tool_call_and_keeps_its_id(new_run: NewRun, function: Any, said_back: str) -> None:
    run = new_run(opencode.WIRE, CHAT)
    first, answer = run.ask(chat("opencode.", user("Task.")), "Look. " + tool_call('{"b" : "\\u00e9", "a":  1.0}'))
    message = message_of(answer)
    back = {**message, "tool_calls": [{**message["tool_calls"][0], "function": function}]}
    then, _ = run.ask(chat("opencode.", user("Task."), back, result(message, said_back)), "Done.")
    assert run.extends(first, then)
    assert run.forks() == {}
    assert run.check() == {MAIN: 1}


def test_qwen_trims_thinking_asks_again_for_more_and_goes_on_uncompressed(new_run: NewRun) -> None:
    run = new_run(qwen_code.WIRE, CHAT)
    cut, _ = run.ask(chat("Qwen Code.", user("Task."), max_tokens=8), thought("long", tool_call()), limit=8)
    more, answer = run.ask(chat("Qwen Code.", user("Task."), max_tokens=64), thought("\n long \n", tool_call()))
    assert more is not cut
    message = message_of(answer)
    back = {**message, "reasoning_content": message["reasoning_content"].strip()}
    second, answer = run.ask(chat("Qwen Code.", user("Task."), back, result(message)), "So.")
    summary, _ = run.ask(
        chat("You are the component that summarizes internal chat history", user("Task."), back, tools=False), "Sum."
    )
    third, _ = run.ask(
        chat("Qwen Code.", user("Task."), back, result(message), message_of(answer), user("On.")), "Done."
    )
    assert run.extends(more, second)
    assert run.extends(second, third)
    assert summary.part.role is MAIN_SUMMARY
    assert run.forks() == {"retry": 1, "compaction": 1}
    assert run.check() == {MAIN: 2, MAIN_SUMMARY: 1}


def test_a_turn_that_the_harness_cannot_use_is_dropped_and_complained_about(new_run: NewRun) -> None:
    run = new_run(GENERIC, CHAT)
    dropped, _ = run.ask(chat("mini.", user("Task.")), tool_call(name="nonsense"))
    then, answer = run.ask(chat("mini.", user("Task."), user("Error: unknown tool.")), "Sorry.")
    assert not run.holds(then, dropped)
    last, _ = run.ask(
        chat("mini.", user("Task."), user("Error: unknown tool."), message_of(answer), user("On.")), "Done."
    )
    assert run.extends(then, last)
    assert run.forks() == {"dropped-answer": 1}
    assert run.check() == {MAIN: 2}


def test_an_answer_that_the_harness_writes_anew_is_unexplained_each_time(new_run: NewRun) -> None:
    run = new_run(GENERIC, CHAT)
    run.ask(chat("Main.", user("Task.")), "One.")
    for other in ("Another.", "Yet another.", "And one more."):
        run.ask(chat("Main.", user("Task."), {"role": "assistant", "content": other}, user("Go on.")), f"After {other}")
    assert run.forks() == {"unexplained": 3}
    assert run.check() == {MAIN: 4}


def test_a_history_rewritten_by_no_rule_is_told_with_both_sides(
    new_run: NewRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(GENERIC, CHAT)
    _, answer = run.ask(chat("Main.", user("Task.")), "One.")
    history = [user("Task."), message_of(answer), user("the first words")]
    _, answer = run.ask(chat("Main.", *history), "Two.")
    history[2] = user("the other words")
    with caplog.at_level(logging.WARNING):
        run.ask(chat("Main.", *history, message_of(answer), user("Go on.")), "Three.")
    assert run.forks() == {"unexplained": 1}
    assert "an unexplained fork" in caplog.text
    assert "the first words" in caplog.text
    assert "the other words" in caplog.text
    assert run.check() == {MAIN: 2}


def test_what_nobody_knows_in_a_body_is_kept_in_the_journal(rendering: Rendering) -> None:
    run = Run(rendering, GENERIC, CHAT)
    body = chat("Main.", user("Task."), context_management={"edits": ["x"]}, metadata={"user_id": "u"})
    conversation = run.dialect.parse(body)
    _, records = run.session.begin(conversation, body, b"d", run.dialect, {}, 10**6, 0.0)
    request = json.loads(records[-1].request)  # type: ignore[union-attr]
    assert request["body"] == {"model": "m", "context_management": {"edits": ["x"]}, "metadata": {"user_id": "u"}}


def test_two_runs_have_nothing_in_common(new_run: NewRun) -> None:
    one, other = new_run(GENERIC, CHAT), new_run(GENERIC, CHAT)
    _, answer = one.ask(chat("Main.", user("Task.")), "Hi.")
    call, _ = other.ask(chat("Main.", user("Task."), message_of(answer), user("On.")), "Done.")
    assert call.base is None
    assert CallId("r.1.1") not in other.session.tree
