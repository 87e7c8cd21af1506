"""How long a replica of one rank, and of two, takes to read its weights out of a snapshot of 100 MB.

A snapshot is in Hugging Face's layout, whatever ranks will read it: each takes its rows or columns of every weight. Beside
that, a file of the rank's own memory as it is, which no layout has to be minded for. Both are checked by chunk, read from
the page cache, and written to memory that was given back. All take turns; a figure is of the quickest of each.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from row import Row
from switch_parts import write_model

from gyre.train.snapshot import make_first_snapshot

POLICY = Path(__file__).parents[1] / "gyre" / "demo" / "policy"
MODEL = 512, 8
"""Hidden size and layers: that of the role switch's benchmark."""
TURNS = 15
RANKS = (1, 2)

NAMES = tuple(
    f"ranks_{count}_{figure}" for count in RANKS for figure in ("load_over_copy", "load_over_shard", "cpu_over_shard")
)


def rows() -> Iterable[Row]:
    with TemporaryDirectory(prefix="gyre-bench-") as folder:
        place = Path(folder)
        shutil.copytree(POLICY, place / "model")
        write_model(place / "model", *MODEL, 1024)
        snapshot, _ = make_first_snapshot(place / "model", place / "snapshots")
        for count in RANKS:
            found = measured(place, snapshot, count)
            ratios = {
                "load_over_copy": found["load"][0] / found["copy"][0],
                "load_over_shard": found["load"][0] / found["shard"][0],
                "cpu_over_shard": found["load"][1] / found["shard"][1],
            }
            for name, value in ratios.items():
                yield Row(f"ranks_{count}_{name}", value, "x", "none", True)


def measured(place: Path, snapshot: Path, count: int) -> dict[str, tuple[float, float]]:
    """Seconds until all ranks have done it, and processor seconds of the busiest, by what it is. One rank copies."""
    with ExitStack() as stack:
        meeting = str(place / f"meeting-{count}")
        ranks = [start(stack, rank, count, meeting, place, snapshot) for rank in range(count)]
        for rank in ranks:
            answer(rank)
        took: dict[str, tuple[float, float]] = {}
        for _ in range(TURNS):
            for what in ("load", "shard", "copy"):
                asked = ranks[:1] if what == "copy" else ranks
                for rank in asked:
                    assert rank.stdin is not None
                    print(what, file=rank.stdin, flush=True)
                found = [answer(rank) for rank in asked]
                slowest = max(seconds for seconds, _ in found), max(cpu_s for _, cpu_s in found)
                before = took.get(what, slowest)
                took[what] = min(before[0], slowest[0]), min(before[1], slowest[1])
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.close()
    return took


def start(stack: ExitStack, rank: int, count: int, meeting: str, place: Path, snapshot: Path) -> subprocess.Popen[str]:
    program = str(Path(__file__).with_name("rank_process.py"))
    argv: Sequence[str] = (
        *(sys.executable, program, str(rank), str(count), meeting),
        *(str(place / "model"), str(snapshot), str(place)),
    )
    return stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))


def answer(rank: subprocess.Popen[str]) -> tuple[float, float]:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        raise RuntimeError("a rank has ended")
    return json.loads(line)
