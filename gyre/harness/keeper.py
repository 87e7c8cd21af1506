"""The keeper of one run (or one evaluation): the process that starts it, outlives whoever asked for it, and ends it.

    keeper            leads its own session; its pid is the one that records name; writes the exit file
      first process   only in namespaces: pid 1 of the run's own, sets up its view, reaps its orphans
        harness       in its own session, without privileges

Started either by exec (`python -I -S -c … SPEC`, see `command`) or by the zygote's fork, which passes the harness's
body as a function. Only the standard library, and little of it: a keeper starts for every run and every evaluator.

Signals: the first SIGTERM is passed on to the harness, the second ends the run at once. When the keeper dies, so does
its run. When the harness ends, whatever else of the run still lives is ended too, and the exit file is written by
atomic rename: `{"code", "signal", "error", "limit_reached", "starved"}`. `error` says why the harness could not be
started, `starved` that it was killed while the system ran out of memory.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from gyre.harness import namespaces

SETUP_FAILED = 125
MARK = "GYRE_RUN"
"""The variable by which a process is known to belong to a run, where there is no PID namespace to say so."""

_OPEN_FILES = 65536
_FILE_BYTES = 8 << 30
_OOM_SCORE = "500"
_KILL_S = 10.0
"""For the kernel to end what was sent SIGKILL."""
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class Spec(NamedTuple):
    """What to keep. `mounts` are those of gyre.harness.confine; `method` is `namespaces`, `bwrap` or `none`."""

    name: str
    """The run and its attempt, or what else is kept, as MARK shows it."""
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    log: str = ""
    """Where output goes; empty: the keeper's own."""
    record_file: str = ""
    """Who the keeper is: `{"pid", "start_ticks"}`, written before the harness starts; empty: nowhere."""
    exit_file: str = ""
    method: str = "none"
    mounts: tuple[tuple[str, str], ...] = ()
    wrapper: tuple[str, ...] = ()
    """The command that confines argv, where the method is `bwrap`."""
    limit_s: float = 0.0
    """The run is ended after this time; 0: whenever it likes."""

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Spec:
        """The spec that `_asdict` made, after a journey through JSON."""
        return Spec(**plain)._replace(
            argv=tuple(plain["argv"]),
            wrapper=tuple(plain["wrapper"]),
            mounts=tuple((kind, path) for kind, path in plain["mounts"]),
        )


def command(spec_file: str) -> tuple[str, ...]:
    """The argv of a keeper whose spec is in `spec_file` (`-` is its standard input)."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = f"import sys; sys.path.insert(0, {root!r}); from gyre.harness.keeper import main; main()"
    return (sys.executable, "-I", "-S", "-c", code, spec_file)


def main() -> NoReturn:
    """The keeper as a program."""
    if sys.argv[1] == "-":
        text = sys.stdin.read()
    else:
        with open(sys.argv[1], encoding="utf-8") as file:
            text = file.read()
    spec = Spec.from_plain(json.loads(text))
    keep(spec, lambda: _execute(spec))


def keep(spec: Spec, body: Callable[[], int]) -> NoReturn:
    """Become the keeper of `spec`: run `body` as its harness (it executes, or returns an exit code); end with it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    namespaces.set_name("gyre-keeper")
    if os.getsid(0) != os.getpid():
        os.setsid()
    places = _Places(spec)
    try:
        places.begin(spec)
        end = _Keeping(spec, body).until_the_end()
    except Exception as error:
        end = End(error=_why(error))
    places.write_end(end)
    os._exit(end.exit_code)


class End(NamedTuple):
    """How the harness ended."""

    code: int | None = None
    signal: int | None = None
    error: str = ""
    limit_reached: bool = False
    starved: bool = False

    @staticmethod
    def from_json(text: str) -> End:
        return End(**json.loads(text))

    @property
    def exit_code(self) -> int:
        if self.error:
            return SETUP_FAILED
        return self.code if self.code is not None else 128 + (self.signal or 0)


class _Places:
    """The keeper's files. Their folders are opened before the view changes: what a run sees has no way to them."""

    def __init__(self, spec: Spec) -> None:
        self._exit_name = os.path.basename(spec.exit_file)
        self._exit_folder = _open_folder(spec.exit_file) if spec.exit_file else -1

    def begin(self, spec: Spec) -> None:
        """Write down who the keeper is, and let all output go to the log."""
        if spec.record_file:
            folder = _open_folder(spec.record_file)
            record = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
            _replace(folder, os.path.basename(spec.record_file), json.dumps(record))
            os.close(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if spec.log:
            output = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)

    def write_end(self, end: End) -> None:
        if self._exit_folder >= 0:
            _replace(self._exit_folder, self._exit_name, json.dumps(end._asdict()))


class _Keeping:
    def __init__(self, spec: Spec, body: Callable[[], int]) -> None:
        self._spec = spec
        self._deadline_s = time.monotonic() + spec.limit_s if spec.limit_s else 0.0
        self._limit_reached = False
        self._asked_to_end = False
        self._oom_kills = _oom_kills()
        _offer_to_the_oom_killer()
        namespaces.adopt_orphans()
        report_r, report_w = os.pipe()
        os.set_blocking(report_r, False)
        alive_r, self._alive_w = os.pipe()
        if spec.method == "namespaces":
            namespaces.unshare()
        self._first = os.fork()
        if self._first == 0:
            os.close(report_r)
            os.close(self._alive_w)
            _first_process(spec, body, report_w, alive_r)
        os.close(report_w)
        os.close(alive_r)
        self._report = report_r

    def until_the_end(self) -> End:
        status = None
        while status is None:
            self._wait_a_signal()
            status = self._reap()
        if self._spec.method != "namespaces":
            self._end_what_is_left()
        code = os.waitstatus_to_exitcode(status)
        end = End(code=code) if code >= 0 else End(signal=-code)
        reported = _read_now(self._report).decode(errors="replace").splitlines()
        if reported:
            end = End.from_json(reported[0])
        killed = signal.SIGKILL in (end.signal, (end.code or 0) - 128)  # bubblewrap tells a signal as a shell does
        starved = killed and _oom_kills() > self._oom_kills
        return end._replace(limit_reached=self._limit_reached, starved=starved)

    def _wait_a_signal(self) -> None:
        if self._deadline_s:
            received = signal.sigtimedwait(_WATCHED, max(0.0, self._deadline_s - time.monotonic()))
        else:
            received = signal.sigwaitinfo(_WATCHED)
        if received is None:
            self._limit_reached, self._deadline_s = True, 0.0
            os.kill(self._first, signal.SIGKILL)
        elif received.si_signo != signal.SIGCHLD:
            os.kill(self._first, signal.SIGKILL if self._asked_to_end else signal.SIGTERM)
            self._asked_to_end = True

    def _reap(self) -> int | None:
        found = None
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._first:
                    found = ended[1]
        except ChildProcessError:
            pass
        return found

    def _end_what_is_left(self) -> None:
        """Orphans become this process's children as their parents die, so that killing children reaches them all."""
        while (children := _children(os.getpid())) or not _has_no_child():
            for child in children:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.001)


def _first_process(spec: Spec, body: Callable[[], int], report: int, keeper_alive: int) -> NoReturn:
    try:
        namespaces.die_with_parent(signal.SIGKILL)
        if spec.method != "namespaces":
            _become_harness(spec, body, report)
        namespaces.set_name("gyre-init")
        namespaces.enter(list(spec.mounts))
        if _is_at_end(keeper_alive):  # it died before we asked to die with it
            os._exit(SETUP_FAILED)
        harness = os.fork()
        if harness == 0:
            namespaces.drop_privileges()
            _become_harness(spec, body, report)
        _be_init(harness, report)
    except Exception as error:
        _tell(report, End(error=_why(error)))
    os._exit(SETUP_FAILED)


def _be_init(harness: int, report: int) -> NoReturn:
    namespaces.hide_from_debuggers()
    while True:
        received = signal.sigwaitinfo(_WATCHED)
        if received.si_signo != signal.SIGCHLD:
            os.kill(harness, signal.SIGTERM)
            continue
        while (ended := _ended_child())[0]:
            if ended[0] == harness:
                code = os.waitstatus_to_exitcode(ended[1])
                _tell(report, End(code=code) if code >= 0 else End(signal=-code))
                os._exit(0)


def _ended_child() -> tuple[int, int]:
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _become_harness(spec: Spec, body: Callable[[], int], report: int) -> NoReturn:
    code = SETUP_FAILED
    report = os.dup2(report, 3, inheritable=False)
    os.closerange(4, 1 << 20)
    try:
        os.setsid()
        namespaces.no_new_privileges()
        os.chdir(spec.cwd)
        os.umask(0o022)
        _limit_resources()
        for number in _WATCHED:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        code = body()
    except Exception as error:
        _tell(report, End(error=_why(error)))
    finally:
        os._exit(code)


def _execute(spec: Spec) -> int:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
        signal.signal(number, signal.SIG_DFL)
    argv = (*spec.wrapper, *spec.argv)
    try:
        os.execvpe(argv[0], argv, {**spec.env, MARK: spec.name})
    except OSError as error:
        raise OSError(error.errno, f"cannot run {argv[0]}: {error.strerror}") from error


def _limit_resources() -> None:
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        hard = resource.getrlimit(kind)[1]
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))


def end_marked(name: str) -> None:
    """Kill every process whose environment says that it belongs to the run `name`, until there is none.

    For a run that had no PID namespace, when its keeper is gone.
    """
    deadline_s = time.monotonic() + _KILL_S
    while (marked := _marked(f"{MARK}={name}".encode())) and time.monotonic() < deadline_s:
        for pid in marked:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.001)


def _marked(mark: bytes) -> list[int]:
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        found.append(int(entry))
            except OSError:  # it is gone, or another user's
                continue
    return found


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since the boot."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def _offer_to_the_oom_killer() -> None:
    """A run that eats the machine's memory goes before the node's own processes do."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(_OOM_SCORE)
    except OSError:  # not offered on this machine: a courtesy, not a promise
        return


def _oom_kills() -> int:
    """How many processes the kernel has killed since the boot because there was no memory; 0 where it does not tell."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:  # gone
                continue
            if int(fields[1]) == pid and fields[0] not in "ZX":
                found.append(int(entry))
    return found


def _has_no_child() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return True
    return False


def _is_at_end(pipe: int) -> bool:
    os.set_blocking(pipe, False)
    try:
        return not os.read(pipe, 1)
    except BlockingIOError:
        return False


def _read_now(pipe: int) -> bytes:
    try:
        return os.read(pipe, 65536)
    except BlockingIOError:
        return b""


def _tell(report: int, end: End) -> None:
    os.write(report, (json.dumps(end._asdict()) + "\n").encode())


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _open_folder(path: str) -> int:
    return os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _replace(folder: int, name: str, text: str) -> None:
    fresh = f".{name}.new"
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
    os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
