"""The report is counted from the job's records alone."""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import pairwise

from gyre.cli.report import Books, count_switches, read_books, summarise
from gyre.cli.report_html import render, role_spans
from gyre.ids import CellId, GroupId, NodeId, RunId, SwitchId, TaskId
from gyre.store.open import open_store
from gyre.store.records import (
    CellSpecRecord,
    GroupRecord,
    GroupState,
    JobRecord,
    JobState,
    Keys,
    Purpose,
    Role,
    RunRecord,
    RunState,
    SnapshotRecord,
    StageRecord,
    StepRecord,
    SwitchRecord,
)
from gyre.store.typed import TypedStore
from gyre.trajectory.records import LineageInfo, LineageRole, Outcome, RunTrace


def trace(run: str, *, calls: int = 3, counted: int = 10, interrupted: int = 0, silence_s: float = 0.0) -> RunTrace:
    lineage = LineageInfo(0, LineageRole.MAIN, 40, counted, 0)
    return RunTrace(RunId(run), 1, calls, 12, counted, 40, (lineage,), 0, interrupted, 2, silence_s, "")


def run(name: str, outcome: Outcome | None, reward: float | None, found: RunTrace | None) -> RunRecord:
    state = RunState.LIVE if outcome is None else RunState.SETTLED
    return RunRecord(RunId(name), GroupId(name[:2]), state, 1, NodeId("n0"), outcome, reward, "", found, 100.0, 110.0)


def group(name: str, purpose: Purpose) -> GroupRecord:
    return GroupRecord(GroupId(name), TaskId("t"), purpose, 0, (), GroupState.SETTLED, 0, 0)


def switch(start: Role, end: Role, begin_s: float, *, desired: Role | None = None) -> SwitchRecord:
    stages = (StageRecord("drain", 0.1),)
    name = SwitchId(f"c0-{begin_s}")
    return SwitchRecord(
        name, CellId("c0"), 1, start, end, desired or end, begin_s, begin_s + 1, stages, "t", 1, 2, 3, 0.1, ""
    )


BOOKS = Books(
    job=JobRecord("demo", "{}", JobState.FINISHED, "", 1, 1, 0.25, 0.75, 100.0, 42.0),
    snapshot=SnapshotRecord(1, "d", "/v1"),
    steps=(StepRecord(1, 1, (GroupId("t0"),), 2, 0.5, 20, 1, (CellId("c0"),), {"loss": 0.1}, 108.0),),
    groups=(group("t0", Purpose.TRAIN), group("b0", Purpose.HELDOUT_BEFORE)),
    runs=(
        run("b0-00", Outcome.FINISHED, 0.25, trace("b0-00")),
        run("t0-00", Outcome.FINISHED, 1.0, trace("t0-00", silence_s=0.2)),
        run("t0-01", Outcome.TIMED_OUT, 0.0, trace("t0-01", interrupted=1)),
        run("t0-02", Outcome.INFRA_FAILED, None, trace("t0-02")),
        run("t0-03", None, None, None),
    ),
    switches=(
        switch(Role.ROLLOUT, Role.TRAIN, 102.0),
        switch(Role.TRAIN, Role.ROLLOUT, 106.0),
        switch(Role.ROLLOUT, Role.ROLLOUT, 109.0, desired=Role.TRAIN),
    ),
    cells=(CellSpecRecord(CellId("c0"), NodeId("n0"), 4),),
)


def test_figures_are_sums_over_settled_runs() -> None:
    report = summarise(BOOKS, seed=7)
    assert (report.runs_total, report.calls, report.sampled_tokens) == (4, 12, 48)
    assert (report.runs_interrupted, report.max_silence_s, report.prefix_tokens_recomputed) == (1, 0.2, 8)
    assert (report.heldout_reward_before, report.heldout_reward_after) == (0.25, 0.75)


def test_trained_tokens_are_those_of_scored_training_runs() -> None:
    assert summarise(BOOKS, seed=7).counted_tokens == 20


def test_a_switch_that_failed_is_counted_in_neither_direction() -> None:
    assert count_switches(BOOKS.switches, Role.TRAIN) == 1
    assert count_switches(BOOKS.switches, Role.ROLLOUT) == 1


def test_the_json_has_the_fields_that_scripts_read() -> None:
    assert list(summarise(BOOKS, seed=7).to_json()) == [
        "steps",
        "seed",
        "heldout_reward_before",
        "heldout_reward_after",
        "runs_total",
        "runs_interrupted",
        "calls",
        "sampled_tokens",
        "counted_tokens",
        "switches",
        "max_silence_s",
        "prefix_tokens_recomputed",
        "snapshot_version",
        "wall_s",
    ]


def test_an_empty_job_has_a_report_too() -> None:
    empty = Books(None, None, (), (), (), (), ())
    report = summarise(empty, seed=0)
    assert (report.steps, report.runs_total, report.heldout_reward_before) == (0, 0, None)
    assert "Nothing ran" in render("demo", empty, report)


async def test_the_books_are_what_the_store_holds() -> None:
    store, keys = open_store("memory:"), Keys("demo")
    typed = TypedStore(store)
    assert BOOKS.job is not None
    assert BOOKS.snapshot is not None
    await typed.put(keys.job, BOOKS.job)
    await typed.put(keys.snapshot, BOOKS.snapshot)
    for cell in BOOKS.cells:
        await typed.put(keys.cell_spec(cell.cell), cell)
    for step in BOOKS.steps:
        await typed.put(keys.step(step.step), step)
    for each in BOOKS.groups:
        await typed.put(keys.group(each.group), each)
    for each in BOOKS.runs:
        await typed.put(keys.run(each.run), each)
    for each in reversed(BOOKS.switches):
        await typed.put(keys.switch(each.switch), each)
    books = await read_books(store, keys)
    assert (books.job, books.snapshot, books.steps, books.cells) == (
        BOOKS.job,
        BOOKS.snapshot,
        BOOKS.steps,
        BOOKS.cells,
    )
    assert sorted(books.runs, key=lambda r: r.run) == sorted(BOOKS.runs, key=lambda r: r.run)
    assert books.switches == BOOKS.switches  # in the order they happened
    await store.close()


def test_the_timeline_of_a_cell_has_no_gap_and_no_overlap() -> None:
    spans = role_spans(CellId("c0"), BOOKS.switches, 100.0, 112.0)
    assert [role for role, _, _ in spans] == ["rollout", "switch", "train", "switch", "rollout", "switch", "rollout"]
    assert spans[0][1] == 100.0
    assert spans[-1][2] == 112.0
    assert all(before[2] == after[1] for before, after in pairwise(spans))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_whole_and_fetches_nothing() -> None:
    page = _Tags()
    page.feed(render("<demo>", BOOKS, summarise(BOOKS, seed=7)))
    assert page.seen.count("svg") == 2
    assert page.seen.count("table") == 2
    assert "script" not in page.seen
    assert page.sources == []
    assert "<demo>" not in render("<demo>", BOOKS, summarise(BOOKS, seed=7))
