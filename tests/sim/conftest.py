"""`bin/test --sim 100000` plays so many seeds; `bin/test --sim-seed 42` plays one and says all of it."""

from __future__ import annotations

import pytest

PART = 50


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    one, count = metafunc.config.getoption("--sim-seed"), metafunc.config.getoption("--sim")
    first, end = (0, count) if one is None else (one, one + 1)
    parts = [range(start, min(start + PART, end)) for start in range(first, end, PART)]
    metafunc.parametrize("seeds", parts, ids=[f"{part.start}-{part.stop - 1}" for part in parts])
