"""Scoring what a run left in its workspace, by the task's own evaluator.

The evaluator is a process of its own, confined like a run (it executes what the run wrote), with its own wall-clock
budget: at its end the whole of it is ended. It prints one JSON line last, `{"score": s}` with s in [0, 1]. Anything
else, be it a crash, a hang or another output, is a failure of the evaluator with its reason, and never a score of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gyre.harness import keeper
from gyre.harness.confine import Sandbox, View
from gyre.harness.profiles import clean_environment
from gyre.harness.tasks import Task
from gyre.harness.workspace import RunFolder
from gyre.trajectory.records import Outcome

_KEPT_BYTES = 64 << 10
"""What is kept of its output: the last part."""
_MARGIN_S = 10.0
"""For its keeper to end it after the limit."""
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class RunInfo:
    """What the evaluator is told of the run, as `{run}`."""

    outcome: Outcome
    """`finished` or `timed_out`."""
    submitted: bool | None
    """Whether the harness handed its work in; None where it does not tell."""


@dataclass(frozen=True)
class Evaluation:
    score: float | None
    reason: str
    """Why there is no score; empty where there is one."""
    failed_here: bool = False
    """This machine could not run the evaluator, which says nothing about the run: its disk is full, say."""


async def evaluate(
    task: Task, folder: RunFolder, info: RunInfo, limit_s: float, sandbox: Sandbox, hidden: Sequence[Path] = ()
) -> Evaluation:
    """The evaluator's word on the run's workspace, within `limit_s` (or the task's own limit).

    `hidden` are the folders that no run may see: what a run wrote is executed here, so it may not see them here either.
    """
    if task.evaluator_limit_s is not None:
        limit_s = task.evaluator_limit_s
    place = folder.evaluation
    files = {"{workspace}": folder.workspace, "{task}": place / "task.json", "{run}": place / "run.json"}
    spec = keeper.Spec(
        name=f"{folder.mark}/evaluation",
        argv=tuple(_filled(word, files) for word in task.evaluator),
        cwd=str(folder.workspace),
        env=clean_environment(folder.home),
        exit_file=str(place / "exit.json"),
        limit_s=limit_s,
    )
    readable = [files["{task}"], files["{run}"]]
    if task.evaluator_folder is not None:
        readable.append(task.evaluator_folder)
    try:
        files["{task}"].write_bytes(task.data)
        files["{run}"].write_text(json.dumps({"outcome": info.outcome.value, "submitted": info.submitted}))
        view = View((folder.workspace, folder.home), tuple(hidden), tuple(readable))
        said = await _execute(sandbox.apply(spec, view, fork=False), limit_s + _MARGIN_S)
        end = keeper.End.from_json((place / "exit.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Evaluation(None, f"the evaluator could not be run: {error}", failed_here=isinstance(error, OSError))
    return verdict(end, said, limit_s)


@dataclass(frozen=True)
class Said:
    """The last part of what an evaluator printed."""

    output: str
    errors: str


def verdict(end: keeper.End, said: Said, limit_s: float) -> Evaluation:
    """What an evaluator's end and output come to."""
    if end.error:
        return Evaluation(None, f"the evaluator could not be started: {end.error}")
    if end.limit_reached:
        return Evaluation(None, f"the evaluator did not end within {limit_s:g} s")
    if end.code != 0:
        how = f"ended with exit code {end.code}" if end.signal is None else f"was killed by signal {end.signal}"
        word = _last_line(said.errors) or _last_line(said.output) or "it said nothing"
        return Evaluation(None, f"the evaluator {how}: {word}")
    line = _last_line(said.output)
    try:
        plain: Any = json.loads(line)
        score = cast(dict[str, Any], plain)["score"]
    except (ValueError, KeyError, TypeError):
        return Evaluation(None, f'the evaluator\'s last line is {line!r}, and not {{"score": s}}')
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        return Evaluation(None, f"the evaluator's score is {score!r}, and not a number from 0 to 1")
    return Evaluation(float(score), "")


async def _execute(spec: keeper.Spec, limit_s: float) -> Said:
    """Run it under a keeper, which holds the evaluator's own limit; `limit_s` is for the keeper to do so."""
    process = await asyncio.create_subprocess_exec(
        *keeper.command("-"), stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, env={}
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            output, errors = group.create_task(_tail(process.stdout)), group.create_task(_tail(process.stderr))
            process.stdin.write(json.dumps(spec._asdict()).encode())
            process.stdin.close()
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        raise OSError(f"it could not be ended within {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.to_thread(keeper.end_marked, spec.name)
            await process.wait()  # it waits for the pipes too, that is for everybody who holds them
    return Said(output.result(), errors.result())


async def _tail(stream: asyncio.StreamReader) -> str:
    """The last part of a stream, all of which is read."""
    kept = b""
    while data := await stream.read(65536):
        kept = (kept + data)[-_KEPT_BYTES:]
    return kept.decode(errors="replace")


def _filled(word: str, files: Mapping[str, Path]) -> str:
    for placeholder, path in files.items():
        word = word.replace(placeholder, str(path))
    return word


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:_SHOWN_CHARACTERS] if lines else ""
