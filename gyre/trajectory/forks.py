"""Why a call began a branch of the tree: the rules by which a fork is known, as one function of what was seen.

The tree says where a fork is and between what tokens; the session says what the request was. A fork that no rule explains is
a harness that rewrote history in a way nobody has looked at yet: it is reported with both its sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gyre.trajectory.records import LineageRole
from gyre.trajectory.tree import Fork, ForkCause


class ForkReason(StrEnum):
    ASIDE = "aside"
    """A title or a topic: a prompt of its own."""
    COMPACTION = "compaction"
    """A request for a summary, or the first one of its thread after a summary."""
    NEW_THREAD = "new-thread"
    """The first request of a thread."""
    RETRY = "retry"
    """The same prompt asked again for more: the answer was cut at its limit, or never came."""
    HALF_ANSWER = "half-answer"
    """It goes on from a part of an answer that never reached the harness whole."""
    DROPPED_ANSWER = "dropped-answer"
    """The harness went on without the answer: it could not use it (an unknown tool, arguments that do not parse)."""
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the session knows of a request, whatever its tokens are."""

    new_thread: bool
    """The first request of its thread."""
    without_answers: bool
    """There is no answer of the run in it. (qwen-code puts a turn of its own words before every thread.)"""
    after_summary: bool
    """The first request of its thread after a summary was asked for."""
    left_answer: bool
    """It goes on from an earlier prompt without the answer to that."""


_SUMMARIES = (LineageRole.MAIN_SUMMARY, LineageRole.SUB_AGENT_SUMMARY)


def explain(fork: Fork, role: LineageRole, circumstances: Circumstances, beside_delivered: bool) -> ForkReason:
    """Why the call with `role` forked. `beside_delivered`: whether the call on the other side reached the harness."""
    if role is LineageRole.AUXILIARY:
        return ForkReason.ASIDE
    if role in _SUMMARIES or circumstances.after_summary:
        return ForkReason.COMPACTION
    if circumstances.new_thread:
        return ForkReason.NEW_THREAD
    if fork.cause is ForkCause.RESAMPLED:
        return ForkReason.RETRY
    if fork.cause is ForkCause.REWRITTEN_OUTPUT and not beside_delivered:
        return ForkReason.HALF_ANSWER
    if circumstances.left_answer:
        return ForkReason.DROPPED_ANSWER
    begins = circumstances.without_answers and fork.cause is not ForkCause.REWRITTEN_OUTPUT
    return ForkReason.NEW_THREAD if begins else ForkReason.UNEXPLAINED
