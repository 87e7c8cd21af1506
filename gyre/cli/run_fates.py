"""What became of a run as a whole: which step trained it, or why none has. Pure, from the job's records.

A run's journal says which of its tokens are counted. Whether they are trained is decided by its group: held-out runs are
not, nor is one without a reward, nor one whose reward is its group's mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gyre.cli.report import Books
from gyre.config import JobSpec
from gyre.ids import RunId
from gyre.store.records import GroupRecord, GroupState, Purpose, RunRecord, RunState
from gyre.train.batch import SCORED, GroupPlan, SettledGroup, SettledRun, plan


@dataclass(frozen=True)
class Fate:
    purpose: str
    """`train`, `heldout_before` or `heldout_after`; empty where the job's records do not say."""
    outcome: str = ""
    """Empty while it has not settled."""
    reward: float | None = None
    step: int | None = None
    """That trained some of it."""
    lineages: frozenset[int] = frozenset()
    """Those that it trained."""
    not_trained: str = ""
    """Why none of it is; empty where some is, and where nothing is known."""

    def trained_in(self, lineage: int | None) -> int | None:
        """The step that trained what the lineage counts."""
        return self.step if lineage in self.lineages else None


UNKNOWN = Fate("")


class Fates:
    """Of one job's runs. Without its records nothing is known of any."""

    def __init__(self, books: Books | None, spec: JobSpec | None) -> None:
        self._runs: Mapping[RunId, RunRecord] = {} if books is None else {run.run: run for run in books.runs}
        self._groups = {} if books is None else {group.group: group for group in books.groups}
        self._versions = {} if books is None else {step.step: step.version for step in books.steps}
        self._spec = spec
        self._plans: dict[str, GroupPlan] = {}

    def of(self, run: RunId, attempt: int) -> Fate:
        record = self._runs.get(run)
        group = None if record is None else self._groups.get(record.group)
        if record is None or group is None:
            return UNKNOWN
        if record.attempt != attempt:
            return Fate(group.purpose.value, not_trained=f"attempt {record.attempt} counts")
        if record.state is not RunState.SETTLED or record.outcome is None:
            return Fate(group.purpose.value, not_trained="it has not settled yet")
        step, lineages, why = self._training(record, group)
        return Fate(group.purpose.value, record.outcome.value, record.reward, step, lineages, why)

    def _training(self, run: RunRecord, group: GroupRecord) -> tuple[int | None, frozenset[int], str]:
        nothing: frozenset[int] = frozenset()
        if group.purpose is not Purpose.TRAIN:
            return None, nothing, "it is held out"
        if run.outcome not in SCORED:
            return None, nothing, f"it has no reward: {run.reason or run.outcome}"
        if group.state is not GroupState.CONSUMED:
            return None, nothing, "no step has trained its group yet"
        planned = self._plan(group)
        works = [work for made in planned.micro_steps for work in made.lineages if work.run == run.run]
        if works:
            return group.step, frozenset(work.index for work in works), ""
        if planned.withheld_tokens and planned.micro_steps:
            return None, nothing, "its tokens are older than batch.staleness, or its reward is its group's mean"
        return None, nothing, "its reward is its group's mean, so there is nothing to learn from it"

    def _plan(self, group: GroupRecord) -> GroupPlan:
        """The batch's part that the group was, as the core planned it."""
        if group.group not in self._plans:
            spec = self._spec
            assert spec is not None
            runs: list[SettledRun] = []
            for name in group.runs:
                run = self._runs[name]
                assert run.outcome is not None
                assert run.trace is not None
                runs.append(SettledRun(run.run, run.attempt, run.reward, run.outcome, run.trace))
            settled, version = SettledGroup(group.group, tuple(runs)), self._versions[group.step] - 1
            self._plans[group.group] = plan(settled, version, spec.batch.staleness, spec.batch, spec.loss, group.step)
        return self._plans[group.group]
