"""The keeper: what it writes down, how it ends a run, and that a run never outlives it. With and without confinement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gyre.harness import keeper
from gyre.harness.confine import UNCONFINED, Sandbox

from .conftest import Bench, processes, python, until

IGNORES_SIGTERM = python(
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('ready', 'w'); time.sleep(600)"
)
# In short naps: a signal that comes just before a nap waits for its end, and one in an object's finalizer is swallowed.
ENDS_WELL_ON_SIGTERM = python(
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    "os.mkdir('ready')\n"
    "while True: time.sleep(0.05)"
)


def test_the_exit_file_has_the_harness_exit_code(bench: Bench, sandbox: Sandbox) -> None:
    assert bench.run(bench.prepared("r1"), sandbox, "sh", "-c", "exit 3") == keeper.End(code=3)
    assert bench.run(bench.prepared("r2"), sandbox, "true") == keeper.End(code=0)


def test_a_harness_that_dies_by_a_signal_is_told_from_one_that_exits(bench: Bench) -> None:
    for sandbox in (UNCONFINED, Sandbox("namespaces", None)):
        folder = bench.prepared(f"r-{sandbox.programs}")
        assert bench.run(folder, sandbox, "sh", "-c", "kill -SEGV $$") == keeper.End(signal=signal.SIGSEGV)


def test_a_harness_that_its_own_run_kills_was_not_killed_for_want_of_memory(bench: Bench, sandbox: Sandbox) -> None:
    end = bench.run(bench.prepared("r1"), sandbox, "sh", "-c", "kill -KILL $$")
    assert (end.signal or (end.code or 0) - 128, end.starved) == (signal.SIGKILL, False)


def test_the_keepers_own_exit_code_is_the_harness(bench: Bench, sandbox: Sandbox) -> None:
    assert bench.keep(bench.prepared("r1"), sandbox, "sh", "-c", "exit 3").wait(timeout=30) == 3


def test_what_the_harness_prints_is_in_its_log(bench: Bench, sandbox: Sandbox) -> None:
    folder = bench.prepared("r1")
    bench.run(folder, sandbox, "sh", "-c", "echo out; echo err >&2; cat")
    assert folder.log.read_text() == "out\nerr\n"


def test_the_environment_is_what_the_spec_says_and_nothing_inherited(bench: Bench, sandbox: Sandbox) -> None:
    os.environ["SECRET_OF_THE_NODE"] = "hush"
    try:
        said = bench.shell(bench.prepared("r1"), sandbox, "env")
    finally:
        del os.environ["SECRET_OF_THE_NODE"]
    names = {line.partition("=")[0] for line in said.splitlines()}
    assert names <= {"PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "_", keeper.MARK}


def test_no_descriptor_of_the_keeper_reaches_the_harness(bench: Bench, sandbox: Sandbox) -> None:
    said = bench.shell(bench.prepared("r1"), sandbox, "ls /proc/self/fd")
    assert said.split() == ["0", "1", "2", "3"]  # the last is that of ls, on the folder it lists


def test_a_program_that_is_not_there_is_an_error_and_no_exit_code(bench: Bench) -> None:
    for sandbox in (UNCONFINED, Sandbox("namespaces", None)):
        folder = bench.prepared(f"r-{sandbox.programs}")
        end = bench.run(folder, sandbox, "/no/such/harness")
        assert end.error == "[Errno 2] cannot run /no/such/harness: No such file or directory"
        assert end.code is None


def test_a_workspace_that_is_gone_is_an_error(bench: Bench) -> None:
    folder = bench.prepared("r1")
    end = bench.run(folder, UNCONFINED, "true", cwd=str(folder.root / "gone"))
    assert "No such file or directory" in end.error


def test_whatever_keeps_a_harness_from_starting_is_said(bench: Bench) -> None:
    for sandbox in (UNCONFINED, Sandbox("namespaces", None)):
        folder = bench.prepared(f"r-{sandbox.programs}")
        end = bench.run(folder, sandbox, "true", env={"": "x", "PATH": os.environ["PATH"]})
        assert end.exit_code == keeper.SETUP_FAILED
        assert end.error
        end = bench.run(bench.prepared(f"n-{sandbox.programs}"), sandbox, "true", "a\0b")
        assert end.error == "ValueError: embedded null byte"


def test_a_log_that_cannot_be_written_is_an_error(bench: Bench) -> None:
    folder = bench.prepared("r1")
    end = bench.run(folder, UNCONFINED, "true", log=str(folder.workspace))
    assert "Is a directory" in end.error


def test_the_record_names_the_keeper_before_the_harness_runs(bench: Bench, sandbox: Sandbox) -> None:
    folder = bench.prepared("r1")
    process = bench.keep(folder, sandbox, "sleep", "600")
    until(folder.process_file.exists)
    record = json.loads(folder.process_file.read_text())
    assert record == {"pid": process.pid, "start_ticks": keeper.start_ticks(process.pid)}


def test_the_first_sigterm_is_passed_on(bench: Bench) -> None:
    for sandbox in (UNCONFINED, Sandbox("namespaces", None)):
        folder = bench.prepared(f"r-{sandbox.programs}")
        process = bench.keep(folder, sandbox, *ENDS_WELL_ON_SIGTERM)
        until((folder.workspace / "ready").exists)
        process.terminate()
        assert process.wait(timeout=30) == 7


def test_the_second_sigterm_ends_a_harness_that_ignores_the_first(bench: Bench, sandbox: Sandbox) -> None:
    folder = bench.prepared("r1")
    process = bench.keep(folder, sandbox, *IGNORES_SIGTERM)
    until((folder.workspace / "ready").exists)
    process.terminate()
    if sandbox.programs != "bwrap":  # bubblewrap passes nothing on: it ends its run
        time.sleep(0.2)
        assert process.poll() is None
        process.terminate()
    assert process.wait(timeout=30) != 0
    assert not processes(str(folder.workspace))


def test_a_limit_ends_the_run_without_anybody_asking(bench: Bench, sandbox: Sandbox) -> None:
    folder = bench.prepared("r1")
    marker = f"63{os.getpid()}"
    end = bench.run(folder, sandbox, "sh", "-c", f"setsid -f sleep {marker}; exec sleep {marker}", limit_s=0.5)
    assert end.limit_reached
    assert not processes(f"sleep {marker}")


def test_a_run_does_not_outlive_a_killed_keeper(bench: Bench, sandbox: Sandbox) -> None:
    folder = bench.prepared("r1")
    marker = f"64{os.getpid()}"
    process = bench.keep(folder, sandbox, "sh", "-c", f"touch ready; sleep {marker} & exec sleep {marker}")
    until(lambda: len(processes(f"sleep {marker}")) >= 2)
    process.kill()
    process.wait(timeout=30)
    assert not folder.exit_file.exists()
    if sandbox is UNCONFINED:  # its own child dies with it; the others are found by their mark
        keeper.end_marked(folder.mark)
    until(lambda: not processes(f"sleep {marker}"))


def test_orphans_of_a_run_are_reaped(bench: Bench) -> None:
    folder = bench.prepared("r1")
    script = "for i in 1 2 3 4 5; do (sleep 0.01 &) ; done; sleep 0.3; grep -l '^State:.Z' /proc/[0-9]*/status"
    assert bench.shell(folder, Sandbox("namespaces", None), script) == ""


def test_marks_reach_only_the_run_they_name(bench: Bench) -> None:
    first, second = bench.prepared("r1"), bench.prepared("r10")
    kept = [bench.keep(folder, UNCONFINED, "sleep", "67") for folder in (first, second)]
    until(lambda: len(processes("sleep 67")) == 2)
    keeper.end_marked(first.mark)
    assert kept[0].wait(timeout=30) == 128 + signal.SIGKILL
    assert kept[1].poll() is None


def test_a_keeper_goes_on_without_whoever_started_it(bench: Bench, sandbox: Sandbox) -> None:
    """The starter is killed, and its process group with it; the run ends later by itself and its end is on disk."""
    folder = bench.prepared("r1")
    code = f"""
import sys, time
from pathlib import Path
sys.path[:0] = {[str(Path(__file__).parent.parent), *sys.path]!r}
from harness.conftest import Bench, Sandbox
bench = Bench(Path({str(bench.job)!r}))
bench.keep(bench.folder("r1"), {sandbox!r}, "sh", "-c", "until test -e go; do sleep 0.05; done; exit 4")
time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        until(folder.process_file.exists)
    finally:
        os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
    (folder.workspace / "go").touch()
    until(folder.exit_file.exists)
    assert keeper.End.from_json(folder.exit_file.read_text()).code == 4
