"""Tasks in folders: `<folder>/{train,heldout}/<task>/task.toml` beside `files/` (docs/tasks.md).

Everything is read and checked when the source is opened but the contents of the files, which are read when a task is
asked for: a job does not begin on a set of tasks that would stop it later.
"""

from __future__ import annotations

import json
import os
import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gyre.errors import BadInput
from gyre.harness.tasks import INSTRUCTION_BYTES, Task
from gyre.ids import TaskId


class EvaluatorTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    argv: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """`{workspace}`, `{task}`, `{run}` as in gyre.harness.tasks; `{folder}` is the task's own folder."""
    limit_s: Annotated[float, Field(gt=0, le=86400)] | None = None


class TaskFile(BaseModel):
    """task.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    instruction: Annotated[str, Field(pattern=r"\S", max_length=INSTRUCTION_BYTES)]
    evaluator: EvaluatorTable


@dataclass(frozen=True)
class FolderTask:
    """One checked task folder."""

    folder: Path
    id: TaskId
    spec: TaskFile
    files: Mapping[str, Path]

    def read(self) -> Task:
        argv = tuple(word.replace("{folder}", str(self.folder)) for word in self.spec.evaluator.argv)
        return Task(
            id=self.id,
            instruction=self.spec.instruction,
            files={name: path.read_bytes() for name, path in self.files.items()},
            evaluator=argv,
            data=json.dumps({"id": self.id, "instruction": self.spec.instruction}).encode(),
            executable=frozenset(name for name, path in self.files.items() if os.access(path, os.X_OK)),
            evaluator_limit_s=self.spec.evaluator.limit_s,
            evaluator_folder=self.folder,
        )


@dataclass(frozen=True)
class FolderSource:
    """The tasks under one folder. Training goes round them, in an order drawn anew for every round."""

    root: Path
    seed: int
    training: tuple[FolderTask, ...]
    held_out: tuple[FolderTask, ...]

    @staticmethod
    def open(root: Path, seed: int, heldout: int) -> FolderSource:
        """Read and check the folder; of its held-out tasks the first `heldout` (by name) are used."""
        root = root.resolve()
        if not root.is_dir():
            raise BadInput("tasks.source", str(root), "builtin:chores, or a folder of tasks (docs/tasks.md)")
        training, held_out = _read_tasks(root / "train"), _read_tasks(root / "heldout")
        if not training:
            raise BadInput("tasks.source", str(root), "it must hold train/<task>/task.toml")
        if heldout and not held_out:
            raise BadInput("tasks.heldout", heldout, f"0, as {root} holds no heldout/<task>/task.toml")
        return FolderSource(root, seed, training, held_out[:heldout])

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def private_folders(self) -> tuple[Path, ...]:
        return (self.root,)

    def train(self, index: int) -> Task:
        epoch, place = divmod(index, len(self.training))
        order = random.Random(f"folder/{self.seed}/{epoch}").sample(range(len(self.training)), len(self.training))
        return self.training[order[place]].read()

    def heldout(self) -> Sequence[Task]:
        return self._heldout_tasks

    @cached_property
    def _heldout_tasks(self) -> tuple[Task, ...]:
        return tuple(task.read() for task in self.held_out)


def _read_tasks(parent: Path) -> tuple[FolderTask, ...]:
    if not parent.is_dir():
        return ()
    return tuple(_read_task(folder) for folder in sorted(parent.iterdir()) if not folder.name.startswith("."))


def _read_task(folder: Path) -> FolderTask:
    name = f"{folder.parent.name}/{folder.name}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", folder.name):
        raise BadInput("task folder", name, "a name of letters, digits, '.', '_' and '-'")
    file = folder / "task.toml"
    try:
        spec = TaskFile.model_validate_json(json.dumps(tomllib.loads(file.read_text(encoding="utf-8")), default=str))
    except OSError as error:
        raise BadInput(f"{name}/task.toml", str(file), f"a file that can be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{name}/task.toml", str(file), f"it must be TOML ({error})") from error
    except ValidationError as error:
        raise _fault(name, dict(error.errors()[0])) from error
    return FolderTask(folder, TaskId(name), spec, dict(_read_files(name, folder / "files")))


def _read_files(name: str, root: Path) -> Sequence[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for folder, folders, files in os.walk(root):
        folders.sort()
        for entry in sorted([*folders, *files]):
            path = Path(folder) / entry
            relative = path.relative_to(root).as_posix()
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise BadInput(f"{name}/files", relative, "only plain files and folders")
            if not os.access(path, os.R_OK):
                raise BadInput(f"{name}/files", relative, "a file that can be read")
            if path.is_file():
                found.append((relative, path))
    return found


def _fault(name: str, item: dict[str, object]) -> BadInput:
    location = item["loc"]
    key = ".".join(str(part) for part in location) if isinstance(location, tuple) else str(location)
    field = f"{name}/task.toml: {key}"
    if item["type"] == "extra_forbidden":
        return BadInput(field, item["input"], "no such key; known: instruction, evaluator.argv, evaluator.limit_s")
    if item["type"] == "missing":
        return BadInput(field, None, "this key is required")
    message = str(item["msg"])
    return BadInput(field, item["input"], message[0].lower() + message[1:])
