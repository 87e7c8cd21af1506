"""The batch in preparation, as the core actor keeps it, and the record of the step that it becomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gyre.actors.messages_replica import MicroStep, StepDone
from gyre.ids import CellId, MicroStepId, NodeId
from gyre.store.records import RunRecord, StepRecord
from gyre.train.batch import GroupPlan
from gyre.train.ledger import Ledger


@dataclass
class Batch:
    """What has settled of one batch, and what of it is trained."""

    ledger: Ledger
    plans: dict[int, GroupPlan] = field(default_factory=dict[int, GroupPlan])
    """By the group's index."""
    homes: dict[str, NodeId] = field(default_factory=dict[str, NodeId])
    """By run, the node whose gateway has its lineages."""
    attempts: dict[str, int] = field(default_factory=dict[str, int])
    """By run, the attempt of which its group's plan is."""
    merged: set[MicroStepId] = field(default_factory=set[MicroStepId])
    metrics: Counter[str] = field(default_factory=Counter[str])
    """Sums over merged micro-steps, so that each counts once."""

    @property
    def scored_runs(self) -> int:
        return sum(made.scored_runs for made in self.plans.values())

    def untrained(self) -> list[MicroStep]:
        return [work for made in self.plans.values() for work in made.micro_steps if work.micro_step not in self.merged]

    def is_of(self, runs: Iterable[RunRecord]) -> bool:
        """Whether these runs of planned groups are what the plans are of; if not, they were run again meanwhile."""
        return all(run.attempt == self.attempts.get(run.run) for run in runs)

    def homes_of(self, work: MicroStep) -> dict[str, NodeId]:
        return {item.run: self.homes[item.run] for item in work.lineages}

    def restart(self) -> int:
        """What was merged is lost: it is all to do again. Returns how many micro-steps that is."""
        self.merged.clear()
        self.metrics.clear()
        return len(self.ledger.restart())


@dataclass(frozen=True)
class Stepping:
    """The optimizer step under way, and what its batch came to when it was ordered."""

    step: int
    losses: int
    """How often the sums in the core's replica had been lost until then."""
    micro_steps: int
    cells: tuple[CellId, ...]
    metrics: Mapping[str, float]


def step_record(plans: Mapping[int, GroupPlan], stepping: Stepping, done: StepDone, now_unix_s: float) -> StepRecord:
    """The record of a step that was taken on the groups of these plans."""
    made = [plans[index] for index in sorted(plans)]
    scored = sum(group.scored_runs for group in made)
    metrics = step_metrics(stepping.metrics, done.metrics, scored)
    metrics["max_lag"] = float(max(group.max_lag for group in made))
    metrics["withheld_tokens"] = float(sum(group.withheld_tokens for group in made))
    return StepRecord(
        step=stepping.step,
        version=done.version,
        groups=tuple(group.group for group in made),
        scored_runs=scored,
        mean_reward=sum(group.reward_sum for group in made) / scored,
        counted_tokens=sum(group.counted_tokens for group in made),
        micro_steps=stepping.micro_steps,
        cells=stepping.cells,
        metrics=metrics,
        finished_unix_s=now_unix_s,
    )


def step_metrics(sums: Mapping[str, float], step: Mapping[str, float], scored_runs: int) -> dict[str, float]:
    """The batch's metrics from the sums over its micro-steps (names of gyre.loss.objectives) and the step's own."""
    tokens = sums.get("token_count", 0.0) or 1.0
    return {
        "loss": sums.get("weighted_loss_sum", 0.0) / scored_runs,
        "clip_fraction": sums.get("clipped_count", 0.0) / tokens,
        "kl": sums.get("kl_sum", 0.0) / tokens,
        "ratio_deviation": sums.get("ratio_deviation_sum", 0.0) / tokens,
        "logp_gap": sums.get("logp_gap_sum", 0.0) / tokens,
        "trained_tokens": sums.get("token_count", 0.0),
        "sums_error": sums.get("sums_error_sum", 0.0) / (sums.get("transfer_count", 0.0) or 1.0),
        **step,
    }
