"""A job's training over again, by one replica that nothing disturbs, on what the job's journals hold.

The moments of AdamW are weighted sums of every step's gradient and of its square. When they agree at the end, no step's
gradient lacked a lineage or had one twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from gyre.actors.messages_replica import LineageWork, OptimizerStep
from gyre.cli.report import Books
from gyre.config import JobSpec
from gyre.demo.builtin import model_dir
from gyre.errors import BadInput
from gyre.jobdir import JobDir
from gyre.proxy.journal_writer import look_at_journal
from gyre.proxy.journals import find_journal, journals
from gyre.train import checkpoint
from gyre.train.batch import learning_rate
from gyre.train.replica import Replica, ReplicaConfig
from gyre.train.snapshot import make_first_snapshot, snapshot_path
from gyre.trajectory.records import Lineage
from gyre.trajectory.replay import replay

from .a_job import plans_of

RELATIVE = 1e-3
"""Of a tensor's largest element: sums of another order differ by rounding, a lineage of a batch of six by percents."""


def check_training(
    books: Books, spec: JobSpec, root: Path, dirs: Sequence[JobDir], core: JobDir, folder: Path
) -> list[float]:
    """The loss of every step. Its gradient norm, and the optimizer's state after the last, are those of a job without any fault.

    The job file stood in `root`, the journals are in `dirs`, and the last core's checkpoints in `core`. It must have had
    one replica's state all along: moments that began anew at a takeover say nothing of before.
    """
    model = model_dir(spec.model.path, root)
    first, _ = make_first_snapshot(model, folder / "snapshots")
    config = ReplicaConfig(spec.loss, spec.optimizer, spec.checkpoint, spec.sampling.temperature)
    alone = Replica(model, config, folder / "checkpoints", folder / "staging")
    alone.load(first, 0)
    losses: list[float] = []
    for step in books.steps:
        assert step.metrics["moments_behind"] == 0.0
        plans = plans_of(books, step, spec)
        loss = 0.0
        for work in (work for plan in plans for work in plan.micro_steps):
            lineages = [_lineage(dirs, wanted, spec.batch.j_max) for wanted in work.lineages]
            loss += alone.run_micro_step(work, lineages).metrics["weighted_loss_sum"]
            alone.keep(work.micro_step)
            alone.merge(work.micro_step)
        path = snapshot_path(folder / "snapshots", step.version)
        scored = sum(plan.scored_runs for plan in plans)
        done = alone.step(
            OptimizerStep(step.step, step.version, scored, learning_rate(spec.optimizer, step.step), str(path))
        )
        assert abs(done.metrics["grad_norm"] / step.metrics["grad_norm"] - 1) < RELATIVE, step
        losses.append(loss / scored)
    assert alone.end_checkpoints(60.0)
    last = books.steps[-1].version
    told = checkpoint.read_moments(checkpoint.checkpoint_path(core.checkpoints, last))
    undisturbed = checkpoint.read_moments(checkpoint.checkpoint_path(folder / "checkpoints", last))
    assert told.keys() == undisturbed.keys()
    for name, moment in undisturbed.items():
        assert _distance(told[name], moment) < RELATIVE, name
    return losses


def _lineage(dirs: Sequence[JobDir], wanted: LineageWork, j_max: int) -> Lineage:
    """As its journal tells, on whichever node it lies."""
    for folder in dirs:
        with suppress(BadInput):
            records, _, _ = look_at_journal(find_journal(journals(folder.journal), wanted.run, wanted.attempt).folder)
            return replay(records).selected(j_max)[wanted.index]
    raise AssertionError(f"no node has the journal of {wanted}")


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
