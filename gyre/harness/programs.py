"""Where an installed program lies, and what of it a run must be able to see.

A run has its own /tmp and does not see the job; a harness that was installed under one of them (a checkout in /tmp, a
cache beside the job) is shown to it nevertheless: the link it is started by, its package, and the interpreter.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

_LINE_BYTES = 256


@dataclass(frozen=True)
class Program:
    path: str
    """Absolute, or the name as it was given where PATH has no such program."""
    folders: tuple[Path, ...] = ()
    """Files and folders that it cannot run without."""


def located(name: str, path: str) -> Program:
    """The program that `name` means on the PATH `path`."""
    found = shutil.which(name, path=path)
    if found is None:
        return Program(name)
    found = os.path.abspath(found)
    real = Path(found).resolve()
    # Of a link its folder is shown: what is mounted is seen under its real name only.
    folders = [Path(found).parent if os.path.islink(found) else Path(found), _package(real)]
    interpreter = _interpreter(real, path)
    if interpreter is not None:
        folders += (interpreter, interpreter.resolve())
    return Program(found, tuple(dict.fromkeys(folders)))


def _package(real: Path) -> Path:
    """The folder that was installed with the program: npm's `node_modules`, a virtual environment, or nothing more."""
    parts = real.parts
    if "node_modules" in parts:
        return Path(*parts[: parts.index("node_modules") + 1])
    if (real.parent.parent / "pyvenv.cfg").is_file():
        return real.parent.parent
    return real


def _interpreter(real: Path, path: str) -> Path | None:
    """The program that a script names in its first line."""
    try:
        with real.open("rb") as file:
            line = file.readline(_LINE_BYTES)
    except OSError:
        return None
    if not line.startswith(b"#!"):
        return None
    words = line[2:].decode(errors="replace").split()
    names = words[1:] if words and words[0].endswith("/env") else words
    found = next((shutil.which(word, path=path) for word in names if not word.startswith("-")), None)
    return Path(found) if found else None
