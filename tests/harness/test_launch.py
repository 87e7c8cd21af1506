"""Launching harnesses: by exec and by the zygote's fork; adoption after kill -9 of the starter; nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import gyre
from gyre.children import Children
from gyre.harness.confine import UNCONFINED, ConfinementUnavailable, Sandbox, choose
from gyre.harness.launch import HarnessExit, Launcher
from gyre.harness.profiles import ForkServer, Launch, LaunchContext, Profile, Settings, profile
from gyre.harness.workspace import RunFolder

from .chat_server import chat_server
from .conftest import Bench, a_task, processes, until

HERE = Path(__file__).parent


def tiny_profile(fork: bool, preload: Path) -> Profile:
    """The instruction is Python code, run by tests/harness/tiny_harness.py."""

    def launch(context: LaunchContext) -> Launch:
        # Its text and not its file: a run does not see this folder when the checkout is under /tmp.
        program = (sys.executable, "-c", f"{(HERE / 'tiny_harness.py').read_text()}\n\nmain()")
        return Launch(program, (context.instruction,), context.environment(URL=context.base_url))

    preload.write_text('{"modules": ["json", "no.such.module"], "models": ["no.such:Model", "json:NoModel"]}')
    server = ForkServer("tiny_harness:main", preload, {"PYTHONPATH": f"{HERE}:{Path(gyre.__file__).parent.parent}"})
    return Profile("tiny", launch, lambda folder: None, fork_server=server if fork else None)


def best_sandbox() -> Sandbox:
    try:
        return choose("auto")
    except ConfinementUnavailable:
        return UNCONFINED


SANDBOX = best_sandbox()
MakeLauncher = Callable[[], Launcher]


@pytest.fixture(params=["exec", "fork"])
async def make_launcher(request: pytest.FixtureRequest, bench: Bench, tmp_path: Path) -> AsyncIterator[MakeLauncher]:
    """Makes launchers on one state directory, as one gyred after another does."""
    tiny = tiny_profile(request.param == "fork", tmp_path / "preload.json")
    state = bench.job / "state"
    yield lambda: Launcher(Children(state), state, tiny, Settings(), SANDBOX, hidden=(bench.job,))
    await Children(state).end_all(grace_s=2)


@pytest.fixture
def launcher(make_launcher: MakeLauncher) -> Launcher:
    return make_launcher()


def zygote_pid(bench: Bench) -> int:
    return Children(bench.job / "state").adopt()["zygote-tiny"].pid


async def end_of(launcher: Launcher, folder: RunFolder, code: str) -> object:
    process = await launcher.start(folder, "http://127.0.0.1:1/run/r1/key", code)
    end = await process.wait(60)
    assert end is not None, folder.log.read_text()
    return end


async def test_a_harness_works_in_its_workspace_with_its_own_environment_and_log(
    bench: Bench, launcher: Launcher
) -> None:
    folder = bench.prepared("r1")
    code = "import os, json; json.dump({**os.environ, 'cwd': os.getcwd()}, open('env', 'w')); print('hello'); exit(3)"
    os.environ["SECRET_OF_THE_NODE"] = "hush"
    try:
        process = await launcher.start(folder, "http://127.0.0.1:1/run/r1/key", code)
        end = await process.wait(60)
    finally:
        del os.environ["SECRET_OF_THE_NODE"]
    assert end is not None
    assert (end.code, end.signal, end.failure) == (3, None, "")
    seen = json.loads((folder.workspace / "env").read_text())
    assert seen["cwd"] == str(folder.workspace)
    assert seen["HOME"] == str(folder.home)
    assert seen["URL"] == "http://127.0.0.1:1/run/r1/key"
    assert seen["GYRE_RUN"] == folder.mark
    assert "SECRET_OF_THE_NODE" not in seen
    assert folder.log.read_text() == "hello\n"


async def test_runs_do_not_see_what_others_changed_in_the_interpreter(bench: Bench, launcher: Launcher) -> None:
    for run in ("r1", "r2"):
        folder = bench.prepared(run)
        await end_of(
            launcher,
            folder,
            "print(len(IMPORTED), flush=True); IMPORTED.append('more'); import os; os.environ['X']='1'",
        )
        assert folder.log.read_text() == "1\n"


async def test_a_harness_that_raises_ends_with_1_and_its_traceback_in_the_log(bench: Bench, launcher: Launcher) -> None:
    folder = bench.prepared("r1")
    end = await end_of(launcher, folder, "raise OSError('broken harness')")
    assert end.code == 1
    assert end.failure == ""
    assert "OSError: broken harness" in folder.log.read_text()


async def test_wait_says_none_while_the_harness_runs_and_end_ends_it(bench: Bench, launcher: Launcher) -> None:
    folder = bench.prepared("r1")
    process = await launcher.start(folder, "", "import time; time.sleep(600)")
    assert await process.wait(0.2) is None
    assert process.alive
    end = await process.end(grace_s=5)
    assert not process.alive
    assert end.signal == signal.SIGTERM
    assert end.failure == ""


async def test_end_ends_a_harness_that_ignores_sigterm_and_all_that_left_its_session(
    bench: Bench, launcher: Launcher
) -> None:
    folder = bench.prepared("r1")
    marker = f"68{os.getpid()}"
    code = f"""
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(['sleep', '{marker}'], start_new_session=True)
subprocess.Popen(['setsid', '-f', 'sleep', '{marker}']).wait()
open('ready', 'w')
time.sleep(600)
"""
    process = await launcher.start(folder, "", code)
    await asyncio.to_thread(until, (folder.workspace / "ready").exists)
    await process.end(grace_s=0.3)
    assert not process.alive
    assert not processes(f"sleep {marker}")


async def test_a_harness_whose_keeper_is_killed_is_lost_and_nobody_else_is_hurt(
    bench: Bench, launcher: Launcher
) -> None:
    first, second = bench.prepared("r1"), bench.prepared("r2")
    code = "import time, subprocess; open('ready', 'w'); subprocess.Popen(['sleep', '600']); time.sleep(600)"
    doomed, other = [await launcher.start(folder, "", code) for folder in (first, second)]
    await asyncio.to_thread(until, lambda: (first.workspace / "ready").exists())
    doomed.ref.signal(signal.SIGKILL)
    end = await doomed.wait(30)
    assert end is not None
    assert end.failure == "the harness was killed from outside"
    assert other.alive
    await other.end(grace_s=5)


async def test_starting_an_attempt_that_lives_starts_nothing(bench: Bench, launcher: Launcher) -> None:
    folder = bench.prepared("r1")
    code = "open('starts', 'a').write('x'); import time; time.sleep(600)"
    first = await launcher.start(folder, "", code)
    await asyncio.to_thread(until, (folder.workspace / "starts").exists)
    again = await launcher.start(folder, "", code)
    assert again.ref == first.ref
    await again.end(grace_s=5)
    assert (folder.workspace / "starts").read_text() == "x"


async def test_a_new_launcher_adopts_what_the_last_one_started(bench: Bench, make_launcher: MakeLauncher) -> None:
    alive, ended = bench.prepared("r1"), bench.prepared("r2")
    first = make_launcher()
    started = await first.start(
        alive, "", "import time\nwhile not __import__('os').path.exists('go'): time.sleep(0.05)\nexit(4)"
    )
    await end_of(first, ended, "exit(5)")

    second = make_launcher()
    adopted = second.adopt(alive)
    assert adopted is not None
    assert adopted.ref == started.ref
    assert adopted.alive
    (alive.workspace / "go").touch()
    end = await adopted.wait(30)
    assert end is not None
    assert end.code == 4
    over = second.adopt(ended)
    assert over is not None
    end = await over.wait(0)
    assert end is not None
    assert end.code == 5
    assert second.adopt(bench.folder("r3")) is None


@pytest.mark.parametrize("fork", [False, True])
async def test_kill_9_of_the_starter_is_not_noticed_by_its_runs(bench: Bench, tmp_path: Path, fork: bool) -> None:
    """A process that launches a run is killed; the next one adopts the run, learns its end, and can launch more."""
    folder, state = bench.prepared("r1"), bench.job / "state"
    starter = f"""
import asyncio, sys, time
sys.path[:0] = {[str(HERE.parent), *sys.path]!r}
from pathlib import Path
from harness.conftest import Bench
from harness.test_launch import SANDBOX, Children, Launcher, Settings, tiny_profile
async def main():
    bench, state = Bench(Path({str(bench.job)!r})), Path({str(state)!r})
    tiny = tiny_profile({fork}, Path({str(tmp_path / "preload.json")!r}))
    launcher = Launcher(Children(state), state, tiny, Settings(), SANDBOX, hidden=(bench.job,))
    code = "import os, time\\nwhile not os.path.exists('go'): time.sleep(0.05)\\nexit(6)"
    await launcher.start(bench.folder("r1"), "", code)
    Path({str(tmp_path / "started")!r}).touch()
    time.sleep(600)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", starter], start_new_session=True)
    try:
        await asyncio.to_thread(until, (tmp_path / "started").exists, 60)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    try:
        tiny = tiny_profile(fork, tmp_path / "preload.json")
        launcher = Launcher(Children(state), state, tiny, Settings(), SANDBOX, hidden=(bench.job,))
        adopted = launcher.adopt(folder)
        assert adopted is not None
        assert adopted.alive
        before = zygote_pid(bench) if fork else None
        assert (await end_of(launcher, bench.prepared("r2"), "exit(0)")).code == 0
        assert (zygote_pid(bench) if fork else None) == before
        (folder.workspace / "go").touch()
        end = await adopted.wait(30)
        assert end is not None
        assert end.code == 6
    finally:
        await Children(state).end_all(grace_s=2)


# ------------------------------------------------------------------------------------------- the zygote


@pytest.fixture
async def forking(bench: Bench, tmp_path: Path) -> AsyncIterator[Launcher]:
    state = bench.job / "state"
    tiny = tiny_profile(True, tmp_path / "preload.json")
    yield Launcher(Children(state), state, tiny, Settings(), SANDBOX, hidden=(bench.job,))
    await Children(state).end_all(grace_s=2)


async def test_a_zygote_that_dies_takes_no_run_with_it_and_is_started_anew(bench: Bench, forking: Launcher) -> None:
    folder = bench.prepared("r1")
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\nexit(7)"
    process = await forking.start(folder, "", code)
    first = zygote_pid(bench)
    os.kill(first, signal.SIGKILL)
    assert (await end_of(forking, bench.prepared("r2"), "exit(8)")).code == 8
    assert zygote_pid(bench) != first
    assert process.alive
    (folder.workspace / "go").touch()
    end = await process.wait(30)
    assert end is not None
    assert end.code == 7


async def test_many_runs_start_at_once(bench: Bench, forking: Launcher) -> None:
    folders = [bench.prepared(f"r{index}") for index in range(12)]
    ends = await asyncio.gather(*(end_of(forking, folder, f"exit({i})") for i, folder in enumerate(folders)))
    assert [end.code for end in ends] == list(range(12))


async def test_a_zygote_that_cannot_import_its_harness_is_one_clear_line(bench: Bench, tmp_path: Path) -> None:
    from dataclasses import replace

    from gyre.errors import Unavailable

    state = bench.job / "state"
    tiny = tiny_profile(True, tmp_path / "preload.json")
    assert tiny.fork_server is not None
    broken = replace(tiny, fork_server=replace(tiny.fork_server, entry_point="no_such_harness:main"))
    launcher = Launcher(Children(state), state, broken, Settings(), SANDBOX)
    with pytest.raises(Unavailable, match=r"zygote-tiny ended while it started \(exit code 1\): ModuleNotFoundError"):
        await launcher.warm()
    await Children(state).end_all(grace_s=2)


async def test_the_zygotes_socket_is_for_its_user_alone_and_may_lie_deep(tmp_path: Path) -> None:
    state = tmp_path / ("deep" * 20) / ("deeper" * 10)
    tiny = tiny_profile(True, tmp_path / "preload.json")
    launcher = Launcher(Children(state), state, tiny, Settings(), UNCONFINED)
    await launcher.warm()
    try:
        assert (state / "harness" / "socket").stat().st_mode & 0o777 == 0o700
        assert (state / "harness").stat().st_mode & 0o777 == 0o700
    finally:
        await launcher.stop()
    assert Children(state).adopt() == {}


async def test_where_forks_cannot_be_confined_a_forkable_harness_is_executed(bench: Bench, tmp_path: Path) -> None:
    state = bench.job / "state"
    programs_only = Sandbox(SANDBOX.programs, None, SANDBOX.bwrap)
    tiny = tiny_profile(True, tmp_path / "preload.json")
    launcher = Launcher(Children(state), state, tiny, Settings(), programs_only, hidden=(bench.job,))
    await launcher.warm()
    assert (await end_of(launcher, bench.prepared("r1"), "exit(9)")).code == 9
    assert not any(name.startswith("zygote") for name in Children(state).adopt())
    await Children(state).end_all(grace_s=2)


# ------------------------------------------------------------------------------------------- the scripted profile


async def test_the_scripted_harness_talks_works_submits_and_survives_a_busy_server(
    bench: Bench, tmp_path: Path
) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"run": "echo begun > log"}, {"work": "do: {task}", "turns": 5}, {"submit": True}]))
    state = bench.job / "state"
    scripted = profile("scripted")
    launcher = Launcher(Children(state), state, scripted, Settings(script), SANDBOX, hidden=(bench.job,))
    answers = ["```sh\nsort a.txt > b.txt; cat b.txt\n```", "done"]
    folder = bench.prepared("r1")
    with chat_server(answers, failures=2) as chat:
        process = await launcher.start(folder, f"{chat.base_url}/run/r1/key", "sort a.txt")
        end = await process.wait(60)
    assert end is not None, folder.log.read_text()
    assert (end.code, end.submitted) == (0, True)
    assert (folder.workspace / "b.txt").read_text() == "a\nb\n"
    assert (folder.workspace / "log").read_text() == "begun\n"
    assert set(chat.paths) == {"/run/r1/key/v1/chat/completions"}
    assert [message["content"] for message in chat.bodies[-1]["messages"]] == [
        "do: sort a.txt",
        answers[0],
        "[0]\na\nb",
    ]
    assert len(chat.bodies) == 4


@pytest.mark.parametrize(
    ("script", "code", "number"),
    [([{"exit": 3}], 3, None), ([{"kill": 9}], None, 9), ([{"submit": True}, {"exit": 0}], 0, None)],
)
async def test_the_scripted_harness_ends_as_it_is_told(
    bench: Bench, tmp_path: Path, script: list[object], code: int | None, number: int | None
) -> None:
    file = tmp_path / "script.json"
    file.write_text(json.dumps(script))
    state = bench.job / "state"
    launcher = Launcher(Children(state), state, profile("scripted"), Settings(file), UNCONFINED)
    process = await launcher.start(bench.prepared("r1"), "http://127.0.0.1:1", "x")
    end = await process.wait(60)
    assert end is not None
    assert (end.code, end.signal, end.failure) == (code, number, "")
    assert end.exit_code == (code if number is None else 128 + number)
    assert end.submitted == ({"submit": True} in script)


def test_a_harness_that_was_killed_for_want_of_memory_is_a_failure_of_ours() -> None:
    assert HarnessExit(signal=9, starved=True).failure == "the harness was killed as the system ran out of memory"
    assert HarnessExit(signal=9).failure == ""


async def test_a_scripted_harness_that_never_ends_and_ignores_sigterm_is_ended(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text(json.dumps({"ignore_sigterm": True, "steps": [{"run": "touch ready"}, {"forever": True}]}))
    state = bench.job / "state"
    launcher = Launcher(Children(state), state, profile("scripted"), Settings(file), SANDBOX)
    folder = bench.folder("r1")
    folder.prepare(a_task())
    process = await launcher.start(folder, "http://127.0.0.1:1", "x")
    await asyncio.to_thread(until, (folder.workspace / "ready").exists)
    end = await process.end(grace_s=0.2)
    assert not process.alive
    assert end.submitted is False
    assert Children(state).adopt() == {}
