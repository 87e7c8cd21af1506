"""Imports point one way, and the daemon stays light (DESIGN §2)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gyre"

ALLOWED = {
    "store": {"trajectory"},
    "sched": {"store", "trajectory"},
    "trajectory": set[str](),
    "loss": set[str](),
    "proxy": {"store", "sched", "trajectory", "loss", "engine", "kv_migrate", "harness"},
    "train": {"store", "sched", "trajectory", "loss"},
    "engine": {"store", "sched", "trajectory", "loss", "kv_migrate"},
    "kv_migrate": {"store", "sched", "trajectory", "loss", "engine"},
    "harness": {"store", "sched", "trajectory", "loss"},
    "demo": {"harness", "trajectory"},
}
"""Which packages each may import, beside the modules at the top, gyre.telemetry, and the messages."""

EVERYWHERE = {"ids", "errors", "deadline", "wire", "config", "children", "credentials", "jobdir", "telemetry"}
LAZY = {("harness", "demo")}
"""Imports inside a function, for what a job file names as builtin."""

HEAVY = ("torch", "megatron", "transformers", "sglang", "tokenizers", "renderers", "openai", "numpy", "safetensors")


def imports(path: Path) -> set[tuple[str, bool]]:
    """The gyre packages that a module imports, and whether at its top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(tree.body)
    found: set[tuple[str, bool]] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "gyre" and len(parts) > 1 and not name.startswith("gyre.actors.messages"):
                found.add((parts[1], node in top))
    return found


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_stands_below_it(package: str) -> None:
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for imported, at_top in imports(path):
            if imported in {package, *EVERYWHERE, *ALLOWED[package]}:
                continue
            assert not at_top, f"{path.relative_to(PACKAGE)} imports gyre.{imported}"
            assert (package, imported) in LAZY, f"{path.relative_to(PACKAGE)} imports gyre.{imported}"


def test_nothing_below_imports_the_command_line() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name != "cli":
            assert "cli" not in {name for name, _ in imports(path)}, path


def test_gyred_loads_nothing_heavy_and_no_store_that_it_may_not_need() -> None:
    names = (*HEAVY, "sqlite3", "grpc")
    program = f"import sys, gyre.cli.gyred; print(*[name for name in {names!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert loaded.split() == []


def test_the_loss_and_the_ledger_load_no_torch() -> None:
    program = (
        "import sys, gyre.loss.advantages, gyre.loss.objectives, gyre.train.ledger, gyre.train.batch, gyre.train.snapshot; "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout.split() == ["False"]
