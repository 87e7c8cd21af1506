"""What a call is for, read from what each harness's requests look like (research on five real ones)."""

from __future__ import annotations

import pytest

from gyre.harness.profiles import claude_code, codex, opencode, qwen_code
from gyre.harness.wire import GENERIC, Wire
from gyre.proxy.conversation import Conversation, Message, Speaker
from gyre.proxy.roles import Part, Roles
from gyre.proxy.volatile import SystemPrompts
from gyre.trajectory.records import LineageRole

MAIN, MAIN_SUMMARY, SUB, SUB_SUMMARY, AUXILIARY = LineageRole
CLAUDE_ASK = "CRITICAL: Respond with TEXT ONLY. Your task is to create a detailed summary of the conversation so far"
CODEX_ASK = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary"
CODEX_SUMMARY = {"x-codex-turn-metadata": '{"turn_id":"1","request_kind":"compaction"}'}
CODEX_TURN = {"x-codex-turn-metadata": '{"turn_id":"1","request_kind":"turn"}'}
CODEX_SUB = {"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t1", "thread-id": "t2"}


def conversation(system: str, *texts: str, tools: bool = True) -> Conversation:
    messages = [Message(Speaker.SYSTEM, system)] if system else []
    messages += [Message(Speaker.USER, text) for text in texts]
    return Conversation(tuple(messages), ({},) if tools else (), (), None, None, False, False, "m")


def roles_of(wire: Wire) -> Roles:
    return Roles(wire, SystemPrompts(wire))


Said = tuple[LineageRole, Conversation, dict[str, str]]
THREADS: dict[str, tuple[Wire, list[Said]]] = {
    "claude-code": (
        claude_code.WIRE,
        [
            (MAIN, conversation("cc_version=2.1.220.316;\nClaude.", "Task."), {}),
            (SUB, conversation("x; cc_is_subagent=true;\nAgent.", "Look."), {"x-claude-code-agent-id": "a"}),
            (MAIN, conversation("cc_version=2.1.220.316;\nClaude.", "Task.", "More."), {}),
            (SUB, conversation("x; cc_is_subagent=true;\nAgent.", "Plan."), {"x-claude-code-agent-id": "b"}),
            (SUB_SUMMARY, conversation("Agent.", "Look.", CLAUDE_ASK), {"x-claude-code-agent-id": "a"}),
            (MAIN_SUMMARY, conversation("cc_version=2.1.220.316;\nClaude.", "Task.", CLAUDE_ASK), {}),
            (MAIN, conversation("cc_version=2.1.220.316;\nClaude.", "This session is being continued"), {}),
            (AUXILIARY, conversation("Generate a concise title", "hi", tools=False), {}),
        ],
    ),
    "codex": (
        codex.WIRE,
        [
            (MAIN, conversation("Codex.", "Task."), {"thread-id": "t1", **CODEX_TURN}),
            (SUB, conversation("Codex.", "Look."), CODEX_SUB),
            (MAIN_SUMMARY, conversation("Codex.", "Task.", "…", tools=False), {"thread-id": "t1", **CODEX_SUMMARY}),
            (MAIN_SUMMARY, conversation("Codex.", "Task.", CODEX_ASK, tools=False), {"thread-id": "t1"}),
            # The environment is told anew after a compaction; the thread's name stays.
            (MAIN, conversation("Codex, again.", "Another language model …"), {"thread-id": "t1", **CODEX_TURN}),
            (SUB_SUMMARY, conversation("Codex.", "Look.", CODEX_ASK, tools=False), CODEX_SUB),
        ],
    ),
    "opencode": (
        opencode.WIRE,
        [
            (AUXILIARY, conversation("You are a title generator.", "hi", tools=False), {"x-session-id": "s1"}),
            (MAIN, conversation("opencode.", "Task."), {"x-session-id": "s1"}),
            (SUB, conversation("Explore.", "Look."), {"x-session-id": "s2", "x-parent-session-id": "s1"}),
            (
                MAIN_SUMMARY,
                conversation("You are a context summarization agent", "[User]: Task.", tools=False),
                {"x-session-id": "s1"},
            ),
            (
                SUB_SUMMARY,
                conversation("You are a context summarization agent", "[User]: Look.", tools=False),
                {"x-session-id": "s2", "x-parent-session-id": "s1"},
            ),
            (
                SUB_SUMMARY,  # without the mark of the others of its session
                conversation("You are a context summarization agent", "[User]: Look.", tools=False),
                {"x-session-id": "s2"},
            ),
            (MAIN, conversation("opencode.", "What did we do so far?"), {"x-session-id": "s1"}),
        ],
    ),
    "qwen-code": (
        qwen_code.WIRE,
        [
            (MAIN, conversation("You are Qwen Code.", "Task."), {}),
            (SUB, conversation("You are a general-purpose agent.", "Look."), {}),
            (SUB, conversation("You write tests.", "Look."), {}),
            (MAIN, conversation("You are Qwen Code.", "Task.", "More."), {}),
            (
                MAIN_SUMMARY,
                conversation("You are the component that summarizes internal chat history", "Task.", tools=False),
                {},
            ),
        ],
    ),
    "any other": (
        GENERIC,
        [
            (AUXILIARY, conversation("You are a title generator. You output only a title.", "hi", tools=False), {}),
            (MAIN, conversation("Main.", "Task."), {}),
            (SUB, conversation("Search.", "Look."), {}),
            (SUB, conversation("Main.", "Task."), {"x-claude-code-agent-id": "1"}),
            (MAIN_SUMMARY, conversation("Main.", "Task.", CLAUDE_ASK), {}),
            (SUB_SUMMARY, conversation("Search.", "Look.", CLAUDE_ASK), {}),
            (SUB_SUMMARY, conversation("You are a context summarization agent", "…", tools=False), CODEX_SUB),
            (MAIN, conversation("Main.", "This session is being continued"), {}),
        ],
    ),
}


@pytest.mark.parametrize("harness", THREADS)
def test_roles_are_told_apart_by_what_the_harness_shows(harness: str) -> None:
    wire, said = THREADS[harness]
    roles = roles_of(wire)
    for place, (role, asked, headers) in enumerate(said):
        assert roles.of(asked, headers, None).role is role, place


def test_a_run_without_tools_or_system_prompt_has_a_main_thread() -> None:
    assert roles_of(GENERIC).of(conversation("", "Task.", tools=False), {}, None).role is MAIN


def test_a_title_in_the_middle_of_a_conversation_without_tools_is_no_aside() -> None:
    asked = conversation("Main.", "Task.", "Generate a title for this page.", tools=False)
    assert roles_of(GENERIC).of(asked, {}, None).role is MAIN


def test_what_a_profile_does_not_name_is_no_mark() -> None:
    roles = roles_of(Wire())
    assert roles.of(conversation("Main.", CLAUDE_ASK), {"x-openai-subagent": "1"}, None).role is MAIN


def test_a_summary_that_shows_nothing_of_its_thread_is_of_the_one_whose_answers_it_is_given() -> None:
    roles = roles_of(qwen_code.WIRE)
    main = roles.of(conversation("Qwen.", "Task."), {}, None)
    sub = roles.of(conversation("You are a general-purpose agent", "Look."), {}, None)
    summary = conversation("You are the component that summarizes internal chat history", "…", tools=False)
    assert roles.of(summary, {}, sub) == Part(SUB_SUMMARY, sub.thread)
    assert roles.of(summary, {}, main) == Part(MAIN_SUMMARY, main.thread)
    assert roles.of(summary, {}, None) == Part(MAIN_SUMMARY, main.thread)
