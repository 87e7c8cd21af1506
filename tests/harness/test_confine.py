"""The view of a run: which mounts make it, and what is said where none can be had."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gyre
from gyre.harness import keeper
from gyre.harness.confine import (
    UNCONFINED,
    ConfinementUnavailable,
    Sandbox,
    View,
    bwrap_command,
    choose,
    mounts,
)

ANY_SPEC = keeper.Spec("r/1", ("true",), "/ws", {})


def all_exist(path: str) -> bool:
    return True


def view_of(*, writable: str, hidden: str = "/job", readable: str = "") -> dict[str, str]:
    view = View((Path(writable),), (Path(hidden),), (Path(readable),) if readable else ())
    return {path: kind for kind, path in mounts(view, exists=all_exist)}


def test_a_run_has_its_own_tmp_and_run_and_no_job_but_its_workspace() -> None:
    places = view_of(writable="/job/work/r1/1/workspace")
    assert places["/tmp"] == places["/run"] == "tmp"
    assert places["/job"] == "empty"
    assert places["/job/work/r1/1/workspace"] == "rw"


def test_what_a_harness_needs_is_seen_where_it_lies_in_a_private_folder_and_nowhere_else_mounted() -> None:
    assert "/etc/mini.yaml" not in view_of(writable="/w", readable="/etc/mini.yaml")
    assert view_of(writable="/w", readable="/tmp/clone/mini.yaml")["/tmp/clone/mini.yaml"] == "ro"
    assert view_of(writable="/w", hidden="/tasks", readable="/tasks/t1/check.py")["/tasks/t1/check.py"] == "ro"


def test_this_installation_is_seen_even_in_a_hidden_folder() -> None:
    clone = Path(gyre.__file__).parent.parent
    places = view_of(writable="/w", hidden=str(clone))
    assert places[str(clone)] == "empty"
    assert places[str(clone / "gyre")] == "ro"


def test_what_is_not_there_is_not_mounted() -> None:
    assert mounts(View((Path("/w"),), (Path("/job"),)), exists=lambda path: False) == ()


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
PATHS = st.lists(NAMES, max_size=4).map(lambda names: tuple(Path(name) for name in names))


@settings(max_examples=50)
@given(PATHS, PATHS, PATHS)
def test_mounts_come_parents_first_and_each_path_once(
    writable: tuple[Path, ...], hidden: tuple[Path, ...], readable: tuple[Path, ...]
) -> None:
    paths = [path for _, path in mounts(View(writable, hidden, readable), exists=all_exist)]
    assert len(paths) == len(set(paths))
    for index, path in enumerate(paths):
        assert not any(str(parent) in paths[index:] for parent in Path(path).parents)


@settings(max_examples=50)
@given(PATHS, PATHS, PATHS)
def test_only_what_was_asked_for_is_writable_and_all_of_it_is(
    writable: tuple[Path, ...], hidden: tuple[Path, ...], readable: tuple[Path, ...]
) -> None:
    places = mounts(View(writable, hidden, readable), exists=all_exist)
    assert {path for kind, path in places if kind == "rw"} == {str(path) for path in writable}
    assert {str(path) for path in {*hidden} - {*readable}} <= {path for kind, path in places if kind != "ro"}


def test_bubblewrap_is_asked_for_the_same_view() -> None:
    places = mounts(View((Path("/job/ws"),), (Path("/job"),), (Path("/job/in"),)), exists=all_exist)
    line = " ".join(bwrap_command("/usr/bin/bwrap", places, "/job/ws"))
    assert line.startswith("/usr/bin/bwrap ")
    for part in ("--unshare-pid", "--cap-drop ALL", "--ro-bind / /", "--proc /proc", "--dev /dev"):
        assert part in line
    order = [
        "--tmpfs /job",
        "--ro-bind /job/in /job/in",
        "--bind /job/ws /job/ws",
        "--remount-ro /job",
        "--chdir /job/ws",
    ]
    places_in_line = [line.index(part) for part in order]
    assert places_in_line == sorted(places_in_line)
    assert line.endswith(" --")


def test_unconfined_is_what_it_says() -> None:
    assert choose("unconfined") is UNCONFINED
    assert UNCONFINED.apply(ANY_SPEC, View((Path("/ws"),)), fork=True).method == "none"
    assert str(UNCONFINED) == "unconfined"


def test_a_fork_is_never_left_unconfined_where_only_programs_can_be_confined() -> None:
    with pytest.raises(ConfinementUnavailable):
        Sandbox("bwrap", None, "bwrap").apply(ANY_SPEC, View((Path("/ws"),)), fork=True)


def test_where_nothing_can_be_had_one_line_says_why_and_asks_for_unconfined() -> None:
    """In a user namespace that allows no further ones, and without bubblewrap on the path."""
    code = (
        "from gyre.harness.confine import choose, ConfinementUnavailable\n"
        "try: print(choose('auto'))\n"
        "except ConfinementUnavailable as error: print(error)\n"
    )
    unshare = shutil.which("unshare")
    assert unshare is not None
    script = 'echo 0 > /proc/sys/user/max_user_namespaces; PATH=/nowhere; exec "$@"'
    done = subprocess.run(
        [unshare, "--user", "--map-root-user", "sh", "-c", script, "sh", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(gyre.__file__).parent.parent,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done
    assert lines[0].startswith("runs cannot be confined on this machine (user namespaces: ")
    assert "bubblewrap: not installed" in lines[0]
    assert "--unconfined" in lines[0]
