"""A job's training over again, by one replica that nothing disturbs, on what the job's journals hold.

The moments of AdamW are weighted sums of every step's gradient and of its square. When they agree at the end, no step's
gradient lacked a lineage or had one twice.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from job.a_job import plans_of
from torch import Tensor

from gyre.actors.messages import LineageWork, OptimizerStep
from gyre.cli.client import read_spec
from gyre.cli.report import Books
from gyre.demo.builtin import model_dir
from gyre.errors import BadInput
from gyre.proxy.journal_writer import look_at_journal
from gyre.proxy.journals import find_journal, journals
from gyre.train import checkpoint
from gyre.train.batch import learning_rate
from gyre.train.replica import Replica, ReplicaConfig
from gyre.train.snapshot import make_first_snapshot, snapshot_path
from gyre.trajectory.records import Lineage
from gyre.trajectory.replay import replay

from .fleet import Fleet

RELATIVE = 1e-3
"""Of a tensor's largest element: sums of another order differ by rounding, a lineage of a batch of six by percents."""


async def check_gradients(fleet: Fleet, books: Books, folder: Path) -> None:
    """Every step's gradient norm, and the optimizer's state after the last, are those of a job without any fault.

    The core must have had one replica's state all along: moments that began anew at a takeover say nothing of before.
    """
    spec = read_spec(fleet.dir)
    first, _ = make_first_snapshot(model_dir(spec.model.path, fleet.root), folder / "snapshots")
    config = ReplicaConfig(spec.loss, spec.optimizer, spec.checkpoint, spec.sampling.temperature)
    alone = Replica(model_dir(spec.model.path, fleet.root), config, folder / "checkpoints", folder / "staging")
    alone.load(first, 0)
    for step in books.steps:
        assert step.metrics["moments_behind"] == 0.0
        plans = plans_of(books, step, spec)
        for work in (work for plan in plans for work in plan.micro_steps):
            alone.run_micro_step(work, [_lineage(fleet, wanted, spec.batch.j_max) for wanted in work.lineages])
            alone.keep(work.micro_step)
            alone.merge(work.micro_step)
        path = snapshot_path(folder / "snapshots", step.version)
        scored = sum(plan.scored_runs for plan in plans)
        done = alone.step(
            OptimizerStep(step.step, step.version, scored, learning_rate(spec.optimizer, step.step), str(path))
        )
        assert abs(done.metrics["grad_norm"] / step.metrics["grad_norm"] - 1) < RELATIVE, step
    assert alone.end_checkpoints(60.0)
    core = fleet.nodes[(await fleet.core()).node]
    last = books.steps[-1].version
    told = checkpoint.read_moments(checkpoint.checkpoint_path(core.dir.checkpoints, last))
    undisturbed = checkpoint.read_moments(checkpoint.checkpoint_path(folder / "checkpoints", last))
    assert told.keys() == undisturbed.keys()
    for name, moment in undisturbed.items():
        assert _distance(told[name], moment) < RELATIVE, name


def _lineage(fleet: Fleet, wanted: LineageWork, j_max: int) -> Lineage:
    """As its journal tells, on whichever node it lies."""
    for folder in fleet.dirs:
        with suppress(BadInput):
            records, _, _ = look_at_journal(find_journal(journals(folder.journal), wanted.run, wanted.attempt).folder)
            return replay(records).selected(j_max)[wanted.index]
    raise AssertionError(f"no node has the journal of {wanted}")


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
