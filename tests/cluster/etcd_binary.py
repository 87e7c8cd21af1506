"""etcd, etcdctl and etcdutl: the newest that Debian offers, unpacked into the project's cache and installed nowhere.

    python3 tests/cluster/etcd_binary.py      # bin/etcd-env: fetches them, and prints the folder that they are in

apt is asked with lists and settings of its own, so the system's stay as they are; the mirror is the one that the system
uses. Suites are tried from the newest on; one is passed over when it cannot be reached or its server does not run here.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("GYRE_CACHE", Path(__file__).resolve().parents[2] / ".cache"))
_SUITES = ("sid", "testing", "stable")
_KEYRINGS = ("debian-archive-keyring.gpg", "debian-archive-keyring.pgp")
_PACKAGES = ("etcd-server", "etcd-client")
_COMMAND_S = 240


@dataclass(frozen=True)
class EtcdBinary:
    path: Path
    version: str
    """For example `3.5.30`."""


def etcd_binary() -> EtcdBinary:
    """The server in the cache, its tools beside it; fetched when they are not there. Of many processes that ask, one fetches."""
    CACHE.mkdir(parents=True, exist_ok=True)
    home = CACHE / "etcd"
    with (CACHE / "etcd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = home / "usr/bin/etcd"
        if not all((home / "usr/bin" / name).exists() for name in ("etcd", "etcdctl", "etcdutl")):
            _fetch(home)
        return EtcdBinary(server, _version(server))


def _fetch(home: Path) -> None:
    mirror, failures = _mirror(), list[str]()
    for suite in _SUITES:
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            work = Path(folder)
            try:
                _unpack(mirror, suite, work)
                _version(work / "root/usr/bin/etcd")
            except (OSError, subprocess.SubprocessError) as error:
                failures.append(f"{suite}: {getattr(error, 'stderr', None) or error}")
                continue
            shutil.rmtree(home, ignore_errors=True)
            (work / "root").rename(home)
            return
    raise RuntimeError("no etcd server could be had from Debian's packages\n" + "\n".join(failures))


def _mirror() -> str:
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)"], check=True, capture_output=True, text=True
    )
    for uri in targets.stdout.split():
        if re.search(r"/debian/?$", uri):
            return uri
    raise RuntimeError("apt names no Debian mirror among its sources")


def _unpack(mirror: str, suite: str, work: Path) -> None:
    keyring = next((path for name in _KEYRINGS if (path := Path("/usr/share/keyrings") / name).exists()), None)
    signed = f"[signed-by={keyring}] " if keyring else ""
    (work / "sources.list").write_text(f"deb {signed}{mirror} {suite} main\n")
    (work / "status").touch()
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    settings = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": 2,
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    _run(["apt-get", *options, "--error-on=any", "update"], work)
    _run(["apt-get", *options, "download", *_PACKAGES], work)
    for name in _PACKAGES:
        (package,) = work.glob(f"{name}_*.deb")
        _run(["dpkg-deb", "-x", str(package), str(work / "root")], work)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_COMMAND_S)


def _version(server: Path) -> str:
    shown = subprocess.run([server, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"etcd Version: (\S+)", shown)
    if found is None:
        raise OSError(f"{server} does not tell its version: {shown!r}")
    return found[1]


if __name__ == "__main__":
    print(etcd_binary().path.parent)
