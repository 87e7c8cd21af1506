"""Why a call began a branch: each rule by example, and what no rule explains."""

from __future__ import annotations

import pytest

from gyre.ids import CallId
from gyre.trajectory.forks import Circumstances, ForkReason, explain
from gyre.trajectory.records import LineageRole
from gyre.trajectory.tree import Fork, ForkCause

MAIN, SUMMARY, SUB, SUB_SUMMARY, AUXILIARY = LineageRole
NOTHING = Circumstances(new_thread=False, without_answers=False, after_summary=False, left_answer=False)
NEW = Circumstances(new_thread=True, without_answers=True, after_summary=False, left_answer=False)
BEGINS = Circumstances(new_thread=False, without_answers=True, after_summary=False, left_answer=False)
AFTER = Circumstances(new_thread=False, without_answers=True, after_summary=True, left_answer=False)
LEFT = Circumstances(new_thread=False, without_answers=True, after_summary=False, left_answer=True)


@pytest.mark.parametrize(
    ("cause", "role", "circumstances", "beside_delivered", "reason"),
    [
        (ForkCause.NEW_PREFIX, AUXILIARY, BEGINS, True, ForkReason.ASIDE),
        (ForkCause.NEW_PREFIX, SUMMARY, BEGINS, True, ForkReason.COMPACTION),
        (ForkCause.REWRITTEN_PROMPT, SUB_SUMMARY, NOTHING, True, ForkReason.COMPACTION),
        (ForkCause.REWRITTEN_PROMPT, MAIN, AFTER, True, ForkReason.COMPACTION),
        (ForkCause.REWRITTEN_PROMPT, SUB, BEGINS, True, ForkReason.NEW_THREAD),
        (ForkCause.NEW_PREFIX, MAIN, BEGINS, True, ForkReason.NEW_THREAD),
        (ForkCause.RESAMPLED, MAIN, BEGINS, False, ForkReason.RETRY),
        (ForkCause.RESAMPLED, SUB, NEW, True, ForkReason.NEW_THREAD),
        (ForkCause.RESAMPLED, MAIN, NOTHING, True, ForkReason.RETRY),
        (ForkCause.REWRITTEN_OUTPUT, MAIN, NOTHING, False, ForkReason.HALF_ANSWER),
        (ForkCause.REWRITTEN_OUTPUT, MAIN, NOTHING, True, ForkReason.UNEXPLAINED),
        (ForkCause.REWRITTEN_OUTPUT, SUB, BEGINS, True, ForkReason.UNEXPLAINED),
        (ForkCause.REWRITTEN_PROMPT, MAIN, LEFT, True, ForkReason.DROPPED_ANSWER),
        (ForkCause.REWRITTEN_PROMPT, MAIN, NOTHING, True, ForkReason.UNEXPLAINED),
        (ForkCause.SECOND_CONTINUATION, MAIN, NOTHING, True, ForkReason.UNEXPLAINED),
        (ForkCause.SHORTENED, SUB, NOTHING, False, ForkReason.UNEXPLAINED),
    ],
)
def test_a_fork_is_known_by_the_first_rule_that_explains_it(
    cause: ForkCause, role: LineageRole, circumstances: Circumstances, beside_delivered: bool, reason: ForkReason
) -> None:
    fork = Fork(CallId("c"), cause, 3, CallId("a"))
    assert explain(fork, role, circumstances, beside_delivered) is reason
