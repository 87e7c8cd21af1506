"""A process that test_checkpoint kills: for each line on standard input a child that writes checkpoints without end.

    python write_checkpoints.py FOLDER
    -> the child's pid, one line
    <- anything: the child is gone, start the next

The child's versions go on from the newest that it finds, so its folder must always hold one that can be gone on from.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from gyre.train.checkpoint import MODEL, Checkpoint, keep_newest, newest_fitting, read_moments, write_checkpoint

SIZE = 20_000


def state(version: int) -> Checkpoint:
    """All of version `version` has its number in it."""
    first, second, third = (torch.full((SIZE,), float(version)) for _ in range(3))
    return Checkpoint(
        version, f"digest-{version}", "layout", {"w": first}, {"exp_avg.w": second, "exp_avg_sq.w": third}
    )


def check(checkpoints_dir: Path) -> int:
    """The version gone on from, after all of it was found to be of that version; -1 when there is none."""
    found = newest_fitting((checkpoints_dir,), 10**6, "layout", lambda version: f"digest-{version}")
    if found is None:
        return -1
    index, path = found
    for tensors in (load_file(path / MODEL), read_moments(path)):
        for tensor in tensors.values():
            assert torch.equal(tensor, torch.full((SIZE,), float(index.version)))
    return index.version


def write_on(checkpoints_dir: Path) -> None:
    version = check(checkpoints_dir) + 1
    while True:
        write_checkpoint(state(version), checkpoints_dir)
        keep_newest(checkpoints_dir, 2)
        version += 1


def main() -> None:
    torch.set_num_threads(1)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                write_on(Path(sys.argv[1]))
            finally:
                os._exit(1)
        print(pid, flush=True)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
