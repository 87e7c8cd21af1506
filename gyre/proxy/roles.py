"""What a call is for: the run's main thread, a sub-agent, a summary of one of them, or an aside like a title.

A harness's profile says what its requests show of that (gyre.harness.wire): headers, and words of system prompts and
last messages. What it does not show is told by how the run's threads begin: the first thread that is no aside is the
main one; a thread that has its name, or begins with its system prompt, goes on with it, whatever became of its messages
(after a compaction, say); any other is a sub-agent's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gyre.harness.wire import Wire
from gyre.proxy.conversation import Conversation, Message, Speaker, digest
from gyre.proxy.recognition import Walk
from gyre.proxy.volatile import SystemPrompt, SystemPrompts, marks_of
from gyre.trajectory.forks import Circumstances
from gyre.trajectory.records import LineageRole


@dataclass(frozen=True, slots=True)
class ThreadKey:
    """What tells one thread's calls from another's, whatever became of their messages."""

    name: str
    """As the harness names it in a header; empty where it does not."""
    opening: bytes
    """Of its system prompt."""


@dataclass(frozen=True, slots=True)
class Part:
    """A call's part in the run."""

    role: LineageRole
    thread: ThreadKey


class Roles:
    """The parts of one run's calls, told in the order in which the calls begin."""

    def __init__(self, wire: Wire, systems: SystemPrompts) -> None:
        self._wire = wire
        self._systems = systems
        self._marks = marks_of(wire)
        self._main: ThreadKey | None = None

    def thread_name(self, headers: Mapping[str, str]) -> str:
        """The thread's name in the request's headers (names in lower case), or empty."""
        return next((headers[name] for name in self._wire.thread_headers if name in headers), "")

    def of(self, conversation: Conversation, headers: Mapping[str, str], history: Part | None) -> Part:
        """The call's part. `headers` are the request's, their names in lower case; `history` is the part of the last
        answer of the run that is among its messages."""
        opening = [self._systems.read(message.text) for message in _opening(conversation.messages)]
        # Its first text alone: what follows (reminders, the environment) is not the same all along.
        thread = ThreadKey(self.thread_name(headers), digest(*(system.steady for system in opening[:1])))
        if self._is_aside(conversation, opening):
            return Part(LineageRole.AUXILIARY, thread)
        marked = self._is_marked(opening, headers)
        own_system = any(system.summary for system in opening)
        summary = own_system or self._asks_for_summary(conversation, headers)
        if own_system and not thread.name:
            # It may be asked for under a system prompt of its own: it is then of the thread whose answers it is given,
            # and of the main one where it is given none.
            thread = history.thread if history is not None else self._main or thread
        if self._main is None and not marked and not summary:
            self._main = thread
        if marked or not self._is_main(thread):
            return Part(LineageRole.SUB_AGENT_SUMMARY if summary else LineageRole.SUB_AGENT, thread)
        return Part(LineageRole.MAIN_SUMMARY if summary else LineageRole.MAIN, thread)

    def restore(self, part: Part) -> None:
        """A call read from a journal, in the order in which the calls began."""
        if part.role is LineageRole.MAIN and self._main is None:
            self._main = part.thread

    def _is_main(self, thread: ThreadKey) -> bool:
        main = self._main
        if main is None or thread.opening == main.opening:
            return True
        return thread.name != "" and thread.name == main.name

    def _is_marked(self, opening: Sequence[SystemPrompt], headers: Mapping[str, str]) -> bool:
        if any(name in headers for name in self._wire.sub_agent_headers):
            return True
        return any(system.sub_agent for system in opening)

    def _is_aside(self, conversation: Conversation, opening: Sequence[SystemPrompt]) -> bool:
        if conversation.tools:
            return False
        if any(system.auxiliary for system in opening):
            return True
        first = conversation.messages[len(opening) :]
        return len(first) == 1 and first[0].speaker is Speaker.USER and _has(self._marks.auxiliary, first[0])

    def _asks_for_summary(self, conversation: Conversation, headers: Mapping[str, str]) -> bool:
        for name, pattern in self._marks.summary_headers:
            if pattern.search(headers.get(name, "")):
                return True
        # Claude Code puts reminders behind it, as messages of the system.
        spoken = (message for message in reversed(conversation.messages) if message.speaker is not Speaker.SYSTEM)
        last = next(spoken, None)
        return last is not None and last.speaker is Speaker.USER and _has(self._marks.summary, last)


class Course:
    """How the threads of one run went so far, as far as it explains what a next request is."""

    def __init__(self) -> None:
        self._seen: set[str | bytes] = set()
        self._summarised: set[str | bytes] = set()

    def next(self, part: Part, walk: Walk) -> Circumstances:
        """The circumstances of a request that begins now."""
        new, after_summary = self._takes(part)
        return Circumstances(new, walk.begins, after_summary, walk.left is not None)

    def restore(self, part: Part) -> None:
        """A call read from a journal, in the order in which the calls began."""
        self._takes(part)

    def _takes(self, part: Part) -> tuple[bool, bool]:
        if part.role is LineageRole.AUXILIARY:
            return True, False
        thread = _MAIN if part.role in (LineageRole.MAIN, LineageRole.MAIN_SUMMARY) else _known_by(part.thread)
        new = thread not in self._seen
        self._seen.add(thread)
        if part.role in (LineageRole.MAIN_SUMMARY, LineageRole.SUB_AGENT_SUMMARY):
            self._summarised.add(thread)
            return new, False
        after_summary = thread in self._summarised
        self._summarised.discard(thread)
        return new, after_summary


_MAIN = "the main thread"


def _known_by(thread: ThreadKey) -> str | bytes:
    return thread.name or thread.opening


def _opening(messages: Sequence[Message]) -> Sequence[Message]:
    """The system messages that a conversation begins with."""
    count = next((place for place, message in enumerate(messages) if message.speaker is not Speaker.SYSTEM), None)
    return messages[:count]


def _has(pattern: re.Pattern[str], message: Message) -> bool:
    return pattern.search(message.text) is not None
