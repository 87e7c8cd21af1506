"""An installed program is found with all that it needs, wherever it lies, and its run sees that."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.children import Children
from gyre.harness.launch import Launcher
from gyre.harness.profiles import Launch, LaunchContext, Settings, profile
from gyre.harness.programs import Program, located

from .conftest import Bench
from .test_launch import SANDBOX


def make_program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def npm_package(root: Path, text: str) -> Path:
    """A program as npm installs it; returns the folder of its link."""
    real = make_program(root / "node_modules" / "@some" / "harness" / "bin" / "harness.js", text)
    link = root / "node_modules" / ".bin" / "harness"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(real, link.parent))
    return link.parent


def test_a_program_that_path_does_not_have_is_left_as_it_is(tmp_path: Path) -> None:
    assert located("no-such-harness", str(tmp_path)) == Program("no-such-harness")


def test_of_an_npm_package_all_that_was_installed_with_it_is_needed(tmp_path: Path) -> None:
    folder = npm_package(tmp_path, "#!/usr/bin/env some-node\n")
    node = make_program(tmp_path / "node" / "some-node")
    found = located("harness", f"{folder}:{node.parent}")
    assert found.path == str(folder / "harness")
    assert set(found.folders) == {folder, tmp_path / "node_modules", node}


def test_of_a_program_in_a_virtual_environment_the_environment_is_needed(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    python = make_program(tmp_path / "venv" / "bin" / "python", "binary")
    program = make_program(tmp_path / "venv" / "bin" / "tool", f"#!{python} -I\n")
    found = located("tool", str(program.parent))
    assert set(found.folders) == {program, tmp_path / "venv", python}


def test_a_program_that_stands_alone_needs_itself(tmp_path: Path) -> None:
    program = make_program(tmp_path / "tool", "binary")
    assert located(str(program), "").folders == (program,)


@pytest.mark.parametrize("place", ["in the job's folder", "in /tmp"])
async def test_a_harness_that_lies_in_a_hidden_place_runs(bench: Bench, tmp_path: Path, place: str) -> None:
    root = bench.job / "installed" if place == "in the job's folder" else tmp_path / "installed"
    folder = npm_package(root, '#!/bin/sh\ncat "$(dirname "$(readlink -f "$0")")/data" > made\n')
    (root / "node_modules" / "@some" / "harness" / "bin" / "data").write_text("of the package")

    def launch(context: LaunchContext) -> Launch:
        env = context.environment()
        return Launch(("harness",), (), {**env, "PATH": f"{folder}:{env['PATH']}"})

    state = bench.job / "state"
    some = replace(profile("command"), launch=launch)
    launcher = Launcher(Children(state), state, some, Settings(), SANDBOX, hidden=(bench.job,))
    run = bench.prepared("r1")
    async with asyncio.timeout(60):
        end = await (await launcher.start(run, "http://127.0.0.1:1", "go")).wait()
    assert end is not None
    assert end.code == 0, run.log.read_text()
    assert (run.workspace / "made").read_text() == "of the package"


async def test_a_harness_that_is_not_there_is_a_failure_of_ours_in_one_line(bench: Bench) -> None:
    state = bench.job / "state"
    settings = Settings(command=("no-such-harness", "{instruction}"))
    launcher = Launcher(Children(state), state, profile("command"), settings, SANDBOX, hidden=(bench.job,))
    run = bench.prepared("r1")
    async with asyncio.timeout(60):
        end = await (await launcher.start(run, "http://127.0.0.1:1", "go")).wait()
    assert end is not None
    assert "cannot run no-such-harness: No such file or directory" in end.failure
