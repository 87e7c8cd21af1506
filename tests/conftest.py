"""Options of the whole suite, and the etcd servers that tests of several packages share."""

from __future__ import annotations

import pytest

pytest_plugins = ("cluster.fixtures",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--interop", action="store_true", help="drive all five harnesses in tests/interop, not only three")
    parser.addoption("--sim", type=int, default=1000, metavar="N", help="play N seeds of the simulation in tests/sim")
    parser.addoption("--sim-seed", type=int, metavar="SEED", help="play this seed of the simulation and say all of it")
