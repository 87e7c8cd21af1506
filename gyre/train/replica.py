# pyright: basic
"""A cell's replica: gradient sums of micro-steps, and on the core cell the merge and the optimizer step.

Synchronous and without sockets: the replica process's actor calls it from one thread at a time. It promises that sums
are only ever of one version and one layout, that a transfer and a micro-step enter the batch's sums once, and that
after any failure it holds either what it held before or nothing.

Two sets of sums are kept apart. A replica's *own* sums grow with `run_micro_step` and leave it whole by `sums` (to
another replica) or `keep` (when it is the core's own). The *batch's* sums grow by `merge`, one transfer at a time,
after the ledger accepted it; only those are stepped on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gyre.actors.messages import MicroStep, MicroStepDone, OptimizerStep, StageSums, StepDone, SumsShipped
from gyre.config import CheckpointSection, LossSection, OptimizerSection
from gyre.errors import GyreError, Refused
from gyre.ids import MicroStepId
from gyre.loss.objectives import token_losses
from gyre.loss.weights import batch_weight
from gyre.train import checkpoint, snapshot
from gyre.train.checkpoint_writer import CheckpointWriter
from gyre.train.maps import read_hf_weights, to_hf, to_megatron
from gyre.train.megatron import AdamW, MegatronModel, start_groups
from gyre.train.padding import Rows, padded_rows
from gyre.train.shape import read_shape
from gyre.train.sums import Sums, to_wire
from gyre.train.tensor_file import save_tensors
from gyre.trajectory.records import Lineage

log = logging.getLogger("gyre.train.replica")


class NotFinite(GyreError):
    """A loss or a gradient is not a number any more; the sums that it was in are dropped."""


@dataclass(frozen=True)
class ReplicaConfig:
    loss: LossSection = field(default_factory=LossSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    temperature: float = 1.0
    """That of sampling: log-probs are taken of the distribution sampled from. 0 (greedy) is read as 1."""
    micro_batch_tokens: int = 4096
    """Tokens of one forward, padding included."""
    threads: int = 1
    sums_dtype: str = "float32"
    """In which own sums are sent."""


@dataclass
class _Staged:
    micro_steps: tuple[MicroStepId, ...]
    sums: Tensor


class Replica:
    """The replica of the model in `model_dir`. Parameters come with `load`.

    After each step it checkpoints itself, by way of `staging_dir` in shared memory, in `checkpoints_dir`. A satellite's
    has no `staging_dir`: it does not step.
    """

    def __init__(
        self, model_dir: Path, config: ReplicaConfig, checkpoints_dir: Path, staging_dir: Path | None = None
    ) -> None:
        torch.set_num_threads(config.threads)
        start_groups()
        self._config = config
        self._model_dir = model_dir
        self._checkpoints = CheckpointWriter(checkpoints_dir, staging_dir, config.checkpoint)
        self._model = MegatronModel(read_shape(model_dir))
        self._optimizer = AdamW(self._model, config.optimizer)
        self._moments_version = -1
        self._moments_behind = 0
        """Steps that the moments know nothing of: 0, but when a checkpoint is lost or torn."""
        self._model.free()
        self._folder = Path()
        """Of the snapshot held, which its next has the tokenizer of."""
        self._snapshots_dir = Path()
        self._digest = ""
        self._version = -1
        self._in_memory = False
        self._own: list[MicroStepId] = []
        self._staged: dict[str, _Staged] = {}
        self._merged: set[MicroStepId] = set()
        self._used_transfers: set[str] = set()
        self._batch: Tensor | None = None

    @property
    def version(self) -> int:
        """The version its parameters and sums are of; -1 before the first `load`."""
        return self._version

    @property
    def unshipped(self) -> tuple[MicroStepId, ...]:
        """The micro-steps in the own sums."""
        return tuple(self._own)

    @property
    def layout_hash(self) -> str:
        return self._model.layout_hash

    # ------------------------------------------------------------------------------------------ parameters

    def load(self, path: Path, version: int) -> str:
        """Take the parameters of the snapshot folder `path`; returns the layout hash.

        Own sums are dropped. What was staged or merged is kept when the version is the same: the core may have left
        training in the middle of a batch and come back to it.
        """
        folder = path
        try:
            manifest = snapshot.verify(path)
        except snapshot.SnapshotTorn as torn:
            manifest, weights = self._from_checkpoint(path, version, torn)
            folder = self._model_dir
        else:
            if manifest.version != version:
                raise Refused(f"the snapshot at {path.name} is version {manifest.version}, asked for was {version}")
            weights = read_hf_weights(path)
        if version != self._version:
            self.drop()
        self._version, self._in_memory = -1, False
        self._model.load(to_megatron(weights, self._model.shape))
        self.zero_sums()
        self._folder, self._snapshots_dir, self._digest = folder, path.parent, manifest.digest
        self._version, self._in_memory = version, True
        return self.layout_hash

    def offload(self) -> None:
        """Give the memory of parameters, own sums and moments back. Staged and merged sums stay."""
        self._own.clear()
        self._model.free()
        self._in_memory = False
        self._optimizer.clear()
        self._moments_version = -1

    # ------------------------------------------------------------------------------------------ own sums

    def run_micro_step(self, work: MicroStep, lineages: Sequence[Lineage]) -> MicroStepDone:
        """Add the gradient sum of `work` to the own sums: Σ over its lineages of 1/T_i · Σ over counted tokens of ℓ.

        Bad input changes nothing. When the loss or gradient is not finite the own sums are dropped: NotFinite. Metrics
        are those of gyre.loss.objectives, `weighted_loss_sum` (summed over the batch and divided by |R|, the batch's
        loss) and `padded_tokens_count`.
        """
        self._require_in_memory()
        if work.version != self._version:
            raise Refused(f"{work.micro_step} is for version {work.version}, this replica holds {self._version}")
        if work.micro_step in self._own:
            raise Refused(f"{work.micro_step} is in these sums already")
        shape = self._model.shape
        started_s = time.monotonic()
        metrics: dict[str, float] = {}
        batches = padded_rows(work, lineages, shape.vocab_size, shape.context_tokens, self._config.micro_batch_tokens)
        try:
            for rows in batches:
                for name, value in self._accumulate(rows).items():
                    metrics[name] = metrics.get(name, 0.0) + value
            if not torch.isfinite(self._model.grads.sum()):
                raise NotFinite(f"the gradient of {work.micro_step} is not finite")
        except BaseException:
            self.zero_sums()
            raise
        self._own.append(work.micro_step)
        return MicroStepDone(work.micro_step, time.monotonic() - started_s, metrics)

    def sums(self, transfer: str) -> Sums:
        """The own sums as they are sent to the core's replica, a copy. They stay until `zero_sums`."""
        self._require_own()
        grads, dtype = self._model.grads, self._config.sums_dtype
        data, error = to_wire(grads, dtype)
        micro_steps = tuple(self._own)
        return Sums(transfer, self.layout_hash, self._version, micro_steps, dtype, grads.numel(), data, error)

    def keep(self, transfer: str) -> SumsShipped:
        """Stage the own sums here, as transfer `transfer`, and zero them: the core's own way of shipping."""
        self._require_own()
        self._require_new(transfer, self._own)
        staged = _Staged(tuple(self._own), self._model.grads.cpu().clone())
        self._staged[transfer] = staged
        self.zero_sums()
        return SumsShipped(transfer, staged.micro_steps, staged.sums.numel() * staged.sums.element_size())

    def zero_sums(self) -> None:
        """Forget the own sums."""
        self._own.clear()
        self._model.zero_grads()

    # ------------------------------------------------------------------------------------------ the batch's sums

    def require_fitting(self, sums: StageSums) -> None:
        """Raises Refused for sums that could not be merged, before they travel."""
        if sums.version != self._version:
            raise Refused(f"the sums are of version {sums.version}, this replica holds {self._version}")
        if sums.layout_hash != self.layout_hash:
            raise Refused(f"the sums have layout {sums.layout_hash}, this replica has {self.layout_hash}")
        self._require_new(sums.transfer, sums.micro_steps)
        if sums.numbers != self._model.grads.numel():
            raise Refused(f"{sums.numbers} numbers are offered as sums, {self._model.grads.numel()} are expected")

    def stage(self, sums: StageSums, values: Tensor) -> None:
        """Keep another replica's sums aside until `merge` names them: float32 `values`, flat. Raises Refused."""
        self.require_fitting(sums)
        if not torch.isfinite(values.sum()):
            raise Refused(f"the sums of transfer {sums.transfer} are not finite")
        self._staged[sums.transfer] = _Staged(sums.micro_steps, values)

    def merge(self, transfer: str) -> None:
        """Add staged transfer `transfer` to the batch's sums. Raises Refused when not staged, or merged before."""
        if transfer in self._used_transfers:
            raise Refused(f"transfer {transfer} was merged before")
        staged = self._staged.pop(transfer, None)
        if staged is None:
            raise Refused(f"transfer {transfer} is not staged here")
        self._require_unmerged(staged.micro_steps)
        if self._batch is None:
            self._batch = staged.sums
        else:
            self._batch.add_(staged.sums)
        self._used_transfers.add(transfer)
        self._merged.update(staged.micro_steps)

    def drop(self) -> None:
        """Forget all sums: own, staged and merged."""
        self._staged.clear()
        self._merged.clear()
        self._used_transfers.clear()
        self._batch = None
        if self._in_memory:
            self.zero_sums()

    # ------------------------------------------------------------------------------------------ the step

    def step(self, order: OptimizerStep) -> StepDone:
        """Divide the batch's sums by |R|, clip, step, and write the next snapshot; the replica then holds that version.

        A batch that trained nothing leaves the weights as they are, and its version is written all the same. When the
        snapshot cannot be written the replica holds nothing and has to `load` again. When it returns, the replica's
        death loses nothing of the step.
        """
        self._require_in_memory()
        if order.version != self._version + 1:
            raise Refused(f"version {order.version} does not follow {self._version}")
        if order.scored_runs < 1 and self._merged:
            raise Refused(f"{order.scored_runs} scored runs cannot have {len(self._merged)} micro-steps")
        if self._own:
            raise Refused(f"own sums of {len(self._own)} micro-steps were neither kept nor dropped")
        micro_steps = len(self._merged)
        self._take_moments()
        folder = self._folder
        self._version = self._moments_version = -1
        norm = self._update(order)
        weights = self._hf_weights()

        def fill(target: Path) -> None:
            snapshot.copy_surroundings(folder, target)
            save_tensors(weights, target / snapshot.MODEL)

        path = Path(order.path)
        digest = snapshot.write_snapshot(path, order.version, fill)
        state = checkpoint.Checkpoint(order.version, digest, self.layout_hash, weights, self._optimizer.moments())
        checkpointed = self._checkpoints.metrics()
        self._checkpoints.offer(state)
        self._folder, self._snapshots_dir, self._digest = path, path.parent, digest
        self._version = self._moments_version = order.version
        self.drop()
        metrics = {
            "grad_norm": norm,
            "lr": order.lr,
            "micro_steps": float(micro_steps),
            "moments_behind": float(self._moments_behind),
        }
        return StepDone(order.version, digest, metrics | checkpointed)

    def settle_checkpoints(self, within_s: float) -> bool:
        """Wait until no checkpoint is being written to disk or is due; False when that takes longer."""
        return self._checkpoints.settle(within_s)

    def end_checkpoints(self, within_s: float) -> bool:
        """Bring the state to disk, for the process is to end; False when that takes longer. From any thread."""
        return self._checkpoints.end(within_s)

    # ------------------------------------------------------------------------------------------ private

    def _accumulate(self, rows: Rows) -> dict[str, float]:
        device, loss = self._model.device, self._config.loss
        counted, weights = rows.counted.to(device), rows.weights.to(device)
        logp = self._model.log_probs(rows.token_ids.to(device), self._config.temperature or 1.0)
        behaviour, advantages = rows.behaviour.to(device), rows.advantages.to(device)
        losses, metrics = token_losses(loss.kind, logp, behaviour, counted, advantages, loss)
        weighted = losses.sum(1) @ weights
        if not torch.isfinite(weighted):
            raise NotFinite("the loss is not finite")
        weighted.backward()
        return metrics | {
            "weighted_loss_sum": float(weighted.detach()),
            "padded_tokens_count": float(rows.token_ids.numel()),
        }

    def _update(self, order: OptimizerStep) -> float:
        if self._batch is None:
            return 0.0
        grads = self._model.grads
        grads.copy_(self._batch).mul_(batch_weight(order.scored_runs))
        if not torch.isfinite(grads.sum()):
            self.drop()
            raise NotFinite("the gradient of the batch is not finite")
        return self._optimizer.step(order.lr)

    def _take_moments(self) -> None:
        """Have the optimizer's moments of the version held: from memory, or from the newest checkpoint that fits.

        Only the core steps, so only the core ever has them; any replica can.
        """
        if self._moments_version == self._version:
            self._moments_behind = 0
            return
        held = self._checkpoints.held(self._version, self._digest)
        if held is not None:
            self._optimizer.take(held.moments)
            self._moments_version, self._moments_behind = self._version, 0
            return
        with self._checkpoints.places() as places:
            found = checkpoint.newest_fitting(places, self._version, self.layout_hash, self._published_digest)
            if found is None:
                self._optimizer.clear()
                had = 0
            else:
                index, path = found
                self._optimizer.take(checkpoint.read_moments(path))
                had = index.version
        self._moments_version, self._moments_behind = self._version, self._version - had
        if self._moments_behind:
            log.warning(
                "there is no checkpoint of version %d: weights are the snapshot's, the optimizer's state is %s and "
                "lacks %d steps",
                self._version,
                f"that of checkpoint {had}" if found else "begun anew",
                self._moments_behind,
            )

    def _published_digest(self, version: int) -> str:
        if version == self._version:
            return self._digest
        try:
            return snapshot.read_manifest(snapshot.snapshot_path(self._snapshots_dir, version)).digest
        except snapshot.SnapshotTorn:
            return ""

    def _from_checkpoint(
        self, path: Path, version: int, torn: snapshot.SnapshotTorn
    ) -> tuple[snapshot.Manifest, dict[str, Tensor]]:
        """The weights of a torn snapshot, from the checkpoint that belongs to it. Raises `torn` when there is none."""
        try:
            manifest = snapshot.read_manifest(path)
        except snapshot.SnapshotTorn:
            raise torn from None
        if manifest.version != version:
            raise torn
        with self._checkpoints.places() as places:
            for whole in (checkpoint.checkpoint_path(place, version) for place in places):
                try:
                    index = checkpoint.verify(whole)
                except checkpoint.CheckpointTorn:
                    continue
                if checkpoint.why_unfit(index, version, self.layout_hash, manifest.digest):
                    continue
                log.warning("snapshot %s; its weights are taken from checkpoint %s", torn, whole.name)
                return manifest, checkpoint.read_weights(whole)
        raise torn

    def _hf_weights(self) -> dict[str, Tensor]:
        named = {name: parameter.detach().cpu() for name, parameter in self._model.named.items()}
        return {name: weight.contiguous().clone() for name, weight in to_hf(named, self._model.shape).items()}

    def _require_in_memory(self) -> None:
        if not self._in_memory or self._version < 0:
            raise Refused("no parameters are loaded")

    def _require_own(self) -> None:
        self._require_in_memory()
        if not self._own:
            raise Refused("there are no sums to ship")

    def _require_new(self, transfer: str, micro_steps: Sequence[MicroStepId]) -> None:
        if transfer in self._staged or transfer in self._used_transfers:
            raise Refused(f"transfer {transfer} was received before")
        if not micro_steps:
            raise Refused(f"transfer {transfer} names no micro-step")
        self._require_unmerged(micro_steps)

    def _require_unmerged(self, micro_steps: Sequence[MicroStepId]) -> None:
        twice = self._merged.intersection(micro_steps)
        if twice:
            raise Refused(f"{min(twice)} is in the batch's sums already")
