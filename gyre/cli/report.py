"""A job's report, from the job's own records and nothing else: the JSON for scripts, the summary for the terminal.

Pure: `summarise` takes the records that `read_books` read from the state store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gyre.store.protocol import Store
from gyre.store.records import (
    CellSpecRecord,
    GroupRecord,
    JobRecord,
    Keys,
    Purpose,
    Role,
    RunRecord,
    RunState,
    SnapshotRecord,
    StepRecord,
    SwitchRecord,
)
from gyre.store.typed import TypedStore
from gyre.trajectory.records import Outcome, RunTrace

T = TypeVar("T")


@dataclass(frozen=True)
class Books:
    """Every record of one job, as the state store has them."""

    job: JobRecord | None
    snapshot: SnapshotRecord | None
    steps: tuple[StepRecord, ...]
    groups: tuple[GroupRecord, ...]
    runs: tuple[RunRecord, ...]
    switches: tuple[SwitchRecord, ...]
    cells: tuple[CellSpecRecord, ...]


@dataclass(frozen=True)
class Report:
    """What `--report` writes. Counts are over the job's whole life, earlier `gyrectl up` included."""

    steps: int
    seed: int
    heldout_reward_before: float | None
    heldout_reward_after: float | None
    runs_total: int
    runs_interrupted: int
    """Settled runs whose harness saw an error that was ours."""
    calls: int
    sampled_tokens: int
    counted_tokens: int
    switches: dict[str, int]
    max_silence_s: float
    prefix_tokens_recomputed: int
    snapshot_version: int
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "seed": self.seed,
            "heldout_reward_before": self.heldout_reward_before,
            "heldout_reward_after": self.heldout_reward_after,
            "runs_total": self.runs_total,
            "runs_interrupted": self.runs_interrupted,
            "calls": self.calls,
            "sampled_tokens": self.sampled_tokens,
            "counted_tokens": self.counted_tokens,
            "switches": dict(self.switches),
            "max_silence_s": round(self.max_silence_s, 4),
            "prefix_tokens_recomputed": self.prefix_tokens_recomputed,
            "snapshot_version": self.snapshot_version,
            "wall_s": round(self.wall_s, 2),
        }


async def read_books(store: Store, keys: Keys) -> Books:
    """Read every record of the job from the state store."""
    typed = TypedStore(store, away_s=0.0)
    job = await typed.get(keys.job, JobRecord)
    snapshot = await typed.get(keys.snapshot, SnapshotRecord)
    root = keys.root

    async def records(under: str, cls: type[T]) -> tuple[T, ...]:
        return tuple(item.record for item in (await typed.range(f"{root}{under}/", cls)).items)

    return Books(
        job=job.record if job else None,
        snapshot=snapshot.record if snapshot else None,
        steps=await records("steps", StepRecord),
        groups=await records("groups", GroupRecord),
        runs=await records("runs", RunRecord),
        switches=tuple(sorted(await records("switches", SwitchRecord), key=lambda switch: switch.started_unix_s)),
        cells=await records("cells", CellSpecRecord),
    )


def summarise(books: Books, seed: int) -> Report:
    """The report of the job whose records are `books`."""
    settled = [run for run in books.runs if run.state is RunState.SETTLED]
    traces = [run.trace for run in settled if run.trace is not None]
    purpose = {group.group: group.purpose for group in books.groups}
    trained = [
        run.trace
        for run in settled
        if run.trace is not None
        and purpose.get(run.group) is Purpose.TRAIN
        and run.outcome in (Outcome.FINISHED, Outcome.TIMED_OUT)
    ]
    job = books.job
    return Report(
        steps=len(books.steps),
        seed=seed,
        heldout_reward_before=job.heldout_before if job else None,
        heldout_reward_after=job.heldout_after if job else None,
        runs_total=len(settled),
        runs_interrupted=sum(trace.interrupted_calls > 0 for trace in traces),
        calls=_sum(traces, "calls"),
        sampled_tokens=_sum(traces, "sampled_tokens"),
        counted_tokens=_sum(trained, "counted_tokens"),
        switches={
            "rollout_to_train": count_switches(books.switches, Role.TRAIN),
            "train_to_rollout": count_switches(books.switches, Role.ROLLOUT),
        },
        max_silence_s=max((trace.max_silence_s for trace in traces), default=0.0),
        prefix_tokens_recomputed=_sum(traces, "prefix_tokens_recomputed"),
        snapshot_version=books.snapshot.version if books.snapshot else 0,
        wall_s=job.active_s if job else 0.0,
    )


def count_switches(switches: Sequence[SwitchRecord], end: Role) -> int:
    """Completed switches that ended in `end` and began in the other role."""
    other = Role.ROLLOUT if end is Role.TRAIN else Role.TRAIN
    return sum(switch.end is end and switch.start is other for switch in switches)


def _sum(traces: Sequence[RunTrace], field: str) -> int:
    return sum(int(getattr(trace, field)) for trace in traces)
