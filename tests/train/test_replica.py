"""The replica on real Megatron: sums that add up however work is split, merged once, stepped on as DESIGN §7 says."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shipping import offer, stage, values

from gyre.actors.messages_replica import LineageWork, MicroStep, OptimizerStep, StageSums, StepDone
from gyre.config import CheckpointSection, LossSection, OptimizerSection
from gyre.errors import BadInput, GyreError, Refused
from gyre.ids import MicroStepId
from gyre.train.checkpoint import checkpoint_path, list_checkpoints
from gyre.train.replica import NotFinite, Replica, ReplicaConfig
from gyre.train.snapshot import SnapshotTorn, make_first_snapshot, snapshot_path, verify
from gyre.train.whole_folder import remove_whole
from gyre.trajectory.records import Lineage

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MakeModel = Callable[..., Path]
MakeLineage = Callable[..., Lineage]

SCORED_RUNS = 7
OPTIMIZER = OptimizerSection(lr=0.02, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-6, clip_grad=1.0)
"""The rate is so high that float32 weights show the update to many digits, and eps so large that AdamW does not divide
the rounding of a gradient entry that is all but zero by that entry."""
LOSS = LossSection(kind="gspo", clip_low=10.0, clip_high=1e6)
"""With a clip that never binds, so that every token has a gradient."""
CONFIG = ReplicaConfig(loss=LOSS, optimizer=OPTIMIZER, micro_batch_tokens=64)

KEEP_THREE = dataclasses.replace(CONFIG, checkpoint=CheckpointSection(keep=3))


class Job:
    """A tiny model, its snapshots, and one batch of lineages as one micro-step each."""

    def __init__(self, model_dir: Path, snapshots_dir: Path, make_lineage: MakeLineage) -> None:
        self.model_dir = model_dir
        self.snapshots_dir = snapshots_dir
        self.checkpoints_dir = snapshots_dir.parent / "checkpoints"
        self.first, _ = make_first_snapshot(model_dir, snapshots_dir)
        sizes = [("a", 0, 31, 9), ("a", 1, 12, 3), ("b", 0, 20, 6), ("c", 0, 90, 30), ("d", 0, 9, 1), ("e", 0, 25, 8)]
        run_tokens = {"a": 12, "b": 6, "c": 30, "d": 1, "e": 8}
        advantages = {"a": 1.0, "b": -0.5, "c": 0.25, "d": -1.0, "e": 0.7}
        self.lineages = [make_lineage(run, index, tokens, counted) for run, index, tokens, counted in sizes]
        self.works = [
            LineageWork(made.run, 1, made.index, advantages[made.run], run_tokens[made.run]) for made in self.lineages
        ]

    def replica(
        self, config: ReplicaConfig = CONFIG, path: Path | None = None, version: int = 0, checkpoints: str = ""
    ) -> Replica:
        made = Replica(self.model_dir, config, self.checkpoints_dir / checkpoints)
        made.load(path or self.first, version)
        return made

    def micro_step(self, *places: int, version: int = 0, name: str = "") -> MicroStep:
        micro_step = MicroStepId(name or "m" + "".join(map(str, places)))
        return MicroStep(micro_step, version + 1, version, tuple(self.works[place] for place in places), 0)

    def run(self, replica: Replica, *places: int, version: int = 0) -> dict[str, float]:
        return replica.run_micro_step(self.micro_step(*places, version=version), self.lineages).metrics

    def order(self, version: int = 1, folder: str = "") -> OptimizerStep:
        path = self.snapshots_dir / folder / f"v{version:08d}" if folder else snapshot_path(self.snapshots_dir, version)
        return OptimizerStep(version, version, SCORED_RUNS, OPTIMIZER.lr, str(path))

    def whole_step(self, replica: Replica, version: int = 1, folder: str = "") -> StepDone:
        """One batch of everything, by one replica alone."""
        self.run(replica, *range(len(self.works)), version=version - 1)
        replica.keep(f"whole-{version}")
        replica.merge(f"whole-{version}")
        return replica.step(self.order(version, folder))

    def weights(self, version: int, folder: str = "") -> dict[str, torch.Tensor]:
        return load_file(Path(self.order(version, folder).path) / "model.safetensors")

    def update(self, version: int, folder: str = "") -> torch.Tensor:
        """What the step changed, flat."""
        before = load_file(self.first / "model.safetensors")
        after = self.weights(version, folder)
        return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])


@pytest.fixture
def job(tmp_path: Path, make_model: MakeModel, make_lineage: MakeLineage) -> Job:
    return Job(make_model(), tmp_path / "snapshots", make_lineage)


def ship(source: Replica, target: Replica, transfer: str) -> None:
    stage(target, source.sums(transfer))
    source.zero_sums()
    target.merge(transfer)


def change_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# ------------------------------------------------------------------------------------------------ the update


def test_a_step_is_adamw_on_the_loss_of_the_design(job: Job) -> None:
    """Against transformers, torch's own AdamW and the loss written out, one lineage at a time."""
    from transformers import AutoModelForCausalLM

    done = job.whole_step(job.replica())

    model = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.float32)
    loss = torch.zeros(())
    for work, lineage in zip(job.works, job.lineages, strict=True):
        ids, counted, behaviour, _ = (torch.tensor(list(values)) for values in lineage.arrays())
        logits = model(input_ids=ids[None].long()).logits[0, :-1]
        logp = torch.log_softmax(logits, -1).gather(1, ids[1:, None].long())[:, 0]
        mask = counted[1:] == 1
        ratio = (logp - behaviour[1:])[mask].mean().exp().detach()
        token_ratios = ratio * (logp - logp.detach()).exp()
        losses = -token_ratios * work.advantage
        loss = loss + losses[mask].sum() / work.run_counted_tokens
    (loss / SCORED_RUNS).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
    assert done.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": OPTIMIZER.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps).step()

    before = load_file(job.first / "model.safetensors")
    after = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])
    assert relative(job.update(1), expected) < 1e-4


@pytest.mark.parametrize("seed", range(4))
def test_splitting_a_batch_over_one_replica_or_two_in_any_order_gives_the_same_update(job: Job, seed: int) -> None:
    whole = job.whole_step(job.replica(), folder="whole")
    expected = job.update(1, "whole")

    dice = random.Random(seed)
    core, satellite = job.replica(), job.replica(dataclasses.replace(CONFIG, micro_batch_tokens=dice.choice([9, 500])))
    places = list(range(len(job.works)))
    dice.shuffle(places)
    transfers = itertools.count()
    for place in places:
        replica = dice.choice([core, satellite])
        job.run(replica, place)
        if dice.random() < 0.4:
            if replica is satellite:
                ship(satellite, core, f"t{next(transfers)}")
            else:
                name = f"t{next(transfers)}"
                core.keep(name)
                core.merge(name)
    for replica in (core, satellite):
        if replica.unshipped and replica is satellite:
            ship(satellite, core, "last")
        elif replica.unshipped:
            core.keep("own")
            core.merge("own")
    done = core.step(job.order())
    assert done.metrics["micro_steps"] == len(places)
    assert done.metrics["grad_norm"] == pytest.approx(whole.metrics["grad_norm"], rel=1e-5)
    assert relative(job.update(1), expected) < 1e-5


def test_the_sums_of_parts_add_up_to_the_sums_of_the_whole(job: Job) -> None:
    replica = job.replica()

    def flat(*groups: Sequence[int]) -> torch.Tensor:
        replica.zero_sums()
        for places in groups:
            job.run(replica, *places)
        return values(replica.sums("t"))

    whole = flat(range(6))
    assert relative(flat([5, 4, 3], [2], [0], [1]), whole) < 1e-5
    assert relative(flat([3], [1, 0, 2, 4, 5]), whole) < 1e-5
    assert relative(flat(range(5)), whole) > 1e-3, "and the test can fail"


def test_metrics_add_up_over_micro_steps(job: Job) -> None:
    replica = job.replica()
    whole = job.run(replica, *range(6))
    parts = [job.run(replica, place) for place in range(6)]
    for name in ("token_count", "lineage_count", "loss_sum", "weighted_loss_sum", "kl_sum"):
        assert sum(part[name] for part in parts) == pytest.approx(whole[name], rel=1e-4), name
    assert whole["token_count"] == 57
    assert all(name.endswith(("_sum", "_count")) for name in whole)


def test_log_probs_are_those_of_the_distribution_sampled_from(job: Job) -> None:
    flat = {}
    for temperature in (0.0, 1.0, 2.0):
        replica = job.replica(dataclasses.replace(CONFIG, temperature=temperature))
        flat[temperature] = job.run(replica, 0)["kl_sum"]
    assert flat[0.0] == flat[1.0] != flat[2.0]


# ------------------------------------------------------------------------------------------------ snapshots


def test_a_step_publishes_a_whole_snapshot_that_the_next_replica_loads(job: Job) -> None:
    replica = job.replica()
    done = job.whole_step(replica)
    path = snapshot_path(job.snapshots_dir, 1)
    assert verify(path, done.digest).version == done.version == replica.version == 1
    names = {file.name for file in path.iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "manifest.json"}
    assert job.weights(1).keys() == load_file(job.first / "model.safetensors").keys()
    assert job.replica(path=path, version=1).version == 1


def test_a_replica_that_reloads_goes_on_as_if_it_had_never_stopped(job: Job) -> None:
    """By itself after an offload, and as another process does: the moments come from the checkpoint."""
    uninterrupted = job.replica(checkpoints="uninterrupted")
    for version in (1, 2, 3):
        job.whole_step(uninterrupted, version, folder="a")
    expected = job.update(3, "a")

    replica = job.replica()
    job.whole_step(replica, 1)
    job.whole_step(replica, 2)
    replica.offload()
    replica.load(snapshot_path(job.snapshots_dir, 2), 2)
    job.whole_step(replica, 3)
    assert torch.equal(job.update(3), expected)

    assert replica.settle_checkpoints(60.0)
    remove_whole(checkpoint_path(job.checkpoints_dir, 3))
    promoted = job.replica(path=snapshot_path(job.snapshots_dir, 2), version=2)
    done = job.whole_step(promoted, 3)
    assert done.metrics["moments_behind"] == 0.0
    assert torch.equal(job.update(3), expected)


def test_a_replica_that_reloads_before_its_checkpoint_is_on_disk_has_it_from_shared_memory(
    job: Job, tmp_path: Path
) -> None:
    whole = job.replica(checkpoints="whole")
    config = dataclasses.replace(CONFIG, checkpoint=CheckpointSection(every_steps=10))
    replica = Replica(job.model_dir, config, job.checkpoints_dir, tmp_path / "staging")
    replica.load(job.first, 0)
    for version in (1, 2, 3):
        job.whole_step(whole, version, folder="whole")
        assert job.whole_step(replica, version).metrics["moments_behind"] == 0.0
        replica.offload()
        change_a_byte(
            snapshot_path(job.snapshots_dir, version) / "model.safetensors"
        )  # nor need its weights be on disk
        replica.load(snapshot_path(job.snapshots_dir, version), version)
    job.whole_step(whole, 4, folder="whole")
    job.whole_step(replica, 4)
    assert torch.equal(job.update(4), job.update(4, "whole"))
    assert list_checkpoints(job.checkpoints_dir) == []


def test_without_the_newest_checkpoint_the_weights_are_the_snapshots_and_the_moments_those_before(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    replica = job.replica()
    for version in (1, 2, 3):
        job.whole_step(replica, version)
    assert replica.settle_checkpoints(60.0)
    expected_weights = job.weights(2)
    change_a_byte(checkpoint_path(job.checkpoints_dir, 2) / "optimizer.safetensors")
    remove_whole(checkpoint_path(job.checkpoints_dir, 3))
    whole = job.replica(path=snapshot_path(job.snapshots_dir, 2), version=2, checkpoints="none")
    held = whole._files._state().weights
    assert all(torch.equal(held[name], weight) for name, weight in expected_weights.items())

    done = job.whole_step(whole, 3, folder="anew")
    assert done.metrics["moments_behind"] == 2.0
    assert "the optimizer's state is begun anew and lacks 2 steps" in caplog.text
    caplog.clear()

    without = job.replica(path=snapshot_path(job.snapshots_dir, 2), version=2)
    job.whole_step(without, 3, folder="torn")
    assert "checkpoint c00000002: optimizer.safetensors does not match its checksum; the one before is tried" in (
        caplog.text
    )
    assert not torch.equal(job.update(3, "torn"), job.update(3)), "moments matter"


def test_a_torn_checkpoint_has_the_one_before_it_in_its_place(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    replica = job.replica(KEEP_THREE)
    for version in (1, 2):
        job.whole_step(replica, version)
    assert replica.settle_checkpoints(60.0)
    change_a_byte(checkpoint_path(job.checkpoints_dir, 2) / "optimizer.safetensors")
    resumed = job.replica(KEEP_THREE, snapshot_path(job.snapshots_dir, 2), 2)
    done = job.whole_step(resumed, 3)
    assert done.metrics["moments_behind"] == 1.0
    assert "checkpoint c00000002: optimizer.safetensors does not match its checksum" in caplog.text
    assert "the optimizer's state is that of checkpoint 1 and lacks 1 steps" in caplog.text
    assert resumed.settle_checkpoints(60.0)
    after = job.replica(KEEP_THREE, snapshot_path(job.snapshots_dir, 3), 3)
    assert job.whole_step(after, 4).metrics["moments_behind"] == 0.0, "the next is whole"


def test_a_checkpoint_of_a_step_that_was_not_published_is_not_used(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """The batch is stepped on twice with different sums, and only the second time is published."""
    lost = job.replica()
    job.whole_step(lost, 1)
    job.whole_step(lost, 2)
    assert lost.settle_checkpoints(60.0)
    again = job.replica(path=snapshot_path(job.snapshots_dir, 1), version=1, checkpoints="elsewhere")
    job.run(again, 0, 1, version=1)
    again.keep("t")
    again.merge("t")
    again.step(job.order(2))
    resumed = job.replica(path=snapshot_path(job.snapshots_dir, 2), version=2)
    assert job.whole_step(resumed, 3).metrics["moments_behind"] == 1.0
    assert "checkpoint c00000002 does not fit: it is of a step that was taken again" in caplog.text


def test_a_torn_snapshots_weights_come_from_its_checkpoint(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    replica = job.replica()
    job.whole_step(replica, 1)
    assert replica.settle_checkpoints(60.0)
    job.whole_step(replica, 2)
    expected = job.weights(2)
    path = snapshot_path(job.snapshots_dir, 1)
    assert replica.settle_checkpoints(60.0)
    kept = checkpoint_path(job.checkpoints_dir, 1) / "model.safetensors"
    assert kept.read_bytes() == (path / "model.safetensors").read_bytes(), "a node may mend the snapshot with it"
    change_a_byte(path / "model.safetensors")
    promoted = job.replica(path=path, version=1)
    assert "snapshot v00000001: model.safetensors does not match its checksum; its weights are taken" in caplog.text
    job.whole_step(promoted, 2, folder="again")
    assert all(torch.equal(job.weights(2, "again")[name], weight) for name, weight in expected.items())
    verify(snapshot_path(job.snapshots_dir / "again", 2))


def test_what_no_disk_takes_is_held_until_one_does(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on through steps and offloads, with one warning and a metric, and equals that with a disk."""
    whole = job.replica(checkpoints="whole")
    for version in (1, 2, 3, 4):
        job.whole_step(whole, version, folder="whole")

    job.checkpoints_dir.mkdir(exist_ok=True)
    blocked = job.checkpoints_dir / "blocked"
    blocked.write_text("no folder can be made here")
    replica = job.replica(checkpoints="blocked")
    for version in (1, 2, 3):
        done = job.whole_step(replica, version)
        assert replica.settle_checkpoints(60.0)
        assert done.metrics["checkpoint_failures"] == version - 1
        assert done.metrics["moments_behind"] == 0.0
        replica.offload()
        replica.load(snapshot_path(job.snapshots_dir, version), version)
    assert caplog.text.count("training goes on") == 1
    blocked.unlink()
    job.whole_step(replica, 4)
    assert torch.equal(job.update(4), job.update(4, "whole"))
    assert replica.settle_checkpoints(60.0)
    assert [version for version, _ in list_checkpoints(blocked)] == [4]


def test_a_batch_that_trained_nothing_publishes_the_same_weights(job: Job) -> None:
    replica = job.replica()
    job.whole_step(replica)
    done = replica.step(job.order(2))
    assert done.metrics["grad_norm"] == 0.0
    before, after = job.weights(1), job.weights(2)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_job_whose_first_batch_trained_nothing_can_be_gone_on_with(job: Job) -> None:
    job.replica().step(job.order())
    reloaded = job.replica(path=snapshot_path(job.snapshots_dir, 1), version=1)
    job.whole_step(reloaded, 2)
    job.whole_step(job.replica(), folder="fresh")
    assert torch.equal(job.update(2), job.update(1, "fresh"))


def test_a_snapshot_that_cannot_be_written_is_no_step_and_the_step_can_be_taken_again(job: Job) -> None:
    replica = job.replica()
    job.run(replica, *range(6))
    replica.keep("t")
    replica.merge("t")
    order = job.order()
    blocked = job.snapshots_dir / "file"
    blocked.write_text("no folder can be made here")
    with pytest.raises(OSError, match="file"):
        replica.step(dataclasses.replace(order, path=str(blocked / "v00000001")))
    with pytest.raises(Refused, match="loaded"):
        replica.step(order)
    replica.load(job.first, 0)
    job.whole_step(replica)
    taken_again = job.update(1)
    job.whole_step(job.replica(), folder="other")
    assert torch.equal(taken_again, job.update(1, "other"))


def test_a_torn_snapshot_is_not_loaded(job: Job) -> None:
    replica = job.replica()
    job.whole_step(replica)
    path = snapshot_path(job.snapshots_dir, 1)
    change_a_byte(path / "model.safetensors")
    with pytest.raises(SnapshotTorn, match=r"model\.safetensors"):
        job.replica(path=path, version=1, checkpoints="none")
    with pytest.raises(Refused, match="version 0"):
        replica.load(job.first, 1)


def test_a_snapshot_of_another_model_is_not_loaded(job: Job, make_model: MakeModel) -> None:
    other, _ = make_first_snapshot(make_model(intermediate_size=40, name="other"), job.snapshots_dir / "other")
    with pytest.raises(BadInput, match="gate_proj"):
        job.replica(path=other)


# ------------------------------------------------------------------------------------------------ exactly once


def test_a_transfer_is_merged_once(job: Job) -> None:
    core, satellite = job.replica(), job.replica()
    job.run(satellite, 0)
    sums = satellite.sums("t")
    stage(core, sums)
    with pytest.raises(Refused, match="received before"):
        stage(core, sums)
    core.merge("t")
    with pytest.raises(Refused, match="merged before"):
        core.merge("t")
    with pytest.raises(Refused, match="received before"):
        stage(core, sums)
    with pytest.raises(Refused, match="not staged"):
        core.merge("u")


def test_a_micro_step_is_merged_once_whichever_transfers_bring_it(job: Job) -> None:
    core, satellite = job.replica(), job.replica()
    job.run(core, 0)
    job.run(satellite, 0)
    stage(core, satellite.sums("t"))
    core.keep("own")
    core.merge("own")
    with pytest.raises(Refused, match="already"):
        core.merge("t")
    with pytest.raises(Refused, match="already"):
        stage(core, dataclasses.replace(satellite.sums("u")))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 1}, "version"),
        ({"layout_hash": "another"}, "layout"),
        ({"numbers": 8}, "numbers"),
        ({"micro_steps": ()}, "no micro-step"),
    ],
)
def test_sums_that_do_not_fit_are_refused(job: Job, change: dict[str, object], reason: str) -> None:
    core, satellite = job.replica(), job.replica()
    job.run(satellite, 0)
    sums = satellite.sums("t")
    changed = dataclasses.replace(offer(sums), **change)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Refused, match=reason):
        core.require_fitting(changed)
    with pytest.raises(Refused, match=reason):
        core.stage(changed, values(sums))


def test_sums_that_are_not_numbers_are_refused(job: Job) -> None:
    core, satellite = job.replica(), job.replica()
    job.run(satellite, 0)
    sums = satellite.sums("t")
    broken = values(sums)
    broken[3] = float("nan")
    with pytest.raises(Refused, match="finite"):
        core.stage(offer(sums), broken)


def test_sums_that_were_rounded_on_the_way_give_nearly_the_same_update(job: Job) -> None:
    """Half the bytes, and an error that is told: that of rounding to eight bits of mantissa."""
    core, exact = job.replica(), job.replica()
    satellite = job.replica(dataclasses.replace(CONFIG, sums_dtype="bfloat16"))
    job.run(satellite, *range(6))
    sums = satellite.sums("t")
    job.run(exact, *range(6))
    whole = exact.sums("t")
    assert sums.bytes * 2 == whole.bytes
    assert whole.error == 0.0
    assert sums.error == pytest.approx(float((values(sums) - values(whole)).norm() / values(whole).norm()), rel=1e-3)
    assert 1e-4 < sums.error < 2**-8
    stage(core, sums)
    core.merge("t")
    rounded = core.step(job.order())
    alone = job.whole_step(job.replica(), folder="whole")
    assert rounded.metrics["grad_norm"] == pytest.approx(alone.metrics["grad_norm"], rel=2**-8)


def test_replicas_of_different_models_have_different_layouts(job: Job, make_model: MakeModel) -> None:
    other = Replica(make_model(intermediate_size=40, name="other"), CONFIG, job.checkpoints_dir)
    assert other.layout_hash != job.replica().layout_hash == job.replica().layout_hash


def test_a_satellite_that_never_ships_changes_nothing(job: Job) -> None:
    core, lost = job.replica(), job.replica()
    job.run(lost, 0, 1)
    stage(core, lost.sums("never merged"))
    job.run(lost, 2)
    job.whole_step(core)
    job.whole_step(job.replica(), folder="alone")
    assert torch.equal(job.update(1), job.update(1, "alone"))


def test_sums_that_were_merged_outlive_an_offload_of_the_core(job: Job) -> None:
    core = job.replica()
    job.run(core, 0, 1, 2)
    core.keep("first")
    core.merge("first")
    job.run(core, 3)
    core.offload()
    core.load(job.first, 0)
    with pytest.raises(Refused, match="no sums"):
        core.keep("what was not kept is gone")
    job.run(core, 3, 4, 5)
    core.keep("second")
    core.merge("second")
    core.step(job.order())
    job.whole_step(job.replica(), folder="whole")
    assert relative(job.update(1), job.update(1, "whole")) < 1e-5


def test_sums_can_be_received_while_the_core_is_offloaded(job: Job) -> None:
    core, satellite = job.replica(), job.replica()
    core.offload()
    job.run(satellite, *range(6))
    ship(satellite, core, "t")
    with pytest.raises(Refused, match="loaded"):
        core.step(job.order())
    core.load(job.first, 0)
    core.step(job.order())
    job.whole_step(job.replica(), folder="whole")
    assert torch.equal(job.update(1), job.update(1, "whole"))


def test_nothing_of_one_version_is_left_in_the_next(job: Job) -> None:
    core, satellite = job.replica(), job.replica()
    job.run(satellite, 0)
    late = satellite.sums("late")
    job.run(core, 1)
    core.keep("kept")
    job.whole_step(job.replica())
    core.load(snapshot_path(job.snapshots_dir, 1), 1)
    with pytest.raises(Refused, match="not staged"):
        core.merge("kept")
    with pytest.raises(Refused, match="version"):
        stage(core, late)
    with pytest.raises(Refused, match="version 0"):
        job.run(core, 0, version=0)


def resident_bytes() -> int:
    """Of this process's own memory, no file's."""
    (found,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(found.split()[1]) * 1024


def test_offloading_gives_the_memory_back(tmp_path: Path, make_model: MakeModel, make_lineage: MakeLineage) -> None:
    job = Job(make_model(hidden_size=256, intermediate_size=4096), tmp_path / "snapshots", make_lineage)
    replica = job.replica()
    model = replica._model
    job.whole_step(replica)
    size = model.params.numel() * model.params.element_size()
    assert size > 20e6
    job.run(replica, 0, version=1)
    before = resident_bytes()
    replica.offload()
    assert before - resident_bytes() > 1.9 * size
    for attempt in (lambda: job.run(replica, 0, version=1), lambda: replica.sums("t"), lambda: replica.keep("t")):
        with pytest.raises(Refused, match="loaded"):
            attempt()


# ------------------------------------------------------------------------------------------------ refusals


def test_a_step_out_of_order_is_refused(job: Job) -> None:
    replica = job.replica()
    job.run(replica, 0)
    with pytest.raises(Refused, match="neither kept nor dropped"):
        replica.step(job.order())
    replica.keep("t")
    replica.merge("t")
    with pytest.raises(Refused, match="follow"):
        replica.step(job.order(2))
    with pytest.raises(Refused, match="scored runs"):
        replica.step(dataclasses.replace(job.order(), scored_runs=0))
    replica.step(job.order())
    with pytest.raises(Refused, match="follow"):
        replica.step(job.order())


def test_dropping_begins_the_batch_again(job: Job) -> None:
    replica = job.replica()
    job.run(replica, 0)
    replica.keep("t")
    replica.merge("t")
    job.run(replica, 1)
    replica.drop()
    job.whole_step(replica)
    job.whole_step(job.replica(), folder="fresh")
    assert torch.equal(job.update(1), job.update(1, "fresh"))


def test_the_same_micro_step_twice_is_refused(job: Job) -> None:
    replica = job.replica()
    job.run(replica, 0)
    with pytest.raises(Refused, match="already"):
        job.run(replica, 0)


def test_work_before_the_first_load_is_refused(job: Job) -> None:
    replica = Replica(job.model_dir, CONFIG, job.checkpoints_dir)
    with pytest.raises(Refused, match="loaded"):
        job.run(replica, 0)
    with pytest.raises(Refused, match="version"):
        replica.require_fitting(StageSums("t", replica.layout_hash, 0, (MicroStepId("m"),), "float32", 1, "tcp:a:1", 1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_ids": array("i", [1] * 30).tobytes()}, "lengths"),
        ({"token_ids": array("i", [1] * 30 + [61]).tobytes()}, "token ids"),
        ({"token_ids": array("i", [1] * 30 + [-1]).tobytes()}, "token ids"),
        ({"counted": array("B", [0] * 31).tobytes()}, "counted tokens"),
        ({"counted": array("B", [0] + [1] * 30).tobytes()}, "counted tokens"),
        ({"counted": array("B", [1] * 5 + [0] * 26).tobytes()}, r"counted\[0\]"),
        ({"logprobs": array("f", [float("nan")] * 31).tobytes()}, "logprobs"),
        ({"logprobs": array("f", [float("-inf")] * 31).tobytes()}, "logprobs"),
        ({"attempt": 2}, "lineages"),
        (
            {
                "token_ids": array("i", [1] * 129).tobytes(),
                "counted": array("B", [0] * 128 + [1]).tobytes(),
                "logprobs": array("f", [-1.0] * 129).tobytes(),
            },
            "tokens",
        ),
    ],
)
def test_a_lineage_that_cannot_be_trained_is_refused_and_changes_nothing(
    job: Job, change: dict[str, object], named: str
) -> None:
    replica = job.replica()
    job.run(replica, 1)
    before = replica.sums("t")
    bad = dataclasses.replace(job.lineages[0], **change)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadInput, match=named):
        replica.run_micro_step(job.micro_step(2, 0), [bad, *job.lineages[1:]])
    assert replica.sums("t") == before


def test_a_loss_that_is_no_number_drops_the_sums_it_was_in(job: Job) -> None:
    replica = job.replica()
    job.run(replica, 1)
    work = job.micro_step(0)
    work = dataclasses.replace(work, lineages=(dataclasses.replace(work.lineages[0], advantage=float("inf")),))
    with pytest.raises(NotFinite):
        replica.run_micro_step(work, job.lineages)
    with pytest.raises(Refused, match="no sums"):
        replica.sums("t")
    assert issubclass(NotFinite, GyreError)


@pytest.mark.parametrize("kind", ["gspo", "grpo", "dapo", "cispo"])
def test_every_loss_trains(job: Job, kind: str) -> None:
    loss = LossSection.model_validate({"kind": kind, "clip_low": 0.9, "clip_high": 1e3, "truncate_is": 2.0})
    done = job.whole_step(job.replica(dataclasses.replace(CONFIG, loss=loss)))
    assert done.metrics["grad_norm"] > 0
    assert float(job.update(1).abs().max()) > 0
