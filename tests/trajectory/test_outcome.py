"""Outcomes and rewards: the cases C5 and C10, and every other way in which a run can end."""

from __future__ import annotations

import re

import pytest

from gyre.loss.advantages import group_advantages
from gyre.trajectory.outcome import (
    GatewayReport,
    HarnessEnd,
    HarnessEnding,
    Judgement,
    Verdict,
    failure_of_ours,
    harness_end,
    judge,
)
from gyre.trajectory.records import Outcome

EXITED = HarnessEnd(HarnessEnding.EXITED, 0)
TIMED_OUT = HarnessEnd(HarnessEnding.TIMED_OUT, None, "reached its limit of 10 s")
SERVED = GatewayReport(calls=3, interrupted_calls=0, failure="")


def evaluate(needs_s: float, budget_s: float) -> Judgement:
    """An evaluator that would give 1.0 after `needs_s` and is stopped at its own budget, whatever the run used up."""
    return Judgement(1.0, "") if needs_s <= budget_s else Judgement(None, f"not done within its {budget_s:g} s")


def test_c5_finished_timed_out_with_a_partial_score_and_a_crashed_evaluator() -> None:
    verdicts = [
        judge(EXITED, SERVED, Judgement(1.0, "")),
        judge(TIMED_OUT, SERVED, Judgement(0.4, "2 of 5 checks")),
        judge(EXITED, SERVED, Judgement(None, "exit code 1: KeyError")),
    ]
    assert [verdict.outcome for verdict in verdicts] == [
        Outcome.FINISHED,
        Outcome.TIMED_OUT,
        Outcome.EVALUATOR_FAILED,
    ]
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.4, None]
    assert verdicts[2].reason == "exit code 1: KeyError"
    rewards = [verdict.reward for verdict in verdicts if verdict.reward is not None]
    assert group_advantages(rewards, "mean") == pytest.approx((0.3, -0.3))


def test_c10_the_evaluators_budget_is_its_own_and_begins_where_the_run_ended() -> None:
    end = harness_end(started_s=0.0, ended_s=9.9, limit_s=10.0, exit_code=0, signal=None)
    assert end.ending is HarnessEnding.EXITED
    assert judge(end, SERVED, evaluate(needs_s=5.0, budget_s=6.0)) == Verdict(Outcome.FINISHED, 1.0, "")
    late = judge(end, SERVED, evaluate(needs_s=7.0, budget_s=6.0))
    assert late == Verdict(Outcome.EVALUATOR_FAILED, None, "not done within its 6 s")


def test_a_machine_that_cannot_run_an_evaluator_says_nothing_of_the_run() -> None:
    judgement = Judgement(None, "the evaluator could not be run: no space left", failed_here=True)
    assert judge(EXITED, SERVED, judgement) == Verdict(Outcome.INFRA_FAILED, None, judgement.reason)


@pytest.mark.parametrize("exit_code", [0, 1, 137])
def test_an_exit_code_is_not_a_judgement(exit_code: int) -> None:
    end = HarnessEnd(HarnessEnding.EXITED, exit_code)
    assert judge(end, SERVED, Judgement(0.75, "")) == Verdict(Outcome.FINISHED, 0.75, "")


@pytest.mark.parametrize(
    ("exit_code", "signal", "ended_s", "ending"),
    [
        (0, None, 3.0, HarnessEnding.EXITED),
        (3, None, 12.0, HarnessEnding.EXITED),
        (None, 15, 10.0, HarnessEnding.TIMED_OUT),
        (None, 9, 11.5, HarnessEnding.TIMED_OUT),
        (None, None, 10.5, HarnessEnding.TIMED_OUT),
        (None, 9, 3.0, HarnessEnding.KILLED),
        (None, 11, 9.9, HarnessEnding.KILLED),
        (None, None, 3.0, HarnessEnding.LOST),
    ],
)
def test_how_a_harness_ended_is_told_by_its_status_and_its_limit(
    exit_code: int | None, signal: int | None, ended_s: float, ending: HarnessEnding
) -> None:
    end = harness_end(started_s=0.0, ended_s=ended_s, limit_s=10.0, exit_code=exit_code, signal=signal)
    assert (end.ending, end.exit_code) == (ending, exit_code)


@pytest.mark.parametrize(
    ("end", "report", "reason"),
    [
        (
            HarnessEnd(HarnessEnding.KILLED, None, "was killed by signal 9"),
            SERVED,
            "^the harness was killed by signal 9$",
        ),
        (
            HarnessEnd(HarnessEnding.LOST, None, "is gone and left no exit status"),
            SERVED,
            "^the harness is gone and left",
        ),
        (EXITED, GatewayReport(3, 0, "no space left under the journal"), "no space left under the journal"),
        (TIMED_OUT, GatewayReport(3, 0, "no space left under the journal"), "no space left under the journal"),
        (
            HarnessEnd(HarnessEnding.EXITED, 127),
            GatewayReport(0, 0, ""),
            r"without one answered model call \(exit code",
        ),
        (TIMED_OUT, GatewayReport(0, 0, ""), "without one answered model call"),
        (
            HarnessEnd(HarnessEnding.EXITED, 1),
            GatewayReport(3, 1, ""),
            "gave up with exit code 1 after an error of the",
        ),
    ],
)
def test_a_failure_of_ours_is_never_a_reward(end: HarnessEnd, report: GatewayReport, reason: str) -> None:
    assert failure_of_ours(end, report)
    verdict = judge(end, report, Judgement(1.0, ""))
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA_FAILED, None)
    assert re.search(reason, verdict.reason)


def test_a_harness_that_could_not_be_started_is_a_failure_of_ours() -> None:
    end = HarnessEnd(HarnessEnding.LOST, None, "could not be started: no bash")
    verdict = judge(end, SERVED, None)
    assert verdict == Verdict(Outcome.INFRA_FAILED, None, "the harness could not be started: no bash")


def test_a_partial_score_says_why_it_is_partial() -> None:
    verdict = judge(TIMED_OUT, SERVED, Judgement(0.4, "2 of 5 checks"))
    assert verdict == Verdict(Outcome.TIMED_OUT, 0.4, "the harness reached its limit of 10 s; 2 of 5 checks")


@pytest.mark.parametrize("end", [EXITED, TIMED_OUT])
def test_a_harness_that_outlived_an_error_of_ours_is_evaluated(end: HarnessEnd) -> None:
    report = GatewayReport(calls=3, interrupted_calls=1, failure="")
    assert failure_of_ours(end, report) == ""
    assert judge(end, report, Judgement(0.5, "")).reward == 0.5


@pytest.mark.parametrize(
    "judgement", [None, Judgement(None, ""), Judgement(float("nan"), ""), Judgement(float("inf"), "")]
)
def test_an_evaluation_without_a_number_is_the_evaluators_failure_and_says_something(
    judgement: Judgement | None,
) -> None:
    verdict = judge(EXITED, SERVED, judgement)
    assert (verdict.outcome, verdict.reward) == (Outcome.EVALUATOR_FAILED, None)
    assert verdict.reason
