# pyright: basic
"""Where a checkpoint goes after its step: at once to shared memory, and from there to disk beside training.

A step is answered when its checkpoint is *staged*: whole in a folder of shared memory, which survives the process. So a
replica that is killed loses no step. A thread brings the newest staged one to disk, one at a time, and then it is staged
no more. Where it cannot be staged (no room), the answer waits until it is on disk; where neither can be, it is held in
this process's memory and training goes on.

Two may be staged: the newest, and the one that its step began from. Until the step is published, which the replica
learns by being asked for the next, it may have to be taken again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gyre.config import CheckpointSection
from gyre.errors import GyreError
from gyre.jobdir import is_private, make_private
from gyre.train.checkpoint import (
    Checkpoint,
    CheckpointTorn,
    copy_checkpoint,
    keep_newest,
    list_checkpoints,
    write_checkpoint,
)
from gyre.train.whole_folder import clear_unfinished, remove_whole

log = logging.getLogger("gyre.train.checkpoint")


class CheckpointWriter:
    """Owned by the core's replica; a satellite never offers, so its writer does nothing, and it has no `staging_dir`."""

    def __init__(self, checkpoints_dir: Path, staging_dir: Path | None, section: CheckpointSection) -> None:
        self._folder = checkpoints_dir
        self._staging = staging_dir
        self._section = section
        self._offering = threading.Lock()
        """With who offers, and with who ends the staging."""
        self._moving = threading.Lock()
        """With who reads a checkpoint, and with who removes one."""
        self._disk = threading.Lock()
        """With who writes to disk."""
        self._changed = threading.Condition()
        self._held: Checkpoint | None = None
        self._due = False
        self._bringing = -1
        self._thread: threading.Thread | None = None
        self._ended = False
        self._on_disk = -1
        self._written = -1
        """By this writer, and so known to be whole."""
        self._failed = 0
        self._write_s = 0.0
        self._begun: set[Path] = set()
        self._unstaged = False

    def offer(self, checkpoint: Checkpoint) -> None:
        """Returns when a replica that dies does not lose it any more, or when nothing can be done for that.

        It is brought to disk later when it is its turn: every `every_steps` versions.
        """
        with self._offering:
            if self._stage(checkpoint):
                self._held = None
                if checkpoint.version % self._section.every_steps == 0:
                    self._bring_to_disk()
                return
            written = self._write(checkpoint.version, lambda: write_checkpoint(checkpoint, self._folder), staged=False)
            self._held = None if written else checkpoint

    def held(self, version: int, snapshot: str) -> Checkpoint | None:
        """The state of that snapshot, when it is in this process only."""
        held = self._held
        return held if held is not None and (held.version, held.snapshot) == (version, snapshot) else None

    @contextmanager
    def places(self) -> Iterator[tuple[Path, ...]]:
        """The folders where checkpoints are, the staged ones first. None goes from there meanwhile."""
        with self._moving:
            private = self._staging is not None and is_private(self._staging)
            yield (self._staging, self._folder) if self._staging is not None and private else (self._folder,)

    def metrics(self) -> dict[str, float]:
        """Of the checkpoints before: the newest version on disk (-1: none yet), tries that failed since, its seconds."""
        with self._changed:
            return {
                "checkpoint_version": float(self._on_disk),
                "checkpoint_failures": float(self._failed),
                "checkpoint_write_s": self._write_s,
            }

    def settle(self, within_s: float) -> bool:
        """Wait until nothing is being written to disk or is due; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, within_s)

    def end(self, within_s: float) -> bool:
        """Bring all that is staged to disk, whatever `every_steps` says, and stage nothing more; False as of `settle`.

        Nothing is left in shared memory but what the disk does not take, for a job that is gone on with.
        """
        until_s = time.monotonic() + within_s
        if not self._offering.acquire(timeout=within_s):
            return False
        try:
            self._ended = True
            if self._staging is not None:
                self._bring_to_disk()
            if (held := self._held) is not None:
                self._write(held.version, lambda: write_checkpoint(held, self._folder), staged=False)
        finally:
            self._offering.release()
        return self.settle(until_s - time.monotonic())

    # ------------------------------------------------------------------------------------------ shared memory

    def _stage(self, checkpoint: Checkpoint) -> bool:
        """Whether it is staged now."""
        if self._staging is None or self._ended:
            return False
        try:
            make_private(self._staging)
            self._begin(self._staging)
            self._clear_for(checkpoint.version)
            write_checkpoint(checkpoint, self._staging)
        except (OSError, GyreError) as error:
            if not self._unstaged:
                log.warning(
                    "checkpoint c%08d cannot be staged in shared memory (%s); its step and the next ones wait for the "
                    "disk as long as that lasts",
                    checkpoint.version,
                    error,
                )
            self._unstaged = True
            return False
        self._unstaged = False
        return True

    def _clear_for(self, version: int) -> None:
        """Make room for `version`: of those before it only the newest is gone on from, and later ones never are."""
        assert self._staging is not None
        with self._changed:
            self._changed.wait_for(lambda: self._bringing != version)  # it was taken before, and is replaced
        with self._moving, self._changed:
            staged = list_checkpoints(self._staging)
            newest = max((found for found, _ in staged if found < version), default=-1)
            if newest <= self._written < version:
                newest = -1
            for found, path in staged:
                if found not in (newest, version, self._bringing):
                    remove_whole(path)

    def _staged(self) -> list[tuple[int, Path]]:
        return list_checkpoints(self._staging) if self._staging is not None and is_private(self._staging) else []

    # ------------------------------------------------------------------------------------------ to disk

    def _bring_to_disk(self) -> None:
        with self._changed:
            self._due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._bring_all, name="checkpoints", daemon=True)
                self._thread.start()

    def _bring_all(self) -> None:
        """The newest that is staged, as often as one is due, and at the end each."""
        while True:
            with self._changed:
                staged, self._due = self._staged() if self._due else [], False
                self._bringing = staged[-1][0] if staged else -1
                self._changed.notify_all()
                if not staged:
                    self._thread = None
                    if self._ended:
                        self._leave()
                    return
            if self._bring(*staged[-1]) and self._ended:
                self._due = True

    def _bring(self, version: int, staged: Path) -> bool:
        """Whether it is staged no more."""
        try:
            if not self._write(version, lambda: copy_checkpoint(staged, self._folder), staged=True):
                return False
        except CheckpointTorn as torn:
            log.warning("staged checkpoint %s; it is dropped", torn)
            with self._moving:
                remove_whole(staged)
        return True

    def _leave(self) -> None:
        if self._staging is not None and is_private(self._staging):
            clear_unfinished(self._staging)
            with suppress(OSError):  # there is one in it that the disk does not take
                self._staging.rmdir()

    def _write(self, version: int, write: Callable[[], None], *, staged: bool) -> bool:
        """Whether it is on disk now. `staged` says whether it is safe meanwhile. Raises CheckpointTorn."""
        with self._disk:
            started_s = time.monotonic()
            try:
                if self._folder not in self._begun:  # what is there is of a core's replica before this one
                    self._on_disk = max((found for found, _ in list_checkpoints(self._folder)), default=-1)
                self._begin(self._folder)
                write()
                with self._moving:
                    keep_newest(self._folder, self._section.keep)
                    for found, path in self._staged():
                        if found == version:
                            remove_whole(path)
            except CheckpointTorn:
                raise
            except (OSError, GyreError) as error:
                self._report_failure(version, error, staged=staged)
                return False
            with self._changed:
                recovered, self._failed = self._failed > 0, 0
                self._on_disk = self._written = version
                self._write_s = time.monotonic() - started_s
        if recovered:
            log.info("checkpoint c%08d is on disk: checkpoints are written again", version)
        return True

    def _begin(self, folder: Path) -> None:
        """Before the first write to the folder: clear what killed ones have left there."""
        if folder not in self._begun:
            clear_unfinished(folder)
            self._begun.add(folder)

    def _report_failure(self, version: int, error: Exception, *, staged: bool) -> None:
        """One warning for as long as it lasts."""
        with self._changed:
            self._failed += 1
            first, on_disk = self._failed == 1, self._on_disk
        if first:
            log.warning(
                "there is no checkpoint of version %d on disk (%s); training goes on and later ones are tried, but a %s "
                "that dies now begins the optimizer's state %s",
                version,
                error,
                "machine" if staged else "replica",
                f"from version {on_disk}" if on_disk >= 0 else "anew",
            )
