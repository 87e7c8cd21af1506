"""What a harness's requests look like: how the proxy tells its threads apart, and how it may be kept waiting.

Data of a profile, read by the gateway (docs/harness-profiles.md). A harness that no profile describes is read by
`GENERIC`, which knows the marks of all of them. Patterns are regular expressions, searched without regard to case.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Hold:
    """How an answer's stream is held back until nothing can break it any more.

    A stream that is cut after text ends some harnesses, one that is cut before its headers none; a long wait before the
    headers is borne, or ends in an equal request, which joins its call. So the headers are held too, and only when that
    takes long are they sent, with heartbeats after them; then the whole answer goes out at once.
    """

    headers_s: float = 60.0
    """How long the headers are held back at most."""
    heartbeat_s: float = 10.0
    """Between heartbeats after that."""


@dataclass(frozen=True)
class Wire:
    """How one harness's calls are told apart. Header names are in lower case."""

    thread_headers: tuple[str, ...] = ()
    """Headers whose values name the thread that a call belongs to: main thread or sub-agent. The first found counts."""
    sub_agent_headers: tuple[str, ...] = ()
    """A call with one of these is a sub-agent's."""
    sub_agent_system: tuple[str, ...] = ()
    """So is one whose system prompt has one of these."""
    summary_headers: tuple[tuple[str, str], ...] = ()
    """(header, pattern): a call with one of these asks for a summary."""
    summary: tuple[str, ...] = ()
    """So does one whose system prompt or last message has one of these."""
    auxiliary: tuple[str, ...] = ()
    """A call without tools whose system prompt or last message has one of these is an aside: a title, a topic."""
    server_lines: tuple[str, ...] = ()
    """Lines of a system prompt that are for the server and not for the model: left out of the prompt."""
    volatile: tuple[str, ...] = ()
    """Parts of a system prompt that change without changing what it says: it is recognised without them, and rendered
    as it was first seen in the run. Dates, times, ids and commits are always taken for volatile."""
    hold: Hold = field(default_factory=Hold)


GENERIC = Wire(
    thread_headers=("x-claude-code-agent-id", "thread-id", "x-session-id"),
    sub_agent_headers=("x-claude-code-agent-id", "x-openai-subagent", "x-parent-session-id"),
    sub_agent_system=("cc_is_subagent=true",),
    summary_headers=(("x-codex-turn-metadata", r'"request_kind"\s*:\s*"compaction"'),),
    summary=(
        r"your task is to create a detailed summary of the conversation",
        r"you are performing a context checkpoint compaction",
        r"you are a context summarization agent",
        r"summarizes internal chat history",
    ),
    auxiliary=(
        r"title generator",
        r"generate a (?:short |concise |brief )*title",
        r"session title",
        r"topic of (?:this|the) conversation",
        r"isNewTopic",
    ),
    server_lines=(r"^x-anthropic-billing-header:[^\n]*\n*",),
    volatile=(r"^gitStatus:(?:.|\n)*?(?=\n\n#|\Z)",),
)
"""The marks of every harness that was looked at, for one that no profile describes."""
