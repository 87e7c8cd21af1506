"""What a run may see and change of the machine, and by which means that is held.

A view is: the whole file system read-only, except the run's own folders; private /tmp, /dev and /proc; the job's own
state, the other runs' workspaces and the tasks' answers not there at all; a PID namespace, so that what a command can
signal is its own run, and ending the run ends all of it. The network stays (the gateway is on loopback), and what the
user may read, the run may read.

`choose` finds out what this machine offers: bubblewrap for programs that are executed, user and mount namespaces by
system call for forks of the zygote (and for programs where there is no bubblewrap). `mounts` is pure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gyre
from gyre.errors import GyreError
from gyre.harness import keeper, namespaces

Method = Literal["namespaces", "bwrap", "none"]
MountKind = Literal["tmp", "empty", "ro", "rw"]

PRIVATE = ("/tmp", "/var/tmp", "/run")
"""Folders of the machine that every run has to itself: they hold others' sockets and passing files."""
_PROBE_S = 30.0


class ConfinementUnavailable(GyreError):
    """This machine offers no way to confine a run."""


@dataclass(frozen=True)
class View:
    """What one run sees beside the read-only rest of the machine."""

    writable: tuple[Path, ...]
    hidden: tuple[Path, ...] = ()
    readable: tuple[Path, ...] = ()
    """Seen, read-only, although they may lie in a private or hidden folder."""


@dataclass(frozen=True)
class Sandbox:
    """How runs are confined on this machine. `forks` is None where a fork cannot be confined (a program can)."""

    programs: Method
    forks: Method | None
    bwrap: str = ""

    def __str__(self) -> str:
        if self.programs == "none":
            return "unconfined"
        means = {"bwrap": "bubblewrap", "namespaces": "user namespaces", "none": "nothing"}
        return (
            means[self.programs]
            if self.programs == self.forks
            else " and ".join(means[method] for method in (self.forks, self.programs) if method is not None)
        )

    def apply(self, spec: keeper.Spec, view: View, *, fork: bool) -> keeper.Spec:
        """The spec, confined to the view. `fork`: the harness is a fork of the zygote."""
        method = self.forks if fork else self.programs
        if method is None:
            raise ConfinementUnavailable("a fork cannot be confined on this machine; the harness must be executed")
        if method == "none":
            return spec._replace(method="none")
        places = mounts(view)
        wrapper = bwrap_command(self.bwrap, places, spec.cwd) if method == "bwrap" else ()
        return spec._replace(method=method, mounts=places, wrapper=wrapper)


UNCONFINED = Sandbox(programs="none", forks="none")


def choose(mode: Literal["auto", "unconfined"]) -> Sandbox:
    """The sandbox of this machine, tried out (a tenth of a second).

    Raises ConfinementUnavailable where `auto` finds nothing that works.
    """
    if mode == "unconfined":
        return UNCONFINED
    bwrap = shutil.which("bwrap") or ""
    candidates: dict[Method, Sandbox] = {"namespaces": Sandbox("namespaces", "namespaces")}
    if bwrap:
        candidates["bwrap"] = Sandbox("bwrap", None, bwrap)
    faults = {method: _probe(sandbox) for method, sandbox in candidates.items()}
    if not any(faults[method] == "" for method in faults):
        raise ConfinementUnavailable(
            f"runs cannot be confined on this machine (user namespaces: {faults['namespaces']}; "
            f"bubblewrap: {faults.get('bwrap', 'not installed')}). Install bubblewrap or allow user namespaces, "
            "or give --unconfined to let runs act as you"
        )
    forks: Method | None = "namespaces" if faults["namespaces"] == "" else None
    if faults.get("bwrap") == "":
        return Sandbox("bwrap", forks, bwrap)
    return Sandbox("namespaces", forks)


def mounts(view: View, exists: Callable[[str], bool] = os.path.exists) -> tuple[tuple[MountKind, str], ...]:
    """The (kind, path) of every mount of the view, parents first. Where a path is named twice the wider right holds."""
    wanted: dict[str, MountKind] = {}
    private = [path for path in map(os.path.realpath, PRIVATE) if exists(path)]
    groups: list[tuple[MountKind, Iterable[str | Path]]] = [
        ("tmp", private),
        ("empty", view.hidden),
        ("ro", (*_own_folders(), *view.readable)),
        ("rw", view.writable),
    ]
    for kind, paths in groups:
        for path in (os.path.realpath(path) for path in paths):
            if exists(path) and path != "/":
                wanted[path] = kind
    needed = [path for path, kind in wanted.items() if kind != "ro" or _is_covered(path, wanted)]
    needed.sort(key=lambda path: (len(Path(path).parts), path))
    return tuple((wanted[path], path) for path in needed)


def bwrap_command(bwrap: str, places: Iterable[tuple[MountKind, str]], cwd: str) -> tuple[str, ...]:
    """The bubblewrap command line that makes the same view; the program to run follows it."""
    argv = [bwrap, "--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--die-with-parent", "--cap-drop", "ALL"]
    argv += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    for name in namespaces.PROC_SWITCHES:  # where it runs as root, bubblewrap itself leaves them open
        argv += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    sealed: list[str] = []
    for kind, path in places:
        if kind == "tmp":
            argv += ["--perms", "1777", "--tmpfs", path]
        elif kind == "empty":
            argv += ["--tmpfs", path]
            sealed.append(path)
        else:
            argv += ["--ro-bind" if kind == "ro" else "--bind", path, path]
    for path in sealed:
        argv += ["--remount-ro", path]
    return (*argv, "--chdir", cwd, "--")


def _is_covered(path: str, wanted: dict[str, MountKind]) -> bool:
    return any(str(parent) in wanted and wanted[str(parent)] != "ro" for parent in Path(path).parents)


def _own_folders() -> tuple[str, ...]:
    """What a harness of this installation needs to see, wherever it was installed."""
    return (sys.prefix, sys.base_prefix, str(Path(gyre.__file__).parent))


def _probe(sandbox: Sandbox) -> str:
    """Why the sandbox does not work here, in a few words; empty: it does."""
    with tempfile.TemporaryDirectory(prefix="gyre-probe-") as folder:
        exit_file = os.path.join(folder, "exit.json")
        spec = keeper.Spec(
            name="probe",
            argv=(sys.executable, "-I", "-S", "-c", "import os; os.mkdir('made')"),
            cwd=folder,
            env={},
            exit_file=exit_file,
            limit_s=_PROBE_S,
        )
        confined = sandbox.apply(spec, View(writable=(Path(folder),)), fork=False)
        try:
            done = subprocess.run(
                keeper.command("-"), input=confined.to_json(), capture_output=True, text=True, timeout=_PROBE_S + 5
            )
            with open(exit_file, encoding="utf-8") as file:
                end = keeper.End.from_json(file.read())
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return str(error)
        if end.code == 0 and os.path.isdir(os.path.join(folder, "made")):
            return ""
        said = done.stderr.strip().splitlines()
        return end.error or (said[-1] if said else f"a trial run ended with {end.exit_code}")
