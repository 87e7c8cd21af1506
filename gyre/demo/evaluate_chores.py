"""The evaluator of the task family `chores`: scores what a run left in its workspace.

    python -I -S evaluate_chores.py TASK.json WORKSPACE RUN.json

TASK.json holds `{"expected": {file name: content}}`, RUN.json `{"outcome": "finished" | "timed_out", "submitted":
bool | null}`. Prints one line `{"score": s}` with s in [0, 1], or exits with status 2 and one line that says what
was wrong.

Each expected file is worth an equal share: a tenth of it when the file is there, all of it when its content is
right. A run that did not submit its work gets three tenths of that: with more, a run that did its chores and then
broke off would stand above the mean of its group, and training would reinforce the breaking off. Where the harness
does not tell whether it submitted (null), a finished run is taken to have done so, a timed-out run not.

Only the standard library is used, and little of it: this file is a process of its own for every run.
"""

import json
import os
import stat
import sys

SHARE_FOR_EXISTING = 0.1
SHARE_WHEN_NOT_SUBMITTED = 0.3
READ_LIMIT_BYTES = 1 << 20


class InputError(Exception):
    """The evaluator was given something it cannot score; its text is the line that is printed."""


def main(arguments: list[str]) -> int:
    """Runs the evaluator on its command line and returns the exit status."""
    try:
        if len(arguments) != 3:
            raise InputError(f"want three arguments (TASK.json WORKSPACE RUN.json), got {len(arguments)}")
        task_path, workspace, run_path = arguments
        expected = _expected(_read_object(task_path), task_path)
        submitted = _submitted(_read_object(run_path), run_path)
        if not os.path.isdir(workspace):
            raise InputError(f"workspace {workspace!r} is not a directory")
    except InputError as error:
        print(f"evaluate_chores: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"score": score(expected, workspace, submitted)}))
    return 0


def score(expected: dict[str, str], workspace: str, submitted: bool) -> float:
    """The score in [0, 1] of a workspace against the files it should hold."""
    work = sum(_share(os.path.join(workspace, name), content) for name, content in expected.items()) / len(expected)
    return round(work if submitted else SHARE_WHEN_NOT_SUBMITTED * work, 6)


def _share(path: str, content: str) -> float:
    try:
        # A link or a pipe that a command left is no answer, and opening one could block.
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return 0.0
        with open(path, "rb") as file:
            found = file.read(READ_LIMIT_BYTES)
    except OSError:
        return 0.0
    return 1.0 if found == content.encode() else SHARE_FOR_EXISTING


def _read_object(path: str) -> dict[str, object]:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise InputError(f"{path!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path!r} holds {type(value).__name__}, want an object")
    return value


def _expected(task: dict[str, object], path: str) -> dict[str, str]:
    expected = task.get("expected")
    if not isinstance(expected, dict) or not expected:
        raise InputError(f"{path!r}: 'expected' is {expected!r}, want a non-empty object of file names and contents")
    for name, content in expected.items():
        if not isinstance(content, str) or name in ("", ".", "..") or "/" in name:
            raise InputError(f"{path!r}: 'expected' has {name!r}: {content!r}, want a plain file name and a text")
    return expected


def _submitted(run: dict[str, object], path: str) -> bool:
    outcome, submitted = run.get("outcome"), run.get("submitted")
    if outcome not in ("finished", "timed_out"):
        raise InputError(f"{path!r}: 'outcome' is {outcome!r}, want 'finished' or 'timed_out'")
    if submitted is None:
        return outcome == "finished"
    if not isinstance(submitted, bool):
        raise InputError(f"{path!r}: 'submitted' is {submitted!r}, want true, false or null")
    return submitted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
