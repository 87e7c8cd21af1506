"""System prompts as the proxy knows them again: what is for the model in them, what changes without saying anything new.

A date, a commit or git's status near the start of a prompt would make every thread of a run, and every resumed thread,
a branch of its own. So a system prompt is recognised by its steady part, and rendered as it was first seen in the run;
lines that a harness's profile says are for the server are left out altogether. `SystemPrompts` belongs to one run; a
text that comes again, as the system prompt does in every request, is looked at once.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from gyre.harness.wire import Wire
from gyre.proxy.conversation import Message, Speaker

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Sept|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_ALWAYS_VOLATILE = "|".join(
    (
        r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
        r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z| ?[+-]\d\d:?\d\d)?)?",
        r"\b\d{1,2}/\d{1,2}/\d{4}\b",
        rf"\b(?:{_DAY},? )?{_MONTH} \d{{1,2}}(?:,? \d{{4}})?\b",
        rf"\b(?:{_DAY},? )?\d{{1,2}} {_MONTH} \d{{4}}\b",
        r"\b\d{1,2}:\d\d(?::\d\d)?(?: ?[AP]M)?\b",
        r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b",
    )
)
_BLOT = "\N{REPLACEMENT CHARACTER}"
_NEVER = re.compile(r"(?!)")
_KEPT = 64
"""System prompts of a run that are remembered; a harness that writes a new one for each call must not fill the memory."""


@dataclass(frozen=True)
class Marks:
    """A profile's patterns, compiled."""

    server_lines: re.Pattern[str]
    profile_volatile: re.Pattern[str]
    always_volatile: re.Pattern[str]
    sub_agent: re.Pattern[str]
    summary: re.Pattern[str]
    auxiliary: re.Pattern[str]
    summary_headers: tuple[tuple[str, re.Pattern[str]], ...]


@lru_cache(maxsize=64)
def marks_of(wire: Wire) -> Marks:
    return Marks(
        server_lines=_any_of(wire.server_lines),
        profile_volatile=_any_of(wire.volatile),
        always_volatile=re.compile(_ALWAYS_VOLATILE),
        sub_agent=_any_of(wire.sub_agent_system),
        summary=_any_of(wire.summary),
        auxiliary=_any_of(wire.auxiliary),
        summary_headers=tuple((name, _any_of((pattern,))) for name, pattern in wire.summary_headers),
    )


@dataclass(frozen=True)
class SystemPrompt:
    """What one system text is."""

    steady: str
    """Without what is for the server, and with all that is volatile blotted out."""
    rendered: str
    """As it stands in prompts."""
    sub_agent: bool
    summary: bool
    auxiliary: bool


class SystemPrompts:
    """The system texts of one run."""

    def __init__(self, wire: Wire) -> None:
        self._marks = marks_of(wire)
        self._known: OrderedDict[str, SystemPrompt] = OrderedDict()
        self._pinned: OrderedDict[str, str] = OrderedDict()

    def read(self, text: str) -> SystemPrompt:
        """What `text` is. It is rendered as the first text of this run that has the same steady part."""
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._looked_at(text)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return known

    def rendered(self, message: Message) -> Message:
        """The message as it stands in prompts."""
        if message.speaker is not Speaker.SYSTEM:
            return message
        return message._replace(text=self.read(message.text).rendered)

    def _looked_at(self, text: str) -> SystemPrompt:
        marks = self._marks
        told = marks.server_lines.sub("", text)
        steady = marks.always_volatile.sub(_BLOT, marks.profile_volatile.sub(_BLOT, told))
        rendered = self._pinned.setdefault(steady, told)
        if len(self._pinned) > _KEPT:
            self._pinned.popitem(last=False)
        return SystemPrompt(
            steady=steady,
            rendered=rendered,
            sub_agent=marks.sub_agent.search(text) is not None,
            summary=marks.summary.search(text) is not None,
            auxiliary=marks.auxiliary.search(text) is not None,
        )


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    joined = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(joined, re.IGNORECASE | re.MULTILINE) if joined else _NEVER
