"""`gyrectl up`: run one job on this machine and watch it.

It starts one gyred over the job's folder, shows the live view, and starts gyred again should it die: the children go
on meanwhile, and the next gyred adopts them. Ctrl-C asks gyred to end everything; a second one ends it the hard way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from gyre.actors.messages_gyrectl import Status
from gyre.actors.run import end_left_runs
from gyre.children import Children, ProcessRef
from gyre.cli import client, live
from gyre.cli.check import check_job
from gyre.cli.gyred import TAKEN
from gyre.cli.report import summarise
from gyre.cli.report_html import render as render_html
from gyre.config import FileError, JobSpec, load_job
from gyre.errors import BadInput, GyreError, Unavailable
from gyre.jobdir import JobDir
from gyre.store.records import JobState

REFRESH_S = 0.5
PLAIN_EVERY_S = 5.0
STOP_GRACE_S = 30.0
RESTARTS, RESTART_WINDOW_S = 5, 60.0


@dataclass(frozen=True)
class Options:
    job: Path
    overrides: dict[str, object]
    resume: bool
    report: Path | None
    folder: Path | None


def up(options: Options, console: Console) -> int:
    """Run the job to its end. Returns the exit code. Raises GyreError for input that cannot be used."""
    _check_report(options.report)
    job, spec = prepare(options)
    console.print(f"gyre: {spec.job.name} in {job.root}", markup=False, highlight=False)
    interrupts = 0

    def on_interrupt(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1

    before = {number: signal.signal(number, on_interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asyncio.run(_watch(job, console, lambda: interrupts))
        return _finish(job, spec, options, console, interrupted=interrupts > 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_report(report: Path | None) -> None:
    """Before anything is trained: can the report be written where it is wanted?"""
    if report is None:
        return
    if not report.resolve().parent.is_dir():
        raise BadInput("--report", str(report), "its folder must exist")
    if report.is_dir():
        raise BadInput("--report", str(report), "it must name a file, not a folder")


def prepare(options: Options) -> tuple[JobDir, JobSpec]:
    """The job's folder, made ready, and its validated spec."""
    spec = load_job(options.job, options.overrides)
    base = options.job.resolve().parent
    existing = _existing(options, spec)
    if options.resume:
        if existing is None:
            raise BadInput("--resume", spec.job.name, "there is no unfinished job of that name to go on with")
        if options.overrides and _Gyred.running(existing) is not None:
            named = ", ".join(options.overrides)
            raise BadInput(named, "given", "the job is running, so nothing of it can be changed; stop it first")
        stored = client.read_spec(existing)
        plain = json.loads(stored.to_json())
        for key, value in options.overrides.items():
            section, _, name = key.partition(".")
            plain[section][name] = value
        spec = JobSpec.from_json(json.dumps(plain))
        job = existing
    else:
        if existing is not None:
            raise BadInput(
                "job.dir",
                str(existing.root),
                "it holds an unfinished job; go on with --resume, or name another with --dir",
            )
        faults = check_job(spec, base)
        if faults:
            raise FileError(options.job, faults)
        job = JobDir(_fresh_folder(options, spec))
        job.clear_staging()  # of a job whose folder was deleted
    job.create()
    job.job_file.write_text(spec.to_json(), encoding="utf-8")
    job.node_file.write_text(
        f'[node]\nname = "n0"\ndir = {json.dumps(str(job.root))}\nbase = {json.dumps(str(base))}\nstore = {json.dumps(f"sqlite://{job.store}")}\n',
        encoding="utf-8",
    )
    return job, spec


def _named_folder(options: Options, spec: JobSpec) -> Path:
    chosen = options.folder or (Path(spec.job.dir) if spec.job.dir else Path("runs") / spec.job.name)
    return chosen.resolve()


def _existing(options: Options, spec: JobSpec) -> JobDir | None:
    """The unfinished job that these options would run into."""
    named = _named_folder(options, spec)
    candidates = (
        [named]
        if options.folder or spec.job.dir
        else [named, *sorted(named.parent.glob(f"{named.name}-[0-9]*"), reverse=True)]
    )
    for folder in candidates:
        job = JobDir(folder)
        if job.job_file.is_file() and not _is_over(job):
            return job
    return None


def _is_over(job: JobDir) -> bool:
    try:
        record = asyncio.run(client.books(job)).job
    except GyreError:
        return False
    return record is not None and record.state in (JobState.FINISHED, JobState.FAILED)


def _fresh_folder(options: Options, spec: JobSpec) -> Path:
    """The named folder, or the first of NAME-2, NAME-3 … that is free when a job has ended there."""
    named = _named_folder(options, spec)
    if not (named / "job.json").exists():
        return named
    if options.folder or spec.job.dir:
        raise BadInput("job.dir", str(named), "a job has ended there; name another folder with --dir")
    number = 2
    while (named.with_name(f"{named.name}-{number}") / "job.json").exists():
        number += 1
    return named.with_name(f"{named.name}-{number}")


class _Gyred:
    """The job's gyred: one that we started, or one that was left by a gyrectl that died."""

    def __init__(self, job: JobDir, process: ProcessRef, popen: subprocess.Popen[bytes] | None) -> None:
        self._job = job
        self._process = process
        self._popen = popen

    @staticmethod
    def start(job: JobDir) -> _Gyred:
        with (job.logs / "gyred.log").open("ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", "gyre.cli.gyred", "--config", str(job.node_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return _Gyred(job, ProcessRef(popen.pid, -1), popen)

    @staticmethod
    def running(job: JobDir) -> _Gyred | None:
        """The one that runs this job now, whoever started it."""
        process = client.gyred_of(job)
        return None if process is None else _Gyred(job, process, None)

    def ended(self) -> int | None:
        """Its exit code when it has ended, negative for a signal. Of one that is not our child: 0 for a clean end."""
        if self._popen is not None:
            return self._popen.poll()
        if self._process.alive:
            return None
        return 1 if self._job.gyred_file.exists() else 0

    def signal(self, number: int) -> None:
        if self._popen is not None:
            self._popen.send_signal(number)
        else:
            self._process.signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()
        else:
            await self._process.wait()


async def _watch(job: JobDir, console: Console, interrupts: Callable[[], int]) -> None:
    """Keep one gyred alive and show its status until it ends by itself or is told to."""
    gyred = _Gyred.running(job) or _Gyred.start(job)
    deaths: deque[float] = deque(maxlen=RESTARTS)
    stopping_since: float | None = None
    printed = 0.0
    told: tuple[str, ...] = ()
    with Live(console=console, auto_refresh=False, transient=True) as view:
        while True:
            code = gyred.ended()
            if code == TAKEN and (other := _Gyred.running(job)) is not None:
                gyred = other
            elif code is not None:
                if code == 0:
                    break
                if stopping_since is not None:
                    await _end_children(job)
                    break
                if code == 2 or (len(deaths) == RESTARTS and time.monotonic() - deaths[0] < RESTART_WINDOW_S):
                    tail = _tail(job.logs / "gyred.log")
                    await _end_children(job)
                    raise Unavailable(
                        f"gyred could not be kept running (exit {code}); the end of {job.logs / 'gyred.log'}:\n{tail}"
                    )
                deaths.append(time.monotonic())
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                console.print(f"gyre: gyred ended with {how}; starting it again, its children go on", markup=False)
                gyred = _Gyred.start(job)
            if interrupts() and stopping_since is None:
                stopping_since = time.monotonic()
                view.stop()
                console.print("gyre: stopping; press Ctrl-C again to end at once", markup=False)
                await _ask_stop(job, gyred)
            elif stopping_since is not None and (interrupts() > 1 or time.monotonic() - stopping_since > STOP_GRACE_S):
                await gyred.kill()
                await _end_children(job)
                break
            status = await _status(job)
            if status is not None and console.is_terminal and stopping_since is None:
                view.update(live.render(status), refresh=True)
            elif status is not None and time.monotonic() - printed > PLAIN_EVERY_S:
                printed = time.monotonic()
                for line in (*(event for event in status.events if event not in told), live.plain_line(status)):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
                told = status.events
            await asyncio.sleep(REFRESH_S)


async def _status(job: JobDir) -> Status | None:
    try:
        return await client.status(job)
    except GyreError:
        return None


async def _ask_stop(job: JobDir, gyred: _Gyred) -> None:
    try:
        await client.stop(job, "Ctrl-C")
    except GyreError:
        gyred.signal(signal.SIGTERM)


async def _end_children(job: JobDir) -> None:
    """End what a gyred that died had started. It has no one left to end it but us."""
    if _Gyred.running(job) is None:
        await end_left_runs(job.runs)
        await Children(job.state).end_all(grace_s=5.0)


def _tail(path: Path, lines: int = 12) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError as error:
        return str(error)


def _finish(job: JobDir, spec: JobSpec, options: Options, console: Console, *, interrupted: bool) -> int:
    with contextlib.suppress(OSError):  # a socket in it says that somebody still needs it
        job.sockets.rmdir()
    books = asyncio.run(client.books(job))
    report = summarise(books, spec.job.seed)
    job.report_html.write_text(render_html(spec.job.name, books, report), encoding="utf-8")
    text = json.dumps(report.to_json()) + "\n"
    job.report_json.write_text(text, encoding="utf-8")
    if options.report is not None:
        options.report.write_text(text, encoding="utf-8")
    console.print(live.summary(report, str(job.report_html)))
    state = books.job.state if books.job else JobState.FAILED
    if state in (JobState.FINISHED, JobState.FAILED):
        job.clear_staging()  # nobody goes on with it
    if state is JobState.FINISHED:
        return 0
    if state is JobState.FAILED:
        reason = books.job.reason if books.job else "it never began"
        console.print(f"gyre: the job failed: {reason}", style="red", markup=False, soft_wrap=True)
        return 1
    console.print(
        f"gyre: stopped; go on with: gyrectl up {options.job} --resume --dir {job.root}", markup=False, soft_wrap=True
    )
    return 130 if interrupted else 1
