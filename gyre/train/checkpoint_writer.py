# pyright: basic
"""Writes checkpoints beside training, in a thread of its own.

The replica offers the state after each step and goes on at once. One checkpoint is written at a time and one waits; a
newer one takes the place of the one that waits. Until the newest state is on disk it is held in host memory, so a disk
that cannot take it costs training nothing while the process lives.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from gyre.config import CheckpointSection
from gyre.errors import GyreError
from gyre.train.checkpoint import Checkpoint, keep_newest, list_checkpoints, write_checkpoint
from gyre.train.whole_folder import clear_unfinished

log = logging.getLogger("gyre.train.checkpoint")


class CheckpointWriter:
    """Owned by the core's replica; a satellite never offers, so its writer does nothing."""

    def __init__(self, checkpoints_dir: Path, section: CheckpointSection) -> None:
        self._folder = checkpoints_dir
        self._section = section
        self._changed = threading.Condition()
        self._held: Checkpoint | None = None
        self._waiting: Checkpoint | None = None
        self._thread: threading.Thread | None = None
        self._on_disk = -1
        self._failed = 0
        self._write_s = 0.0
        self._begun = False

    def offer(self, checkpoint: Checkpoint) -> None:
        """Hold it, and write it when it is its turn: every `every_steps` versions."""
        with self._changed:
            self._held = checkpoint
            if checkpoint.version % self._section.every_steps:
                return
            self._waiting = checkpoint
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="checkpoints", daemon=True)
                self._thread.start()

    def held(self, version: int, snapshot: str) -> Checkpoint | None:
        """The state of that snapshot, when it is not on disk yet."""
        with self._changed:
            held = self._held
        return held if held is not None and (held.version, held.snapshot) == (version, snapshot) else None

    def metrics(self) -> dict[str, float]:
        """Of the checkpoints before: the newest version on disk (-1: none yet), tries that failed since, its seconds."""
        with self._changed:
            return {
                "checkpoint_version": float(self._on_disk),
                "checkpoint_failures": float(self._failed),
                "checkpoint_write_s": self._write_s,
            }

    def settle(self, within_s: float) -> bool:
        """Wait until nothing is being written or waits; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, within_s)

    # ------------------------------------------------------------------------------------------ the thread

    def _write_all(self) -> None:
        while True:
            with self._changed:
                checkpoint, self._waiting = self._waiting, None
                if checkpoint is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            self._write(checkpoint)

    def _write(self, checkpoint: Checkpoint) -> None:
        started_s = time.monotonic()
        try:
            if not self._begun:  # what is there is of a core's replica before this one
                self._on_disk = max((version for version, _ in list_checkpoints(self._folder)), default=-1)
                clear_unfinished(self._folder)
                self._begun = True
            write_checkpoint(checkpoint, self._folder)
            keep_newest(self._folder, self._section.keep)
        except (OSError, GyreError) as error:
            self._report_failure(checkpoint.version, error)
            return
        with self._changed:
            recovered, self._failed = self._failed > 0, 0
            self._on_disk, self._write_s = checkpoint.version, time.monotonic() - started_s
            if self._held is checkpoint:
                self._held = None
        if recovered:
            log.info("checkpoint c%08d is on disk: checkpoints are written again", checkpoint.version)

    def _report_failure(self, version: int, error: Exception) -> None:
        """One warning for as long as it lasts."""
        with self._changed:
            self._failed += 1
            first, on_disk = self._failed == 1, self._on_disk
        if first:
            newest = f"from version {on_disk}" if on_disk >= 0 else "anew"
            log.warning(
                "there is no checkpoint of version %d (%s); training goes on and later ones are tried, but a replica "
                "that dies now begins the optimizer's state %s",
                version,
                error,
                newest,
            )
