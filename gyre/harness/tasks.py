"""Tasks, and where they come from.

A task is an instruction, the files that a run finds in its workspace, and the evaluator that scores what it leaves. A
source numbers its training tasks, so that the same `(seed, index)` is the same task on every node and after a restart.

`open_source` gives the source that a job file names: `builtin:chores`, or a folder of tasks (docs/tasks.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from gyre.config import TasksSection
from gyre.errors import BadInput
from gyre.ids import TaskId

INSTRUCTION_BYTES = 100_000
"""The most an instruction may have: harnesses take it as one argument, which the kernel bounds."""


@dataclass(frozen=True)
class Task:
    """One task. Paths in `files` are relative to the workspace."""

    id: TaskId
    instruction: str
    files: Mapping[str, bytes]
    evaluator: tuple[str, ...]
    """The evaluator's argv; `{workspace}`, `{task}` and `{run}` stand for the workspace and two JSON files."""
    data: bytes
    """JSON: what the evaluator reads as `{task}`. Runs do not see it."""
    executable: frozenset[str] = field(default_factory=frozenset[str])
    """The files that get the executable bit."""
    evaluator_limit_s: float | None = None
    """The evaluator's own time budget; None: the job's."""
    evaluator_folder: Path | None = None
    """A folder that the evaluator needs to see and runs do not."""

    def __post_init__(self) -> None:
        where = f"task {self.id}"
        if not self.instruction.strip():
            raise BadInput(f"{where}: instruction", self.instruction, "it must say what to do")
        if len(self.instruction.encode()) > INSTRUCTION_BYTES or "\0" in self.instruction:
            raise BadInput(f"{where}: instruction", self.instruction[:60], f"at most {INSTRUCTION_BYTES} bytes of text")
        if not self.evaluator or not all(self.evaluator[:1]):
            raise BadInput(f"{where}: evaluator", self.evaluator, "it must name a program")
        for name in self.files:
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or ".." in parts or "\0" in name:
                raise BadInput(f"{where}: files", name, "a path inside the workspace")


class TaskSource(Protocol):
    """A stream of training tasks and a fixed list of held-out ones."""

    @property
    def name(self) -> str: ...

    @property
    def private_folders(self) -> tuple[Path, ...]:
        """Folders that hold answers: no run sees them."""
        ...

    def train(self, index: int) -> Task:
        """Training task `index`, for every index from 0 on."""
        ...

    def heldout(self) -> Sequence[Task]: ...


def open_source(spec: TasksSection, seed: int, base_dir: Path) -> TaskSource:
    """The source that the job file names. A relative folder is taken from `base_dir`.

    Raises BadInput, with one line naming the file and the key, when the source cannot be used as it is.
    """
    if spec.source.startswith("builtin:"):
        if spec.source != "builtin:chores":
            raise BadInput("tasks.source", spec.source, "builtin:chores, or a folder of tasks")
        from gyre.demo.chores import ChoresSource

        source: TaskSource = ChoresSource(seed, spec.heldout)
    else:
        from gyre.harness.folder_tasks import FolderSource

        source = FolderSource.open(base_dir / spec.source, seed, spec.heldout)
    return Round(source, spec.train) if spec.train else source


@dataclass(frozen=True)
class Round:
    """The first `count` training tasks of a source, over and over."""

    source: TaskSource
    count: int

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def private_folders(self) -> tuple[Path, ...]:
        return self.source.private_folders

    def train(self, index: int) -> Task:
        return self.source.train(index % self.count)

    def heldout(self) -> Sequence[Task]:
        return self.source.heldout()
