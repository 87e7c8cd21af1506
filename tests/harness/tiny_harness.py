"""A harness for the zygote's tests: `main` is its console script. Its argument is Python code, run in the workspace."""

from __future__ import annotations

import sys

IMPORTED: list[str] = ["once"]


def main() -> None:
    exec(sys.argv[1], {"IMPORTED": IMPORTED})
