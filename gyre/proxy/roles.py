"""What a call is for: the run's main thread, a sub-agent, a summary of one of them, or an aside like a title.

A generic reading of what harnesses send (headers that mark sub-agents, the instruction that asks for a summary), and of
how the run's threads begin. The first thread that is no aside is the main one; a thread that begins with the main one's
system prompt goes on with it, whatever its messages (after a compaction, say).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gyre.proxy.conversation import Conversation, Speaker, message_key
from gyre.trajectory.records import LineageRole

_SUB_AGENT_HEADERS = ("x-claude-code-agent-id", "x-openai-subagent", "x-parent-session-id")
_SUB_AGENT_SYSTEM = "cc_is_subagent=true"
_SUMMARY = re.compile(
    r"your task is to create a detailed summary of the conversation"
    r"|you are performing a context checkpoint compaction"
    r"|you are a context summarization agent"
    r"|summarizes internal chat history",
    re.IGNORECASE,
)
_ASIDE = re.compile(
    r"title generator|generate a (?:short |concise |brief )*title|session title"
    r"|topic of (?:this|the) conversation|isNewTopic",
    re.IGNORECASE,
)


class Roles:
    """The roles of one run's calls, given in the order in which the calls begin."""

    def __init__(self) -> None:
        self._main: bytes | None = None

    def of(self, conversation: Conversation, headers: Mapping[str, str]) -> LineageRole:
        """The call's role. `headers` are the request's, their names in lower case."""
        system = "\n".join(message.text for message in conversation.messages if message.speaker is Speaker.SYSTEM)
        if not conversation.tools and _ASIDE.search(system):
            return LineageRole.AUXILIARY
        marked = any(name in headers for name in _SUB_AGENT_HEADERS) or _SUB_AGENT_SYSTEM in system
        # A summary may be asked for under a system prompt of its own: without a mark it is then the main thread's.
        summary_system = _SUMMARY.search(system) is not None
        summary = summary_system or _asks_for_summary(conversation)
        if self._main is None and not marked and not summary:
            self._main = opening(conversation)
        sub_agent = marked or (not summary_system and self._main is not None and opening(conversation) != self._main)
        if sub_agent:
            return LineageRole.SUB_AGENT_SUMMARY if summary else LineageRole.SUB_AGENT
        return LineageRole.MAIN_SUMMARY if summary else LineageRole.MAIN

    def restore(self, role: LineageRole, call_opening: bytes) -> None:
        """A call read from a journal, in the order in which the calls began."""
        if role is LineageRole.MAIN and self._main is None:
            self._main = call_opening


def opening(conversation: Conversation) -> bytes:
    """What tells one thread's calls from another's, whatever became of their messages: the system prompt."""
    first = conversation.messages[0]
    return message_key(first) if first.speaker is Speaker.SYSTEM else b""


def _asks_for_summary(conversation: Conversation) -> bool:
    last = conversation.messages[-1]
    return last.speaker is Speaker.USER and _SUMMARY.search(last.text) is not None
