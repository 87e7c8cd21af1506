"""From settled groups to micro-steps (DESIGN §7, §8; cases C1, C2, C5)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.config import BatchSection, LossSection, OptimizerSection
from gyre.errors import BadInput
from gyre.ids import GroupId, RunId
from gyre.train.batch import GroupPlan, SettledGroup, SettledRun, learning_rate, pack_lineages, plan
from gyre.trajectory.records import LineageInfo, LineageRole, Outcome, RunTrace

VERSION = 5


def lineage(index: int, tokens: int = 100, counted_tokens: int = 10, lowest_version: int = VERSION) -> LineageInfo:
    return LineageInfo(index, LineageRole.MAIN, tokens, counted_tokens, lowest_version)


def settled(
    name: str,
    reward: float | None,
    *lineages: LineageInfo,
    outcome: Outcome = Outcome.FINISHED,
) -> SettledRun:
    trace = RunTrace(
        run=RunId(name),
        attempt=1,
        calls=1,
        sampled_tokens=sum(info.counted_tokens for info in lineages),
        counted_tokens=sum(info.counted_tokens for info in lineages),
        tree_tokens=sum(info.tokens for info in lineages),
        lineages=lineages,
        continued_calls=0,
        interrupted_calls=0,
        prefix_tokens_recomputed=0,
        max_silence_s=0.0,
        failure="",
    )
    return SettledRun(RunId(name), 1, reward, outcome, trace)


def planned(*runs: SettledRun, staleness: int = 1, micro_step_tokens: int = 4096, form: str = "mean") -> GroupPlan:
    group = SettledGroup(GroupId("g"), runs)
    batch = BatchSection(micro_step_tokens=micro_step_tokens)
    return plan(group, VERSION, staleness, batch, LossSection.model_validate({"advantage": form}), step=6)


def works(made: GroupPlan) -> dict[tuple[str, int], tuple[float, int]]:
    """(run, index) -> (advantage, T_i) of everything that trains."""
    return {
        (work.run, work.index): (work.advantage, work.run_counted_tokens)
        for micro_step in made.micro_steps
        for work in micro_step.lineages
    }


def test_a_run_counts_once_however_many_lineages_it_left() -> None:
    runs = settled("a", 1.0, lineage(0), lineage(1), lineage(2)), settled("b", 0.0, lineage(0))
    assert works(planned(*runs)) == {
        ("a", 0): (0.5, 30),
        ("a", 1): (0.5, 30),
        ("a", 2): (0.5, 30),
        ("b", 0): (-0.5, 10),
    }
    assert {advantage for advantage, _ in works(planned(*runs, form="std")).values()} == {1.0, -1.0}


def test_runs_without_a_reward_are_absent_everywhere() -> None:
    made = planned(
        settled("a", 1.0, lineage(0)),
        settled("b", 0.4, lineage(0), outcome=Outcome.TIMED_OUT),
        settled("c", None, lineage(0), outcome=Outcome.EVALUATOR_FAILED),
        settled("d", None, lineage(0), outcome=Outcome.INFRA_FAILED),
    )
    assert {key: round(value[0], 9) for key, value in works(made).items()} == {("a", 0): 0.3, ("b", 0): -0.3}
    assert made.scored_runs == 2
    assert made.reward_sum == pytest.approx(1.4)


@pytest.mark.parametrize(
    "runs",
    [
        (settled("a", 1.0, lineage(0)), settled("b", None, lineage(0), outcome=Outcome.EVALUATOR_FAILED)),
        (settled("a", 0.7, lineage(0)), settled("b", 0.7, lineage(0))),
        (settled("a", 0.1 + 0.2, lineage(0)), settled("b", 0.3, lineage(0))),
    ],
    ids=["one scored run", "equal rewards", "rewards equal but for rounding"],
)
def test_a_group_without_a_contrast_trains_nothing_and_its_scored_runs_still_count(
    runs: tuple[SettledRun, ...],
) -> None:
    made = planned(*runs, form="std")
    assert made.micro_steps == ()
    assert made.counted_tokens == 0
    assert made.scored_runs == sum(run.reward is not None for run in runs)


def test_a_lineage_beyond_the_staleness_bound_is_withheld_and_its_reward_still_counts() -> None:
    made = planned(
        settled("a", 1.0, lineage(0, counted_tokens=4, lowest_version=3), lineage(1, counted_tokens=6)),
        settled("b", 0.0, lineage(0, lowest_version=4)),
        staleness=1,
    )
    assert works(made) == {("a", 1): (0.5, 6), ("b", 0): (-0.5, 10)}, "withheld tokens leave the run's count"
    assert (made.withheld_tokens, made.counted_tokens, made.max_lag) == (4, 16, 1)
    assert made.scored_runs == 2


def test_a_run_withheld_whole_still_sets_the_baseline() -> None:
    made = planned(settled("a", 1.0, lineage(0, lowest_version=0)), settled("b", 0.0, lineage(0)), staleness=0)
    assert works(made) == {("b", 0): (-0.5, 10)}
    assert made.scored_runs == 2


def test_a_scored_run_that_called_the_model_never_sets_the_baseline_too() -> None:
    made = planned(settled("a", 0.0), settled("b", 1.0, lineage(0)))
    assert works(made) == {("b", 0): (0.5, 10)}
    assert made.scored_runs == 2


def test_lineages_with_nothing_counted_are_no_work() -> None:
    made = planned(settled("a", 1.0, lineage(0), lineage(1, counted_tokens=0, lowest_version=-1)), settled("b", 0.0))
    assert works(made) == {("a", 0): (0.5, 10)}


def test_micro_steps_are_of_the_batch_and_named_apart() -> None:
    runs = [settled(f"r{place}", float(place % 2), lineage(0, tokens=60)) for place in range(6)]
    made = planned(*runs, micro_step_tokens=128)
    assert [(work.step, work.version, work.tokens) for work in made.micro_steps] == [(6, VERSION, 120)] * 3
    assert len({work.micro_step for work in made.micro_steps}) == 3
    assert len(works(made)) == 6


@pytest.mark.parametrize(("outcome", "reward"), [(Outcome.FINISHED, None), (Outcome.INFRA_FAILED, 0.0)])
def test_an_outcome_that_contradicts_its_reward_is_refused(outcome: Outcome, reward: float | None) -> None:
    with pytest.raises(BadInput, match="r1"):
        planned(settled("r1", reward, lineage(0), outcome=outcome))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=40), st.integers(64, 256))
def test_packing_keeps_every_lineage_whole_once_and_within_the_limit(tokens: list[int], limit: int) -> None:
    parts = pack_lineages(tokens, limit)
    assert sorted(place for part in parts for place in part) == list(range(len(tokens)))
    assert all(sum(tokens[place] for place in part) <= limit or len(part) == 1 for part in parts)
    half_full = [part for part in parts if sum(tokens[place] for place in part) * 2 <= limit]
    assert len(half_full) <= 1, "two such parts would have been one"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0])),
            st.lists(st.tuples(st.integers(1, 50), st.integers(3, 5)), max_size=3),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 2),
)
def test_what_trains_adds_up_to_the_runs_counts_and_advantages_to_nothing(
    drawn: list[tuple[float | None, list[tuple[int, int]]]], staleness: int
) -> None:
    runs = [
        settled(
            f"r{place}",
            reward,
            *(lineage(index, 60, counted, version) for index, (counted, version) in enumerate(infos)),
            outcome=Outcome.INFRA_FAILED if reward is None else Outcome.FINISHED,
        )
        for place, (reward, infos) in enumerate(drawn)
    ]
    made = planned(*runs, staleness=staleness)
    by_run: dict[str, list[int]] = {}
    sizes = {(run.run, info.index): info for run in runs for info in run.trace.lineages}
    for (run, index), (_, run_counted_tokens) in works(made).items():
        assert VERSION - sizes[RunId(run), index].lowest_version <= staleness
        by_run.setdefault(run, [run_counted_tokens]).append(sizes[RunId(run), index].counted_tokens)
    for total, *parts in by_run.values():
        assert sum(parts) == total
    assert made.counted_tokens == sum(total for total, *_ in by_run.values())
    everything = planned(*(dataclasses.replace(run, trace=runs_trace(run)) for run in runs), staleness=staleness)
    assert sum(advantage for advantage, _ in works(everything).values()) == pytest.approx(0.0)


def runs_trace(run: SettledRun) -> RunTrace:
    """The run's trace with one fresh lineage, so that its advantage can be seen whatever it left."""
    return dataclasses.replace(run.trace, lineages=(lineage(0),))


def test_the_learning_rate_rises_over_the_warm_up_and_then_stays() -> None:
    section = OptimizerSection(lr=1e-3, warmup_steps=4)
    assert [learning_rate(section, step) for step in (1, 2, 4, 9)] == pytest.approx([2.5e-4, 5e-4, 1e-3, 1e-3])
    assert learning_rate(OptimizerSection(lr=1e-3), 1) == 1e-3
