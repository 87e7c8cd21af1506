"""How a run ended, and its reward (DESIGN §6): the taxonomy of outcomes, as functions of what was seen.

The run's actor says how the harness ended, what the gateway reported, and what the evaluator said; `judge` turns that
into an outcome. Only `finished` and `timed_out` runs have a reward. A failure of ours or of the evaluator is never a
reward of 0: such a run is in no baseline, no loss and no count. A harness's exit code is not a judgement.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from gyre.trajectory.records import Outcome


class HarnessEnding(StrEnum):
    EXITED = "exited"
    """By itself, with whatever code."""
    TIMED_OUT = "timed out"
    """It reached its wall-clock limit and was ended by us."""
    KILLED = "killed"
    """By a signal that was not ours (a crash, the system out of memory)."""
    LOST = "lost"
    """It is gone and left no exit status, or it could not be started."""


@dataclass(frozen=True)
class HarnessEnd:
    ending: HarnessEnding
    exit_code: int | None
    """Of a harness that exited."""
    detail: str = ""
    """For people, what the harness did: "was killed by signal 9", "could not be started: no such file"."""


@dataclass(frozen=True)
class GatewayReport:
    """What the gateway's trace of the run says about how it was served."""

    calls: int
    """Answered calls."""
    interrupted_calls: int
    """Calls for which the harness saw an error of ours."""
    failure: str
    """Why the gateway stopped the run, or empty."""


@dataclass(frozen=True)
class Judgement:
    """What an evaluator run came to: a score, or None and the reason (crashed, over its budget, not a number)."""

    score: float | None
    reason: str
    failed_here: bool = False
    """The machine could not run the evaluator: no word on the run, nor on its evaluator."""


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reward: float | None
    reason: str
    """For people; empty when there is nothing to say."""


def harness_end(
    *, started_s: float, ended_s: float, limit_s: float, exit_code: int | None, signal: int | None
) -> HarnessEnd:
    """How a harness that was started ended, from its times and its exit status (a code, or a signal, or neither).

    One that was still there at its limit was ended by a signal of ours: it timed out.
    """
    if exit_code is not None:
        return HarnessEnd(HarnessEnding.EXITED, exit_code)
    if ended_s - started_s >= limit_s:
        return HarnessEnd(HarnessEnding.TIMED_OUT, None, f"reached its limit of {limit_s:g} s")
    if signal is not None:
        return HarnessEnd(HarnessEnding.KILLED, None, f"was killed by signal {signal}")
    return HarnessEnd(HarnessEnding.LOST, None, "is gone and left no exit status")


def failure_of_ours(end: HarnessEnd, report: GatewayReport) -> str:
    """Why the run's workspace says nothing about the policy, or an empty string: then it is to be evaluated.

    An exit code alone proves nothing, but a non-zero one after an error of ours does: the harness gave up on us.
    """
    if report.failure:
        return report.failure
    if end.ending in (HarnessEnding.KILLED, HarnessEnding.LOST):
        return f"the harness {end.detail or f'was {end.ending.value}'}"
    if report.calls == 0:
        code = "" if end.exit_code is None else f" (exit code {end.exit_code})"
        return f"the harness ended without one answered model call{code}"
    if report.interrupted_calls and end.ending is HarnessEnding.EXITED and end.exit_code != 0:
        return f"the harness gave up with exit code {end.exit_code} after an error of the proxy"
    return ""


def judge(end: HarnessEnd, report: GatewayReport, judgement: Judgement | None) -> Verdict:
    """The run's outcome and reward. `judgement` is None when the run was not evaluated."""
    failure = failure_of_ours(end, report)
    if failure:
        return Verdict(Outcome.INFRA_FAILED, None, failure)
    if judgement is None:
        return Verdict(Outcome.EVALUATOR_FAILED, None, "the run was not evaluated")
    if judgement.failed_here:
        return Verdict(Outcome.INFRA_FAILED, None, judgement.reason)
    if judgement.score is None:
        return Verdict(Outcome.EVALUATOR_FAILED, None, judgement.reason or "the evaluator gave no score")
    if not isfinite(judgement.score):
        return Verdict(Outcome.EVALUATOR_FAILED, None, f"the evaluator's score is {judgement.score}, not a number")
    outcome = Outcome.TIMED_OUT if end.ending is HarnessEnding.TIMED_OUT else Outcome.FINISHED
    said = [f"the harness {end.detail}"] if end.detail else []
    return Verdict(outcome, float(judgement.score), "; ".join([*said, *filter(None, [judgement.reason])]))
