"""mini-swe-agent, unmodified, from its zygote: real runs of it against a chosen chat server."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

import gyre
from gyre.children import Children
from gyre.harness.launch import HarnessExit, Launcher
from gyre.harness.profiles import LaunchContext, Settings, config_path, mini_swe_agent, profile
from gyre.harness.workspace import RunFolder

from .chat_server import ChatServer, chat_server
from .conftest import Bench, a_task, until
from .test_launch import SANDBOX

SUBMIT = "```\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
CHORES = config_path("builtin:chores", Path("/"))


@pytest.fixture(scope="module")
async def launcher(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Launcher]:
    """One zygote for the file, as its imports cost seconds; its entry point is the harness's own, watched."""
    state = tmp_path_factory.mktemp("mini") / "state"
    mini = profile("mini-swe-agent")
    assert mini.fork_server is not None
    here = Path(__file__).parent
    env = {**mini.fork_server.env, "PYTHONPATH": f"{here}:{Path(gyre.__file__).parent.parent}"}
    watched = replace(mini, fork_server=replace(mini.fork_server, entry_point="list_lazy_work:watched", env=env))
    made = Launcher(Children(state), state, watched, Settings(CHORES), SANDBOX)
    yield made
    await Children(state).end_all(grace_s=2)


async def run_mini(
    bench: Bench, launcher: Launcher, chat: ChatServer, run: str = "r1"
) -> tuple[RunFolder, HarnessExit]:
    folder = bench.folder(run)
    folder.prepare(a_task())
    process = await launcher.start(folder, f"{chat.base_url}/run/{run}/key", f"sort a.txt for {run}")
    end = await process.wait(120)
    assert end is not None, folder.log.read_text()
    return folder, end


async def test_it_works_in_its_workspace_over_the_runs_own_url_and_submits(bench: Bench, launcher: Launcher) -> None:
    with chat_server(["```\nsort a.txt > b.txt\n```", "```\ncat b.txt\n```", SUBMIT]) as chat:
        folder, end = await run_mini(bench, launcher, chat)
    assert (end.code, end.failure, end.submitted) == (0, "", True)
    assert (folder.workspace / "b.txt").read_text() == "a\nb\n"
    assert set(chat.paths) == {"/run/r1/key/v1/chat/completions"}
    said = [message["content"] for message in chat.bodies[-1]["messages"] if message["role"] == "user"]
    assert said[0] == "sort a.txt for r1"
    assert said[2].endswith("a\nb")
    assert mini_swe_agent.trajectory(folder).is_file()


async def test_a_run_that_stops_at_its_limit_did_not_submit(bench: Bench, launcher: Launcher) -> None:
    with chat_server(["```\ncat a.txt\n```"]) as chat:
        _, end = await run_mini(bench, launcher, chat)
    assert (end.code, end.submitted) == (0, False)


async def test_runs_at_once_are_apart(bench: Bench, launcher: Launcher) -> None:
    with chat_server(["```\necho $HOME > who\n```", SUBMIT]) as chat:
        ends = await asyncio.gather(*(run_mini(bench, launcher, chat, f"r{index}") for index in range(4)))
    for index, (folder, end) in enumerate(ends):
        assert end.submitted
        assert (folder.workspace / "who").read_text().strip() == str(folder.home)
        trajectory = json.loads(mini_swe_agent.trajectory(folder).read_text())
        assert f"sort a.txt for r{index}" in [message["content"] for message in trajectory["messages"]]


async def test_a_busy_server_is_waited_for(bench: Bench, launcher: Launcher) -> None:
    with chat_server([SUBMIT], failures=1) as chat:
        _, end = await run_mini(bench, launcher, chat)
    assert end.submitted
    assert len(chat.bodies) == 2


async def test_a_command_that_kills_everything_ends_at_most_its_own_run(bench: Bench, launcher: Launcher) -> None:
    if SANDBOX.forks != "namespaces":
        return  # it would not be confined, and this would be the end of the machine
    slow = bench.folder("r2")
    slow.prepare(a_task())
    with chat_server(["```\ntouch begun; until test -e go; do sleep 0.05; done\n```", SUBMIT]) as waiting:
        other = await launcher.start(slow, f"{waiting.base_url}/run/r2/key", "wait")
        await asyncio.to_thread(until, (slow.workspace / "begun").exists)
        with chat_server(["```\nkill -9 -1\n```", SUBMIT]) as chat:
            folder, end = await run_mini(bench, launcher, chat)
        assert end.signal == signal.SIGKILL or end.code == 0, folder.log.read_text()
        assert other.alive
        (slow.workspace / "go").touch()
        finished = await other.wait(60)
    assert finished is not None
    assert finished.submitted


def test_the_command_line_is_the_console_scripts(bench: Bench) -> None:
    context = LaunchContext(
        bench.folder("r1"), "http://127.0.0.1:1/run/r1/key", "-x: a task", Settings(Path("/etc/mini.yaml"))
    )
    launch = mini_swe_agent.launch(context)
    assert launch.program == (sys.executable, "-m", "minisweagent.run.mini")
    assert launch.arguments[-1] == "--task=-x: a task"
    assert launch.arguments[launch.arguments.index("--config") + 1] == "/etc/mini.yaml"
    assert launch.env["OPENAI_API_BASE"] == "http://127.0.0.1:1/run/r1/key/v1"
    assert launch.env["HOME"] == str(bench.folder("r1").home)
    without = mini_swe_agent.launch(LaunchContext(bench.folder("r1"), "http://127.0.0.1:1", "a task"))
    assert "--config" not in without.arguments


@pytest.mark.parametrize("text", ["", "{", "[]", '{"info": 3}', '{"info": {"exit_status": "LimitsExceeded"}}'])
def test_without_a_trajectory_that_says_so_a_run_did_not_submit(bench: Bench, text: str) -> None:
    folder = bench.folder("r1")
    folder.prepare(a_task())
    assert mini_swe_agent.submitted(folder) is False
    mini_swe_agent.trajectory(folder).write_text(text)
    assert mini_swe_agent.submitted(folder) is False


async def test_the_preload_list_leaves_nothing_for_the_first_call(bench: Bench, launcher: Launcher) -> None:
    """The list was made for this version of the harness (list_lazy_work.py makes it)."""
    with chat_server(["```\necho hello\n```", SUBMIT]) as chat:
        folder, _ = await run_mini(bench, launcher, chat)
    assert json.loads((folder.home / "lazy.json").read_text()) == {"modules": [], "models": []}
