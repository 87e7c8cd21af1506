"""Which groups are launched: in launch order, within the staleness bound, the same after any restart."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gyre.ids import TaskId
from gyre.sched.launch import LaunchPlan, batch_of, group_id, is_finished, next_launches, run_id
from gyre.store.records import GroupRecord, GroupState, Purpose

PLAN = LaunchPlan(steps=3, batch_groups=2, group_size=4, staleness=0, heldout=2)


def group(purpose: Purpose, index: int, state: GroupState) -> GroupRecord:
    name = group_id(purpose, index)
    return GroupRecord(name, TaskId("t"), purpose, index, (run_id(name, 0),), state, 0, 0)


def heldout(purpose: Purpose, *states: GroupState) -> list[GroupRecord]:
    return [group(purpose, index, state) for index, state in enumerate(states)]


DONE = heldout(Purpose.HELDOUT_BEFORE, GroupState.SETTLED, GroupState.SETTLED)


def test_held_out_tasks_come_first_one_run_each() -> None:
    launches = next_launches(PLAN, 0, 0, 0, [])
    assert [(launch.purpose, launch.index, launch.runs) for launch in launches] == [
        (Purpose.HELDOUT_BEFORE, 0, 1),
        (Purpose.HELDOUT_BEFORE, 1, 1),
    ]


def test_training_waits_until_they_have_settled() -> None:
    assert next_launches(PLAN, 0, 0, 0, heldout(Purpose.HELDOUT_BEFORE, GroupState.SETTLED, GroupState.OPEN)) == []


def test_a_batch_is_launched_with_no_staleness_and_two_with_a_bound_of_one() -> None:
    assert [launch.index for launch in next_launches(PLAN, 0, 0, 0, DONE)] == [0, 1]
    assert [launch.index for launch in next_launches(replace(PLAN, staleness=1), 0, 0, 0, DONE)] == [0, 1, 2, 3]


def test_no_more_is_launched_than_the_last_step_consumes() -> None:
    assert [launch.index for launch in next_launches(replace(PLAN, staleness=9), 2, 5, 4, DONE)] == [5]


def test_after_the_last_step_the_held_out_tasks_run_again_once() -> None:
    launches = next_launches(PLAN, 3, 6, 6, DONE)
    assert [(launch.purpose, launch.index) for launch in launches] == [
        (Purpose.HELDOUT_AFTER, 0),
        (Purpose.HELDOUT_AFTER, 1),
    ]
    after = heldout(Purpose.HELDOUT_AFTER, GroupState.SETTLED, GroupState.OPEN)
    assert next_launches(PLAN, 3, 6, 6, DONE + after) == []
    assert not is_finished(PLAN, 3, DONE + after)
    assert is_finished(PLAN, 3, DONE + heldout(Purpose.HELDOUT_AFTER, GroupState.SETTLED, GroupState.SETTLED))


def test_without_held_out_tasks_training_begins_at_once_and_the_last_step_ends_the_job() -> None:
    plan = replace(PLAN, heldout=0)
    assert len(next_launches(plan, 0, 0, 0, [])) == 2
    assert is_finished(plan, 3, [])


def test_steps_consume_consecutive_groups() -> None:
    assert [list(batch_of(step, 2)) for step in (1, 2, 3)] == [[0, 1], [2, 3], [4, 5]]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 3), st.data())
def test_over_a_whole_job_each_group_is_launched_once_and_none_is_older_than_the_bound(
    steps: int, batch_groups: int, staleness: int, data: st.DataObject
) -> None:
    plan = LaunchPlan(steps, batch_groups, 2, staleness, 0)
    launched_at: list[int] = []
    for version in range(steps):
        for launch in next_launches(plan, version, len(launched_at), version * batch_groups, []):
            assert launch.index == len(launched_at)
            if data.draw(st.booleans()):  # a leader that stops in the middle goes on from the records
                break
            launched_at.append(version)
        while len(launched_at) < (version + 1) * batch_groups:
            more = next_launches(plan, version, len(launched_at), version * batch_groups, [])
            launched_at += [version] * len(more)
        for index in batch_of(version + 1, batch_groups):
            assert version - launched_at[index] <= staleness
    assert len(launched_at) == steps * batch_groups
