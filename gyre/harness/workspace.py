"""The folder of one attempt of a run: its workspace, its home, and what the node must know to adopt it.

<runs>/<run>/<attempt>/
    workspace/      the task's files; where the harness works      the run may write here
    home/           its HOME, and what the harness writes down     and here
    keeper.json     what the keeper was asked to do
    process.json    who the keeper is
    exit.json       how the harness ended
    harness.log     what it printed
    evaluation/     what the evaluator read and said
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import GyreError
from gyre.harness.tasks import Task
from gyre.ids import RunId


class WorkspaceError(GyreError):
    """The workspace of a run cannot be written."""


@dataclass(frozen=True)
class RunFolder:
    root: Path
    run: RunId
    attempt: int

    @staticmethod
    def of(runs: Path, run: RunId, attempt: int) -> RunFolder:
        return RunFolder(runs.resolve() / run / str(attempt), run, attempt)

    @property
    def mark(self) -> str:
        """What its processes bear in their environment: its own among all runs on the machine, whichever job's or node's."""
        return f"{self.run}/{self.attempt}/{hashlib.sha256(str(self.root).encode()).hexdigest()[:12]}"

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def spec_file(self) -> Path:
        return self.root / "keeper.json"

    @property
    def process_file(self) -> Path:
        return self.root / "process.json"

    @property
    def exit_file(self) -> Path:
        return self.root / "exit.json"

    @property
    def log(self) -> Path:
        return self.root / "harness.log"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation"

    def prepare(self, task: Task) -> None:
        """Make it afresh, with the task's files in the workspace. Raises WorkspaceError where it cannot be written."""
        try:
            if self.root.exists():
                _remove(self.root)
            self.root.mkdir(mode=0o700, parents=True)
            for folder in (self.workspace, self.home, self.evaluation):
                folder.mkdir()
            for name, content in task.files.items():
                path = self.workspace / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                if name in task.executable:
                    path.chmod(0o755)
        except OSError as error:
            raise WorkspaceError(f"workspace {self.workspace} cannot be written: {error.strerror or error}") from error

    def discard(self) -> None:
        """Remove the workspace and the home; the log and the records stay for people to read."""
        for folder in (self.workspace, self.home):
            if folder.exists():
                _remove(folder)


def _remove(root: Path) -> None:
    """Remove a folder, also one in which a run took its own right to write away."""
    root.chmod(0o700)
    for parent, folders, _ in os.walk(root):
        for name in folders:
            path = Path(parent) / name
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(root)
