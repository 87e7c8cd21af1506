"""The benchmark runner: `bench/run.py [NAME ...] [--json]`, run on benchmarks made for the test."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"

ROPE = """
from row import Row
NAMES = ("rope_m", "rope_knots")
def rows():
    yield Row("rope_m", 2.5, "m", "<= 3", True)
    yield Row("rope_knots", 7, "knots", "<= 3", False)
"""
SAND = """
from row import Row
NAMES = ("sand_kg",)
def rows():
    yield Row("sand_kg", 1.0, "kg", "any", True)
"""
BROKEN = """
NAMES = ("broken_s",)
def rows():
    raise RuntimeError("no more sand")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("run.py", "row.py"):
        shutil.copy(BENCH / name, tmp_path)
    (tmp_path / "bench_rope.py").write_text(ROPE)
    (tmp_path / "bench_sand.py").write_text(SAND)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def names(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [json.loads(line)["name"] for line in result.stdout.splitlines()]


def test_all_rows_are_printed_as_json_one_a_line(folder: Path) -> None:
    result = run(folder, "--json")
    assert result.returncode == 0
    first = json.loads(result.stdout.splitlines()[0])
    assert first == {"name": "rope_m", "value": 2.5, "unit": "m", "goal": "<= 3", "holds": True}
    assert names(result) == ["rope_m", "rope_knots", "sand_kg"]


def test_the_table_says_what_is_held_and_what_is_missed(folder: Path) -> None:
    lines = run(folder).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["rope_m", "rope_knots", "sand_kg"]
    assert [line.split()[-1] for line in lines] == ["holds", "MISSED", "holds"]


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        (["rope"], ["rope_m", "rope_knots"]),
        (["rope_knots"], ["rope_knots"]),
        (["sand", "rope_m"], ["rope_m", "sand_kg"]),
    ],
)
def test_a_name_is_a_benchmark_or_a_row(folder: Path, asked: list[str], printed: list[str]) -> None:
    assert names(run(folder, *asked, "--json")) == printed


def test_an_unknown_name_is_one_clear_line_and_status_2(folder: Path) -> None:
    result = run(folder, "nets")
    assert (result.returncode, result.stdout) == (2, "")
    expected = "bench: no benchmark or row is called 'nets'; known: rope, rope_knots, rope_m, sand, sand_kg\n"
    assert result.stderr == expected


def test_a_benchmark_that_fails_does_not_keep_the_others_from_running(folder: Path) -> None:
    (folder / "bench_broken.py").write_text(BROKEN)
    result = run(folder, "--json")
    assert result.returncode == 1
    assert names(result) == ["rope_m", "rope_knots", "sand_kg"]
    assert "bench: broken failed" in result.stderr
    assert "no more sand" in result.stderr


def test_a_row_that_its_benchmark_did_not_name_is_an_error(folder: Path) -> None:
    (folder / "bench_sand.py").write_text(SAND.replace('NAMES = ("sand_kg",)', 'NAMES = ("sand_t",)'))
    result = run(folder, "sand", "--json")
    assert (result.returncode, result.stdout) == (1, "")
    assert "row 'sand_kg' is not among the NAMES of sand" in result.stderr
