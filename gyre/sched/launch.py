"""Which groups to launch next: pure, from the job's records alone, so that a new leader launches the same ones.

Training groups have an index in one endless stream; step `k` (1, 2, …) consumes the groups with index
`(k - 1) * B … k * B - 1`. A batch in launch order keeps every run's lag within the staleness bound
(`launched - consumed <= (η + 1) * B`). Held-out tasks run once before the first step and once after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyre.ids import GroupId, RunId
from gyre.sched.staleness import capacity
from gyre.store.records import GroupRecord, GroupState, Purpose


@dataclass(frozen=True)
class LaunchPlan:
    """What a job asks for, in numbers."""

    steps: int
    batch_groups: int
    group_size: int
    staleness: int
    heldout: int


@dataclass(frozen=True)
class Launch:
    """One group to launch: its purpose, its task's index in that purpose's stream, and its runs."""

    purpose: Purpose
    index: int
    runs: int

    @property
    def group(self) -> GroupId:
        return group_id(self.purpose, self.index)


_PREFIX = {Purpose.TRAIN: "t", Purpose.HELDOUT_BEFORE: "b", Purpose.HELDOUT_AFTER: "a"}


def group_id(purpose: Purpose, index: int) -> GroupId:
    return GroupId(f"{_PREFIX[purpose]}{index:06d}")


def run_id(group: GroupId, member: int) -> RunId:
    return RunId(f"{group}-{member:02d}")


def next_launches(
    plan: LaunchPlan, version: int, launched: int, consumed: int, groups: Sequence[GroupRecord]
) -> list[Launch]:
    """The groups that may be launched now.

    `version` is the snapshot's (steps taken), `launched` and `consumed` count training groups since the job began,
    `groups` are the job's group records (held-out ones at least).
    """
    before = [group for group in groups if group.purpose is Purpose.HELDOUT_BEFORE]
    if version == 0 and launched == 0 and len(before) < plan.heldout:
        known = {group.index for group in before}
        return [Launch(Purpose.HELDOUT_BEFORE, index, 1) for index in range(plan.heldout) if index not in known]
    if any(group.state is GroupState.OPEN for group in before):
        return []
    if version >= plan.steps:
        known = {group.index for group in groups if group.purpose is Purpose.HELDOUT_AFTER}
        return [Launch(Purpose.HELDOUT_AFTER, index, 1) for index in range(plan.heldout) if index not in known]
    wanted = plan.steps * plan.batch_groups - launched
    allowed = capacity(launched, consumed, plan.batch_groups, plan.staleness)
    return [Launch(Purpose.TRAIN, launched + offset, plan.group_size) for offset in range(max(0, min(wanted, allowed)))]


def is_finished(plan: LaunchPlan, version: int, groups: Sequence[GroupRecord]) -> bool:
    """Whether every step was taken and every held-out group after the last has settled."""
    after = [group for group in groups if group.purpose is Purpose.HELDOUT_AFTER]
    return (
        version >= plan.steps
        and len(after) >= plan.heldout
        and all(group.state is not GroupState.OPEN for group in after)
    )


def batch_of(step: int, batch_groups: int) -> range:
    """The indices of the training groups that step `step` (from 1) consumes."""
    return range((step - 1) * batch_groups, step * batch_groups)


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
