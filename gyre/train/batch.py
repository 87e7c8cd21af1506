"""From settled groups to micro-steps: advantages, staleness, and packing whole lineages.

The core actor hands over each group as its last run settles and adds the plan's micro-steps to the ledger. The plan
depends on the group and the version alone, never on other groups or on who trains it, so that no split of the work can
change the update: a lineage's share of the loss is `advantage`, `1 / run_counted_tokens`, and at the step `1 / |R|`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gyre.actors.messages_replica import LineageWork, MicroStep
from gyre.config import BatchSection, LossSection, OptimizerSection
from gyre.errors import BadInput
from gyre.ids import GroupId, MicroStepId, RunId
from gyre.loss.advantages import group_advantages
from gyre.trajectory.records import LineageInfo, Outcome, RunTrace

SCORED = (Outcome.FINISHED, Outcome.TIMED_OUT)


@dataclass(frozen=True)
class SettledRun:
    """One run that has ended. `reward` is None exactly where the outcome has none."""

    run: RunId
    attempt: int
    reward: float | None
    outcome: Outcome
    trace: RunTrace


@dataclass(frozen=True)
class SettledGroup:
    group: GroupId
    runs: tuple[SettledRun, ...]


@dataclass(frozen=True)
class GroupPlan:
    """What one group brings to its batch."""

    group: GroupId
    micro_steps: tuple[MicroStep, ...]
    scored_runs: int
    """Its part of |R|, whether or not they train anything."""
    reward_sum: float
    """Over its scored runs."""
    counted_tokens: int
    """Counted tokens that will be trained."""
    withheld_tokens: int
    """Counted tokens left out because they are too old."""
    max_lag: int
    """The largest lag among what will be trained; 0 when nothing is."""


def plan(
    group: SettledGroup, version: int, staleness: int, batch: BatchSection, loss: LossSection, step: int
) -> GroupPlan:
    """The plan of `group` in the batch of `step`, trained at snapshot `version`.

    Lineages with a counted token older than `staleness` versions are withheld: their tokens leave the run's count, and
    the run's reward stays in the baseline and the run in |R|.
    """
    scored = [(run, reward) for run in group.runs if (reward := scored_reward(run)) is not None]
    rewards = [reward for _, reward in scored]
    advantages = group_advantages(rewards, loss.advantage, loss.advantage_scale)
    works: list[tuple[int, LineageWork]] = []
    counted_tokens = withheld_tokens = max_lag = 0
    for (run, _), advantage in zip(scored, advantages, strict=True):
        counted = [lineage for lineage in run.trace.lineages if lineage.counted_tokens > 0]
        fresh = [lineage for lineage in counted if version - lineage.lowest_version <= staleness]
        withheld_tokens += _counted(counted) - _counted(fresh)
        if advantage == 0.0:
            continue  # every token loss of it is zero, and so is its gradient
        run_counted_tokens = _counted(fresh)
        counted_tokens += run_counted_tokens
        max_lag = max([max_lag, *(version - lineage.lowest_version for lineage in fresh)])
        for lineage in fresh:
            work = LineageWork(run.run, run.attempt, lineage.index, advantage, run_counted_tokens)
            works.append((lineage.tokens, work))
    packed = pack_lineages([tokens for tokens, _ in works], batch.micro_step_tokens)
    micro_steps = tuple(
        MicroStep(
            micro_step=MicroStepId(f"{step:06d}.{group.group}.{place}"),
            step=step,
            version=version,
            lineages=tuple(works[member][1] for member in members),
            tokens=sum(works[member][0] for member in members),
        )
        for place, members in enumerate(packed)
    )
    return GroupPlan(
        group=group.group,
        micro_steps=micro_steps,
        scored_runs=len(scored),
        reward_sum=sum(rewards),
        counted_tokens=counted_tokens,
        withheld_tokens=withheld_tokens,
        max_lag=max_lag,
    )


def scored_reward(run: SettledRun) -> float | None:
    """The reward that counts; None for a run that is in no baseline, no loss and no count.

    Raises BadInput when outcome and reward contradict each other.
    """
    if (run.outcome in SCORED) != (run.reward is not None):
        allowed = "finished and timed-out runs have a reward, and no others"
        raise BadInput(f"reward of {run.run} ({run.outcome.value})", run.reward, allowed)
    return run.reward


def pack_lineages(tokens: Sequence[int], limit_tokens: int) -> list[list[int]]:
    """Places of `tokens` put together so that no part holds more than `limit_tokens`; a longer lineage stands alone.

    First-fit decreasing, so parts are few and the lineages of one part are of similar length.
    """
    parts: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        for part, left in enumerate(room):
            if tokens[place] <= left:
                parts[part].append(place)
                room[part] -= tokens[place]
                break
        else:
            parts.append([place])
            room.append(limit_tokens - tokens[place])
    return parts


def learning_rate(optimizer: OptimizerSection, step: int) -> float:
    """The learning rate of step `step` (1, 2, …): a linear rise over `warmup_steps`, then level."""
    if step >= optimizer.warmup_steps:
        return optimizer.lr
    return optimizer.lr * step / optimizer.warmup_steps


def _counted(lineages: Iterable[LineageInfo]) -> int:
    return sum(lineage.counted_tokens for lineage in lineages)
