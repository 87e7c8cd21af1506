"""A batch by plan, ledger and real replicas together, with cells that come, die and are late: the update is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shipping import stage

from gyre.actors.messages_replica import MicroStep, OptimizerStep
from gyre.config import BatchSection, LossSection, OptimizerSection
from gyre.ids import CellId, GroupId
from gyre.train.batch import SettledGroup, SettledRun, plan
from gyre.train.ledger import Ledger
from gyre.train.replica import Replica, ReplicaConfig
from gyre.train.snapshot import make_first_snapshot
from gyre.trajectory.records import Lineage, LineageInfo, LineageRole, Outcome, RunTrace

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CORE, SATELLITE = CellId("core"), CellId("satellite")
LOSS = LossSection(clip_low=10.0, clip_high=1e6, advantage="mean")
CONFIG = ReplicaConfig(loss=LOSS, optimizer=OptimizerSection(lr=0.02, eps=1e-6))


class Batch:
    """Two groups of runs with one or two lineages each, and what trains them."""

    def __init__(self, model_dir: Path, folder: Path, make_lineage: Callable[..., Lineage]) -> None:
        self.model_dir = model_dir
        self.folder = folder
        self.first, _ = make_first_snapshot(model_dir, folder / "snapshots")
        self.lineages: list[Lineage] = []
        self.ledger = Ledger(step=1, version=0)
        self.scored_runs = 0
        rewards: dict[str, list[float | None]] = {"g": [1.0, 0.0, 0.5, None], "h": [0.2, 0.9]}
        for group, scores in rewards.items():
            runs = tuple(
                self._settled(f"{group}{place}", score, 1 + place % 2, make_lineage)
                for place, score in enumerate(scores)
            )
            settled = SettledGroup(GroupId(group), runs)
            made = plan(settled, 0, 0, BatchSection(micro_step_tokens=64), LOSS, step=1)
            self.ledger.add(made.micro_steps)
            self.scored_runs += made.scored_runs
        self.ledger.close()

    def _settled(self, run: str, reward: float | None, count: int, make_lineage: Callable[..., Lineage]) -> SettledRun:
        lineages = [make_lineage(run, index, tokens=20 + 7 * index, counted_tokens=6 + index) for index in range(count)]
        self.lineages += lineages
        infos = tuple(LineageInfo(index, LineageRole.MAIN, 20 + 7 * index, 6 + index, 0) for index in range(count))
        counted = sum(info.counted_tokens for info in infos)
        trace = RunTrace(lineages[0].run, 1, count, counted, counted, 0, infos, 0, 0, 0, 0.0, "")
        outcome = Outcome.INFRA_FAILED if reward is None else Outcome.FINISHED
        return SettledRun(lineages[0].run, 1, reward, outcome, trace)

    def replica(self) -> Replica:
        made = Replica(self.model_dir, CONFIG, self.first.parent / "checkpoints")
        made.load(self.first, 0)
        return made

    def train_one(self, cell: CellId, replica: Replica, now_s: float = 0.0) -> MicroStep:
        work = self.ledger.claim(cell, now_s, 60.0)
        assert work is not None
        replica.run_micro_step(work, self.lineages)
        return work

    def keep(self, core: Replica, transfer: str) -> None:
        shipped = core.keep(transfer)
        assert self.ledger.shipped(transfer, CORE, shipped.micro_steps, 0)
        core.merge(transfer)

    def finish(self, core: Replica) -> torch.Tensor:
        """The core trains all that is left and steps: the new weights, flat."""
        while (work := self.ledger.claim(CORE, 1000.0, 60.0)) is not None:
            core.run_micro_step(work, self.lineages)
        if core.unshipped:
            self.keep(core, "the rest")
        assert self.ledger.complete
        path = self.folder / "out" / "v00000001"
        core.step(OptimizerStep(1, 1, self.scored_runs, 0.02, str(path)))
        before, after = load_file(self.first / "model.safetensors"), load_file(path / "model.safetensors")
        return torch.cat([(after[name] - before[name]).flatten() for name in sorted(after)])


@pytest.fixture
def make_batch(
    tmp_path: Path, make_model: Callable[..., Path], make_lineage: Callable[..., Lineage]
) -> Callable[[str], Batch]:
    model_dir = make_model()
    return lambda name: Batch(model_dir, tmp_path / name, make_lineage)


@pytest.fixture
def batch(make_batch: Callable[[str], Batch]) -> Batch:
    return make_batch("elastic")


@pytest.fixture
def expected(make_batch: Callable[[str], Batch]) -> torch.Tensor:
    """The update when one replica does everything and nothing goes wrong."""
    alone = make_batch("alone")
    return alone.finish(alone.replica())


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_satellite_joins_ships_and_leaves(batch: Batch, expected: torch.Tensor) -> None:
    core, satellite = batch.replica(), batch.replica()
    assert batch.ledger.total >= 4
    batch.train_one(CORE, core)
    batch.train_one(SATELLITE, satellite)
    batch.train_one(SATELLITE, satellite)
    sums = satellite.sums("t")
    stage(core, sums)
    assert batch.ledger.shipped("t", SATELLITE, sums.micro_steps, sums.version)
    core.merge("t")
    assert same(batch.finish(core), expected)
    assert batch.ledger.cells == (CORE, SATELLITE)


def test_a_satellite_dies_with_sums_that_it_never_shipped(batch: Batch, expected: torch.Tensor) -> None:
    core, satellite = batch.replica(), batch.replica()
    batch.train_one(SATELLITE, satellite)
    batch.train_one(CORE, core)
    batch.ledger.forfeit(SATELLITE)
    assert same(batch.finish(core), expected)


def test_a_satellite_dies_between_sending_its_sums_and_being_heard(batch: Batch, expected: torch.Tensor) -> None:
    core, satellite = batch.replica(), batch.replica()
    batch.train_one(SATELLITE, satellite)
    stage(core, satellite.sums("t"))
    batch.ledger.forfeit(SATELLITE)
    assert same(batch.finish(core), expected), "what was staged and never accepted is in no sum"


def test_a_satellite_ships_too_late(batch: Batch, expected: torch.Tensor) -> None:
    core, satellite = batch.replica(), batch.replica()
    batch.train_one(SATELLITE, satellite, now_s=0.0)
    batch.train_one(CORE, core, now_s=100.0)
    sums = satellite.sums("late")
    stage(core, sums)
    assert not batch.ledger.shipped("late", SATELLITE, sums.micro_steps, sums.version)
    assert same(batch.finish(core), expected)


def test_the_core_dies_with_merged_sums_and_a_satellite_still_holds_its_own(
    batch: Batch, expected: torch.Tensor
) -> None:
    core, satellite = batch.replica(), batch.replica()
    batch.train_one(SATELLITE, satellite)
    batch.train_one(CORE, core)
    batch.keep(core, "lost")
    batch.train_one(CORE, core)

    batch.ledger.restart()
    batch.ledger.forfeit(CORE)
    reborn = batch.replica()
    sums = satellite.sums("t")
    stage(reborn, sums)
    assert batch.ledger.shipped("t", SATELLITE, sums.micro_steps, sums.version)
    reborn.merge("t")
    assert same(batch.finish(reborn), expected)


def test_the_core_leaves_training_in_the_middle_and_comes_back(batch: Batch, expected: torch.Tensor) -> None:
    core = batch.replica()
    batch.train_one(CORE, core)
    batch.keep(core, "before")
    core.offload()
    core.load(batch.first, 0)
    assert same(batch.finish(core), expected)
