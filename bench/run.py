"""Runs the benchmarks beside this file and prints one row a figure: `bin/bench [NAME ...] [--json]`.

A benchmark is a module `bench_*.py` with `NAMES`, the names of its rows, and `rows()`, which yields them as `Row`s.
NAME is the name of a row or of a benchmark (`trajectory` for bench_trajectory.py); without one, all run. The exit
status is 0 when all that was asked for ran, whether or not the goals hold; 1 when a benchmark failed; 2 for a name
that is not known.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, cast

from row import Row


class Benchmark(Protocol):
    NAMES: tuple[str, ...]

    def rows(self) -> Iterable[Row]: ...


@dataclass(frozen=True)
class Wanted:
    benchmark: str
    module: Benchmark
    names: frozenset[str]
    """The rows to print; a benchmark runs when there are any."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench", description="Run Gyre's benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a row or a benchmark; all when none is given")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    benchmarks = discover(Path(__file__).parent)
    known = {*benchmarks, *(name for module in benchmarks.values() for name in module.NAMES)}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        print(
            f"bench: no benchmark or row is called {unknown[0]!r}; known: {', '.join(sorted(known))}", file=sys.stderr
        )
        return 2
    failed = False
    for wanted in select(benchmarks, options.names):
        try:
            for row in wanted.module.rows():
                if row.name not in wanted.module.NAMES:
                    raise ValueError(f"row {row.name!r} is not among the NAMES of {wanted.benchmark}")
                if row.name in wanted.names:
                    print(json.dumps(asdict(row)) if options.json else table_line(row), flush=True)
        except Exception:
            failed = True
            print(f"bench: {wanted.benchmark} failed\n{traceback.format_exc()}", file=sys.stderr)
    return 1 if failed else 0


def discover(folder: Path) -> dict[str, Benchmark]:
    """The benchmarks in `folder` by name, in the order of their names."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    paths = sorted(folder.glob("bench_*.py"))
    return {path.stem.removeprefix("bench_"): cast(Benchmark, importlib.import_module(path.stem)) for path in paths}


def select(benchmarks: dict[str, Benchmark], names: Sequence[str]) -> list[Wanted]:
    """What to run for `names`: whole benchmarks, single rows, or all."""
    wanted = [
        Wanted(
            benchmark,
            module,
            frozenset(row for row in module.NAMES if not names or benchmark in names or row in names),
        )
        for benchmark, module in benchmarks.items()
    ]
    return [entry for entry in wanted if entry.names]


def table_line(row: Row) -> str:
    return f"{row.name:<34} {row.value:>12.4g} {row.unit:<8} goal {row.goal:<10} {'holds' if row.holds else 'MISSED'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
