"""Whatever a seed makes go wrong, every invariant holds at every event, and the job finishes all its steps."""

from __future__ import annotations

import pytest

from .world import find_shortest, simulate


def test_every_seed_settles(seeds: range, request: pytest.FixtureRequest) -> None:
    for seed in seeds:
        report = simulate(seed)
        if request.config.getoption("--sim-seed") is not None:
            print(report)
        if report.violation:
            pytest.fail(f"{find_shortest(report)}\n  again: bin/test --sim-seed {seed}", pytrace=False)
