# pyright: basic
"""A cell's replica: gradient sums of micro-steps, and on the core cell the merge and the optimizer step.

Synchronous and without sockets: the replica process's actor calls it from one thread at a time. It promises that sums
are only ever of one version and one layout, that a transfer and a micro-step enter the batch's sums once, and that
after any failure it holds either what it held before or nothing.

A replica of several ranks (gyre.train.ranked) is one of these a rank: each has its part of the model and of every sum, and
what a call raises it raises on all of them. What leaves the replica, the first rank puts together and gives.

Two sets of sums are kept apart. A replica's *own* sums grow with `run_micro_step` and leave it whole by `sums` (to
another replica) or `keep` (when it is the core's own). The *batch's* sums grow by `merge`, one transfer at a time,
after the ledger accepted it; only those are stepped on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gyre.actors.messages_replica import MicroStep, MicroStepDone, OptimizerStep, StageSums, StepDone, SumsShipped
from gyre.config import CheckpointSection, LossSection, OptimizerSection
from gyre.errors import GyreError, NotLoaded, Refused
from gyre.ids import MicroStepId
from gyre.loss.objectives import token_losses
from gyre.loss.weights import batch_weight
from gyre.train import snapshot
from gyre.train.checkpoint_writer import CheckpointWriter
from gyre.train.megatron import AdamW, MegatronModel, start_groups
from gyre.train.padding import Rows, padded_rows
from gyre.train.ranks import RankPlace
from gyre.train.replica_files import ReplicaFiles
from gyre.train.shape import read_shape, require_shares
from gyre.train.sums import Sums, to_wire
from gyre.trajectory.records import Lineage


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
    """Of each rank."""
    sums_dtype: str = "float32"
    """In which own sums are sent."""


@dataclass
class _Staged:
    micro_steps: tuple[MicroStepId, ...]
    sums: Tensor


class Replica:
    """The replica of the model in `model_dir`, or one of its ranks. Parameters come with `load`.

    After each step it checkpoints itself, by way of `staging_dir` in shared memory, in `checkpoints_dir`. A satellite's
    has no `staging_dir`: it does not step.
    """

    def __init__(
        self,
        model_dir: Path,
        config: ReplicaConfig,
        checkpoints_dir: Path,
        staging_dir: Path | None = None,
        place: RankPlace = RankPlace(),  # noqa: B008 - frozen
    ) -> None:
        torch.set_num_threads(config.threads)
        shape = read_shape(model_dir)
        require_shares(shape, place.count)
        self._ranks = start_groups(place)
        self._config = config
        self._checkpoints = CheckpointWriter(checkpoints_dir, staging_dir, config.checkpoint)
        self._model = MegatronModel(shape, self._ranks)
        self._optimizer = AdamW(self._model, config.optimizer)
        self._files = ReplicaFiles(self._model, self._optimizer, self._ranks, self._checkpoints, model_dir)
        self._model.free()
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
        training in the middle of a batch and come back to it. Each byte of weights is checked as it is taken: when the
        folder is torn, and no checkpoint has its weights, SnapshotTorn is raised and the replica holds nothing.
        """
        with self._ranks.together():
            manifest = snapshot.read_manifest(path)
            if manifest.version != version:
                raise Refused(f"the snapshot at {path.name} is version {manifest.version}, asked for was {version}")
        if version != self._version:
            self.drop()
        self._version, self._in_memory = -1, False
        self._files.load(path, manifest)
        self.zero_sums()
        self._version, self._in_memory = version, True
        return self.layout_hash

    def offload(self) -> None:
        """Give the memory of parameters, own sums and moments back. Staged and merged sums stay."""
        self._own.clear()
        self._model.free()
        self._in_memory = False
        self._files.drop_moments()

    # ------------------------------------------------------------------------------------------ own sums

    def run_micro_step(self, work: MicroStep, lineages: Sequence[Lineage]) -> MicroStepDone:
        """Add the gradient sum of `work` to the own sums: Σ over its lineages of 1/T_i · Σ over counted tokens of ℓ.

        Bad input changes nothing. When the loss or gradient is not finite the own sums are dropped: NotFinite. Metrics
        are those of gyre.loss.objectives, `weighted_loss_sum` (summed over the batch and divided by |R|, the batch's
        loss) and `padded_tokens_count`.
        """
        self._require_in_memory()
        if work.version != self._version:
            raise NotLoaded(f"{work.micro_step} is for version {work.version}, this replica holds {self._version}")
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
            if not self._all_finite(self._model.grads.sum()):
                raise NotFinite(f"the gradient of {work.micro_step} is not finite")
        except BaseException:
            self.zero_sums()
            raise
        self._own.append(work.micro_step)
        return MicroStepDone(work.micro_step, time.monotonic() - started_s, metrics)

    def sums(self, transfer: str) -> Sums:
        """The own sums as they are sent to the core's replica, a copy: the ranks' parts, in their order.

        They stay until `zero_sums`. What another rank than the first gives is its own part.
        """
        self._require_own()
        parts = self._ranks.gather(self._model.grads.cpu()) or [self._model.grads]
        grads, dtype = parts[0] if len(parts) == 1 else torch.cat(parts), self._config.sums_dtype
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
        return SumsShipped(transfer, staged.micro_steps, self._model.numbers * staged.sums.element_size())

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
            raise Refused(
                f"the sums have layout {sums.layout_hash}, this replica has {self.layout_hash}: "
                "both must be of one model and one cells.train_ranks"
            )
        self._require_new(sums.transfer, sums.micro_steps)
        if sums.numbers != self._model.numbers:
            raise Refused(f"{sums.numbers} numbers are offered as sums, {self._model.numbers} are expected")

    def stage(self, sums: StageSums, values: Tensor | None) -> None:
        """Keep another replica's sums aside until `merge` names them: float32 `values`, flat. Raises Refused.

        The first rank is given all of them and gives each its part; the others are given none.
        """
        self.require_fitting(sums)
        if not self._ranks.agree(values is None or bool(torch.isfinite(values.sum()))):
            raise Refused(f"the sums of transfer {sums.transfer} are not finite")
        if self._ranks.count == 1 and values is not None:
            part = values
        else:
            part = torch.empty(self._model.grads.numel())
            self._ranks.scatter([] if values is None else values.split(part.numel()), part)
        self._staged[sums.transfer] = _Staged(sums.micro_steps, part)

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
        behind = self._files.take_moments()
        self._version = -1
        norm = self._update(order)
        digest, checkpointed = self._files.write(Path(order.path), order.version)
        self._version = order.version
        self.drop()
        metrics = {
            "grad_norm": norm,
            "lr": order.lr,
            "micro_steps": float(micro_steps),
            "moments_behind": float(behind),
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
        if not self._all_finite(weighted):
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
        self._model.join_shared_grads()
        if not self._all_finite(grads.sum()):
            self.drop()
            raise NotFinite("the gradient of the batch is not finite")
        return self._optimizer.step(order.lr)

    def _all_finite(self, value: Tensor) -> bool:
        """Whether it is a number on every rank."""
        return self._ranks.agree(bool(torch.isfinite(value)))

    def _require_in_memory(self) -> None:
        if not self._in_memory or self._version < 0:
            raise NotLoaded("no parameters are loaded")

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
