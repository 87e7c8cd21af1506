# pyright: basic
"""What a replica reads and writes: snapshots and checkpoints, and which of them its weights and moments are of.

All ranks come to each call. Whole weights and moments are the first rank's; from a snapshot each takes its own part.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gyre.train import checkpoint, snapshot
from gyre.train.checkpoint_writer import CheckpointWriter
from gyre.train.maps import join_weights, share_weights
from gyre.train.megatron import MOMENTS, AdamW, MegatronModel
from gyre.train.ranks import Ranks
from gyre.train.tensor_file import ChunkChanged, MappedFile, save_tensors

log = logging.getLogger("gyre.train.replica")


class ReplicaFiles:
    """Of one rank, with its model and optimizer."""

    def __init__(
        self, model: MegatronModel, optimizer: AdamW, ranks: Ranks, checkpoints: CheckpointWriter, model_dir: Path
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._ranks = ranks
        self._checkpoints = checkpoints
        self._model_dir = model_dir
        self._folder = Path()
        """Of the snapshot held, which its next has the tokenizer of."""
        self._snapshots_dir = Path()
        self._digest = ""
        self._version = -1
        self._moments_version = -1

    def load(self, path: Path, manifest: snapshot.Manifest) -> None:
        """The weights of the snapshot folder `path`, each byte checked as it is taken, or of its checkpoint.

        Raises SnapshotTorn where neither is whole, and then some parameters may be read.
        """
        folder = path
        try:
            self._read_snapshot(path, manifest)
        except snapshot.SnapshotTorn as torn:
            self._read_checkpoint(manifest, torn)
            folder = self._model_dir
        self._folder, self._snapshots_dir = folder, path.parent
        self._version, self._digest = manifest.version, manifest.digest

    def take_moments(self) -> int:
        """Have the optimizer's moments of the snapshot held: from memory, or from the newest checkpoint that fits.

        They are for a step, and of no version until `write`. Returns how many steps they know nothing of: 0, but when a
        checkpoint is lost or torn. Only the core steps, so only the core ever has them; any replica can.
        """
        if self._moments_version == self._version:
            self._moments_version = -1
            return 0
        with self._checkpoints.places() as places, self._ranks.together():
            had, moments = self._newest_moments(places) if self._ranks.first else (0, {})
        had, steps = self._ranks.hear((had, float(moments.get("step", 0.0))))
        if steps:
            self._optimizer.begin(steps)
            for moment in MOMENTS:
                front = f"{moment}."
                whole = {name[len(front) :]: value for name, value in moments.items() if name.startswith(front)}
                share_weights(whole, self._optimizer.moments(moment), self._model.pieces, self._ranks)
        else:
            self._optimizer.clear()
        return self._version - had

    def drop_moments(self) -> None:
        """Give their memory back."""
        self._optimizer.clear()
        self._moments_version = -1

    def write(self, path: Path, version: int) -> tuple[str, dict[str, float]]:
        """Write snapshot `version` and offer its checkpoint: the snapshot's digest, and the metrics of the checkpoints before.

        Raises StorageFull or OSError where it cannot be written.
        """
        state = self._state()
        digest, checkpointed = "", {}
        with self._ranks.together():
            if self._ranks.first:
                digest = self._write_snapshot(path, version, state.weights)
                checkpointed = self._checkpoints.metrics()
                self._checkpoints.offer(replace(state, version=version, snapshot=digest))
        self._folder, self._snapshots_dir, self._digest = path, path.parent, digest
        self._version = self._moments_version = version
        return digest, checkpointed

    # ------------------------------------------------------------------------------------------ private

    def _newest_moments(self, places: Sequence[Path]) -> tuple[int, Mapping[str, Tensor]]:
        """(version they are of, moments): the newest that fit; of version 0 and none when they begin anew."""
        held = self._checkpoints.held(self._version, self._digest)
        if held is not None:
            return self._version, held.moments
        found = checkpoint.newest_fitting(places, self._version, self._model.model_hash, self._published_digest)
        had, moments = (0, {}) if found is None else (found[0].version, checkpoint.read_moments(found[1]))
        if had < self._version:
            log.warning(
                "there is no checkpoint of version %d: weights are the snapshot's, the optimizer's state is %s and "
                "lacks %d steps",
                self._version,
                f"that of checkpoint {had}" if found else "begun anew",
                self._version - had,
            )
        return had, moments

    def _published_digest(self, version: int) -> str:
        if version == self._version:
            return self._digest
        try:
            return snapshot.read_manifest(snapshot.snapshot_path(self._snapshots_dir, version)).digest
        except snapshot.SnapshotTorn:
            return ""

    def _read_snapshot(self, path: Path, manifest: snapshot.Manifest) -> None:
        """Raises SnapshotTorn, and then some parameters may be read. The ranks share out which chunks each checks."""
        share = self._ranks.rank, self._ranks.count
        with self._ranks.together():
            weights = snapshot.verify_but_weights(path, manifest)
            try:
                self._model.load([MappedFile(path / entry.name, entry.chunks, share) for entry in weights])
            except ChunkChanged as changed:
                raise snapshot.SnapshotTorn(f"{path.name}: {changed}") from changed

    def _read_checkpoint(self, manifest: snapshot.Manifest, torn: snapshot.SnapshotTorn) -> None:
        """The weights of a torn snapshot, from the checkpoint that belongs to it. Raises `torn` when there is none."""
        with self._checkpoints.places() as places:
            with self._ranks.together():
                found = self._checkpoint_of(manifest, places) if self._ranks.first else None
            whole = self._ranks.hear(found)
            if whole is None:
                raise torn
            if self._ranks.first:
                log.warning("snapshot %s; its weights are taken from checkpoint %s", torn, whole.name)
            with self._ranks.together():
                self._model.load([MappedFile(whole / checkpoint.MODEL)])

    def _checkpoint_of(self, manifest: snapshot.Manifest, places: Sequence[Path]) -> Path | None:
        for whole in (checkpoint.checkpoint_path(place, manifest.version) for place in places):
            try:
                index = checkpoint.verify(whole)
            except checkpoint.CheckpointTorn:
                continue
            if not checkpoint.why_unfit(index, manifest.version, self._model.model_hash, manifest.digest):
                return whole
        return None

    def _state(self) -> checkpoint.Checkpoint:
        """What there is after a step, whole, as the first rank alone has it; of no version yet."""
        named = {name: parameter.detach() for name, parameter in self._model.named.items()}
        weights = join_weights(named, self._model.pieces, self._ranks)
        moments: dict[str, Tensor] = {}
        if self._optimizer.steps:
            moments["step"] = torch.tensor(self._optimizer.steps)
            for moment in MOMENTS:
                joined = join_weights(self._optimizer.moments(moment), self._model.pieces, self._ranks)
                moments |= {f"{moment}.{name}": value for name, value in joined.items()}
        return checkpoint.Checkpoint(-1, "", self._model.model_hash, weights, moments)

    def _write_snapshot(self, path: Path, version: int, weights: Mapping[str, Tensor]) -> str:
        def fill(target: Path) -> None:
            snapshot.copy_surroundings(self._folder, target)
            save_tensors(weights, target / snapshot.MODEL)

        return snapshot.write_snapshot(path, version, fill)
