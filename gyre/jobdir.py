"""Where a job keeps its things on one node: every path in one place.

Everything durable is under the job's folder. Sockets live in a short private folder under the temporary directory,
since the kernel bounds the length of a socket's path. The optimizer's state on its way to disk, and snapshots of other
nodes, are in folders of shared memory, which outlives a process and not the machine.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import BadInput

_SHARED_MEMORY = Path("/dev/shm")


def key_for(secret: str, use: str) -> str:
    """What is shown over plain HTTP in the secret's place, for one use: the secret cannot be had from it."""
    return hmac.digest(secret.encode(), use.encode(), hashlib.sha256).hex()


def make_private(path: Path) -> None:
    """Make the folder, which nobody else may read or write. Raises BadInput when it is there and is not so."""
    path.mkdir(mode=0o700, exist_ok=True)
    if not is_private(path):
        raise BadInput("private folder", str(path), "it must be a folder of this user's with mode 0700")


def is_private(path: Path) -> bool:
    """Whether the folder is there, is this user's, and nobody else's."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077


def _clear(path: Path) -> None:
    if is_private(path):
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class JobDir:
    root: Path

    @property
    def job_file(self) -> Path:
        return self.root / "job.json"

    @property
    def node_file(self) -> Path:
        return self.root / "node.toml"

    @property
    def store(self) -> Path:
        return self.root / "store.db"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def copies(self) -> Path:
        """Of other nodes' journals and trajectories."""
        return self.root / "copies"

    @property
    def trajectories(self) -> Path:
        return self.root / "trajectories"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def runs(self) -> Path:
        """One folder a run: its workspace, its home, its log, what the node must know to adopt it."""
        return self.root / "work"

    @property
    def gyred_file(self) -> Path:
        """Which process is the job's gyred; it is gone after a clean end."""
        return self.state / "gyred.json"

    @property
    def report_html(self) -> Path:
        return self.root / "report.html"

    @property
    def report_json(self) -> Path:
        return self.root / "report.json"

    @property
    def secret_file(self) -> Path:
        return self.state / "secret"

    @property
    def sockets(self) -> Path:
        return Path(tempfile.gettempdir()) / self._short_name

    @property
    def staging(self) -> Path:
        """Checkpoints in shared memory: made by the core's replica, and gone after a clean end."""
        return _SHARED_MEMORY / self._short_name

    @property
    def snapshots_in_memory(self) -> Path:
        """Copies of what other nodes hold (gyre.actors.snapshot_folders), and gone after a clean end."""
        return _SHARED_MEMORY / f"{self._short_name}-snapshots"

    @property
    def _short_name(self) -> str:
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return f"gyre-{os.getuid()}-{digest}"

    def clear_staging(self) -> None:
        """Forget what a killed replica has staged: no job goes on from it."""
        _clear(self.staging)

    def clear_snapshots_in_memory(self) -> None:
        """What an engine has mapped of them stays with it."""
        _clear(self.snapshots_in_memory)

    def address(self, name: str) -> str:
        """The remote address of the actor `name` on this node."""
        return f"unix:{self.sockets / name}.sock"

    def secret(self) -> str:
        """The node's shared secret: what a local caller must show to reach its actors."""
        try:
            return self.secret_file.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise BadInput(
                "job folder", str(self.root), f"its {self.secret_file.name} cannot be read ({error})"
            ) from error

    def create(self) -> None:
        """Make every folder, and the secret once. Raises BadInput when the folder cannot be written."""
        try:
            for folder in (self.root, self.logs, self.journal, self.trajectories, self.snapshots, self.runs):
                folder.mkdir(parents=True, exist_ok=True)
            self.state.mkdir(mode=0o700, exist_ok=True)
            if not self.secret_file.exists():
                self.keep_secret(secrets.token_hex(32))
        except OSError as error:
            raise BadInput(
                "job.dir", str(self.root), f"it must be a folder that can be written ({error.strerror})"
            ) from error
        make_private(self.sockets)

    def keep_secret(self, secret: str) -> None:
        """Have this secret from now on, whole or not at all."""
        fresh = self.secret_file.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            file.write(secret)
        fresh.replace(self.secret_file)
