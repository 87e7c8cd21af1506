"""The Transfer Engine for the tests, in `.cache` of the checkout (or below GYRE_CACHE): nothing of the system or of the environment is changed.

The wheel is unpacked beside the environment, and Debian's libibverbs1, which it needs, beside that. Both are found by the
child processes alone, by their environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from gyre.kv_migrate.choice import mooncake_fault

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
PLACE = Path(os.environ.get("GYRE_CACHE") or Path(__file__).parents[2] / ".cache") / "mooncake-0.3.13.post1"
LIMIT_S = 300.0


@cache
def why_not() -> str:
    """Makes it usable by child processes; or says why it cannot be had here."""
    if not mooncake_fault():
        return ""
    try:
        if not PLACE.exists():
            _fetch(PLACE.with_name(f".{PLACE.name}-{os.getpid()}"))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"mooncake is not here and cannot be fetched: {str(said).strip().splitlines()[-1]}"
    _put_first("PYTHONPATH", PLACE / "site")
    for folder in ("usr/lib", "lib"):
        _put_first("LD_LIBRARY_PATH", PLACE / "root" / folder / "x86_64-linux-gnu")
    return mooncake_fault()


def _fetch(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)
    (part / "packages").mkdir(parents=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--retries", "1")
    _run(*pip, "--no-deps", "--target", str(part / "site"), WHEEL, cwd=part)
    try:
        _run("apt-get", "download", *PACKAGES, cwd=part / "packages")
    except subprocess.CalledProcessError:
        _run("apt-get", "update", cwd=part)
        _run("apt-get", "download", *PACKAGES, cwd=part / "packages")
    for package in sorted((part / "packages").glob("*.deb")):
        _run("dpkg-deb", "-x", str(package), str(part / "root"), cwd=part)
    if not PLACE.exists():  # another run may have been quicker
        part.rename(PLACE)
    shutil.rmtree(part, ignore_errors=True)


def _run(*argv: str, cwd: Path) -> None:
    subprocess.run(argv, cwd=cwd, check=True, capture_output=True, text=True, timeout=LIMIT_S)


def _put_first(variable: str, folder: Path) -> None:
    before = os.environ.get(variable)
    os.environ[variable] = str(folder) if not before else f"{folder}{os.pathsep}{before}"
