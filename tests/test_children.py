"""Children outlive who started them, are adopted by the next one, and can always be ended: with real signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gyre.children import Child, Children, ChildSpec, ExitStatus, ProcessRef, is_same_process, start_ticks
from gyre.errors import BadInput, Refused

LIMIT_S = 30


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    children = Children(tmp_path)
    yield children
    await children.end_all(grace_s=0)


def spec(tmp_path: Path, script: str, name: str = "child") -> ChildSpec:
    return ChildSpec(name, ("sh", "-c", script), tmp_path / f"{name}.log")


async def until(holds: Callable[[], bool]) -> None:
    """Until something that other processes bring about."""
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_log(tmp_path: Path, text: str) -> str:
    """What the child has written, once `text` is in it."""
    log = tmp_path / "child.log"
    await until(lambda: text in log.read_text())
    return log.read_text()


def launchers_of(directory: Path) -> list[int]:
    """The launchers that live for the children of `directory`."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and start_ticks(int(entry.name)) is not None:
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.endswith(b"launcher.py") for word in line[:5]) and str(directory).encode() in b" ".join(line):
                found.append(int(entry.name))
    return found


def run_and_be_killed(tmp_path: Path, script: str) -> dict[str, int]:
    """Another process starts the child "child" with this shell script and is killed by SIGKILL; what it printed."""
    starter = textwrap.dedent(
        """
        import asyncio, json, os, signal, sys
        from pathlib import Path
        from gyre.children import Children, ChildSpec

        async def main():
            directory = Path(sys.argv[1])
            spec = ChildSpec("child", ("sh", "-c", sys.argv[2]), directory / "child.log")
            child = await Children(directory).start(spec)
            print(json.dumps({"pid": child.pid, "start_ticks": child.start_ticks}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
        """
    )
    done = subprocess.run(
        (sys.executable, "-c", starter, str(tmp_path), script), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return json.loads(done.stdout)


# ---------------------------------------------------------------------------------------------- starting


async def test_a_child_writes_to_its_log_and_reads_nothing(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "read line; echo read $?; echo oops >&2; exit 3"))
    assert await child.wait() == ExitStatus(code=3)
    assert (tmp_path / "child.log").read_text() == "read 1\noops\n"


async def test_the_pid_is_that_of_the_program_itself_which_leads_its_own_session(
    children: Children, tmp_path: Path
) -> None:
    child = await children.start(spec(tmp_path, "echo I am $$.; exec sleep 60"))
    assert f"I am {child.pid}." in await until_log(tmp_path, "I am")
    assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
    assert child.alive
    assert child.exit is None
    assert is_same_process(child.pid, child.start_ticks)


async def test_environment_and_directory_are_those_of_the_spec(children: Children, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    child = await children.start(
        ChildSpec("child", ("/bin/sh", "-c", "pwd; env"), tmp_path / "child.log", {"ONLY": "this"}, place)
    )
    await child.wait()
    written = (tmp_path / "child.log").read_text().splitlines()
    assert written[0] == str(place)
    assert "ONLY=this" in written
    assert not [line for line in written if line.startswith("HOME=")]


async def test_signals_that_python_ignores_are_not_ignored_by_the_child(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "grep SigIgn /proc/self/status"))
    await child.wait()
    found = re.search(r"SigIgn:\s*(\w+)", (tmp_path / "child.log").read_text())
    assert found is not None
    ignored = int(found[1], 16)
    assert not any(ignored >> (number - 1) & 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))


async def test_the_child_inherits_no_open_files(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "ls /proc/self/fd"))
    await child.wait()
    assert set((tmp_path / "child.log").read_text().split()) <= {"0", "1", "2", "3"}  # 3 is the folder that ls reads


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (ChildSpec("child", ("/no/such/program",), Path("child.log")), "No such file"),
        (ChildSpec("child", ("/etc/passwd",), Path("child.log")), "Permission denied"),
        (ChildSpec("child", ("true",), Path("child.log"), cwd=Path("/no/such/place")), "/no/such/place"),
        (ChildSpec("child", (), Path("child.log")), "a program to run"),
        (ChildSpec("../child", ("true",), Path("child.log")), "letters, digits"),
        (ChildSpec("", ("true",), Path("child.log")), "letters, digits"),
    ],
)
async def test_what_cannot_be_run_is_refused_in_one_line_and_leaves_nothing(
    children: Children, tmp_path: Path, bad: ChildSpec, named: str
) -> None:
    with pytest.raises(BadInput, match=named) as refused:
        await children.start(ChildSpec(bad.name, bad.argv, tmp_path / bad.log, bad.env, bad.cwd))
    assert "\n" not in str(refused.value)
    assert children.adopt() == {}


async def test_a_name_is_taken_while_its_child_lives_and_free_afterwards(children: Children, tmp_path: Path) -> None:
    first = await children.start(spec(tmp_path, "exec sleep 60"))
    with pytest.raises(Refused, match=f"pid {first.pid}"):
        await children.start(spec(tmp_path, "true"))
    first.signal(signal.SIGKILL)
    await first.process.wait()
    second = await children.start(spec(tmp_path, "exit 7"))  # waits for the rest of the first one itself
    assert await second.wait() == ExitStatus(code=7)
    assert await first.wait() in (ExitStatus(signal=signal.SIGKILL), ExitStatus())
    assert second.pid != first.pid


async def test_a_start_that_is_given_up_leaves_no_child(children: Children, tmp_path: Path) -> None:
    starts = [asyncio.create_task(children.start(spec(tmp_path, "exec sleep 600", f"c{i}"))) for i in range(6)]
    for i, start in enumerate(starts):
        await asyncio.sleep(0.01 * i)
        start.cancel()
    done = await asyncio.gather(*starts, return_exceptions=True)
    kept = {child.name for child in done if isinstance(child, Child)}
    await until(lambda: {name for name, child in children.adopt().items() if child.alive} == kept)
    await until(lambda: len(launchers_of(tmp_path)) == len(kept))


# ---------------------------------------------------------------------------------------------- ending by itself


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_killed_child_says_by_which_signal(children: Children, tmp_path: Path, number: signal.Signals) -> None:
    child = await children.start(spec(tmp_path, "exec sleep 60"))
    os.kill(child.pid, number)
    status = await child.wait()
    assert status == ExitStatus(signal=number)
    assert str(status) == f"killed by {number.name}"
    assert not status.ok
    assert not child.alive


async def test_exit_code_137_is_not_mistaken_for_a_signal(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "exit 137"))
    assert str(await child.wait()) == "exit code 137"


async def test_many_may_wait_for_one_child(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "sleep 0.1"))
    assert await asyncio.gather(child.wait(), child.wait(), child.wait()) == [ExitStatus(code=0)] * 3


async def test_a_wait_can_be_given_up_without_harm_to_the_child(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "exec sleep 60"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await child.wait()
    assert child.alive


async def test_without_its_launcher_a_child_lives_on_and_its_status_is_unknown(
    children: Children, tmp_path: Path
) -> None:
    child = await children.start(spec(tmp_path, "echo up; exec sleep 60"))
    (launcher,) = launchers_of(tmp_path)
    os.kill(launcher, signal.SIGKILL)
    await until_log(tmp_path, "up")
    assert child.alive
    child.signal(signal.SIGKILL)
    assert await child.wait() == ExitStatus()
    assert str(await child.wait()) == "exit status unknown"


async def test_a_launcher_does_not_mind_the_signals_of_a_terminal(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 5"))
    (launcher,) = launchers_of(tmp_path)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(launcher, number)
    (tmp_path / "go").touch()
    assert await child.wait() == ExitStatus(code=5)


# ---------------------------------------------------------------------------------------------- adoption


async def test_a_second_process_adopts_what_a_killed_one_started(children: Children, tmp_path: Path) -> None:
    started = run_and_be_killed(tmp_path, "echo up; exec sleep 60")
    child = children.adopt()["child"]
    assert (child.pid, child.start_ticks) == (started["pid"], started["start_ticks"])
    assert child.alive
    assert child.argv_digest == spec(tmp_path, "echo up; exec sleep 60").argv_digest
    child.signal(signal.SIGUSR1)
    assert await child.wait() == ExitStatus(signal=signal.SIGUSR1)


async def test_the_exit_status_of_an_adopted_child_is_known_also_when_it_ended_meanwhile(
    children: Children, tmp_path: Path
) -> None:
    run_and_be_killed(tmp_path, "exit 9")
    child = children.adopt()["child"]
    assert await child.wait() == ExitStatus(code=9)
    again = children.adopt()["child"]
    assert (again.alive, again.exit) == (False, ExitStatus(code=9))
    again.forget()
    assert children.adopt() == {}


async def test_an_adopted_child_can_be_ended(children: Children, tmp_path: Path) -> None:
    run_and_be_killed(tmp_path, "exec sleep 60")
    child = children.adopt()["child"]
    assert await child.end(grace_s=LIMIT_S) == ExitStatus(signal=signal.SIGTERM)
    assert children.adopt() == {}
    assert launchers_of(tmp_path) == []


async def test_a_pid_that_another_process_has_now_is_neither_alive_nor_signalled(
    children: Children, tmp_path: Path
) -> None:
    bystander = await children.start(spec(tmp_path, "exec sleep 60", "bystander"))
    record = tmp_path / "children" / "bystander.json"
    other = json.loads(record.read_text()) | {"name": "reused", "start_ticks": bystander.start_ticks - 1}
    record.with_name("reused.json").write_text(json.dumps(other))

    reused = children.adopt()["reused"]
    assert not reused.alive
    assert not reused.signal(signal.SIGKILL)
    assert reused.process.session() == ()
    async with asyncio.timeout(LIMIT_S):
        await reused.process.wait()
        await reused.process.end(grace_s=0)
    assert bystander.alive
    record.with_name("reused.json").unlink()


async def test_a_record_of_another_boot_names_nobody(children: Children, tmp_path: Path) -> None:
    bystander = await children.start(spec(tmp_path, "exec sleep 60", "bystander"))
    record = tmp_path / "children" / "bystander.json"
    record.with_name("old.json").write_text(json.dumps(json.loads(record.read_text()) | {"boot": "before"}))
    assert not children.adopt()["old"].alive
    assert children.adopt()["bystander"].alive
    record.with_name("old.json").unlink()
    assert bystander.alive


async def test_a_damaged_record_hides_no_other(children: Children, tmp_path: Path) -> None:
    await children.start(spec(tmp_path, "exec sleep 60"))
    for name, text in (("torn", '{"pid": 1'), ("empty", ""), ("odd", "[]"), ("lacking", '{"pid": 1}')):
        (tmp_path / "children" / f"{name}.json").write_text(text)
    assert list(children.adopt()) == ["child"]


# ---------------------------------------------------------------------------------------------- ending them


async def test_end_lets_a_child_finish_its_work_within_the_grace(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.05; done"))
    await until_log(tmp_path, "up")
    assert await child.end(grace_s=LIMIT_S) == ExitStatus(code=4)
    assert "bye" in (tmp_path / "child.log").read_text()


async def test_end_kills_a_child_that_ignores_sigterm(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "trap '' TERM; echo up; while :; do sleep 0.05; done"))
    await until_log(tmp_path, "up")
    assert await child.end(grace_s=0.2) == ExitStatus(signal=signal.SIGKILL)


async def test_end_reaches_a_stopped_child(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "exec sleep 60"))
    child.signal(signal.SIGSTOP)
    assert await child.end(grace_s=LIMIT_S) == ExitStatus(signal=signal.SIGTERM)


async def test_end_leaves_nothing_of_the_session_behind(children: Children, tmp_path: Path) -> None:
    """Neither grandchildren in groups of their own, nor those that ignore SIGTERM, nor the launcher."""
    child = await children.start(
        ChildSpec(
            "child",
            (
                "bash",
                "-c",
                "set -m; (trap '' TERM; echo $BASHPID; while :; do sleep 0.1; done) & sleep 60 & echo $!; wait",
            ),
            tmp_path / "child.log",
        )
    )
    await until(lambda: (tmp_path / "child.log").read_text().count("\n") == 2)
    grandchildren = [int(word) for word in (tmp_path / "child.log").read_text().split()]
    assert all(os.getpgid(pid) != child.pid for pid in grandchildren)
    await child.end(grace_s=0.2)
    assert [pid for pid in grandchildren if start_ticks(pid) is not None] == []
    assert child.process.session() == ()
    assert launchers_of(tmp_path) == []


async def test_end_of_a_child_that_died_ends_what_it_left_running(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "sleep 60 & echo $!; exit 1"))
    assert await child.wait() == ExitStatus(code=1)
    orphan = int((tmp_path / "child.log").read_text())
    assert start_ticks(orphan) is not None
    assert await child.end(grace_s=LIMIT_S) == ExitStatus(code=1)
    assert start_ticks(orphan) is None


async def test_end_may_be_repeated(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "exec sleep 60"))
    first = await child.end(grace_s=LIMIT_S)
    assert await child.end(grace_s=LIMIT_S) == first


async def test_end_all_ends_own_and_adopted_children_at_once(children: Children, tmp_path: Path) -> None:
    run_and_be_killed(tmp_path, "exec sleep 60")
    await children.start(spec(tmp_path, "trap '' TERM; while :; do sleep 0.05; done", "stubborn"))
    await children.start(spec(tmp_path, "exit 0", "over"))
    everyone = list(children.adopt().values())
    assert len(everyone) == 3
    await children.end_all(grace_s=0.2)
    assert [child for child in everyone if child.alive or child.process.session()] == []
    assert children.adopt() == {}
    assert launchers_of(tmp_path) == []


async def test_the_living_are_not_forgotten(children: Children, tmp_path: Path) -> None:
    child = await children.start(spec(tmp_path, "exec sleep 60"))
    with pytest.raises(Refused, match="lives"):
        child.forget()
    assert "child" in children.adopt()


# ---------------------------------------------------------------------------------------------- processes of others


async def test_a_process_of_someone_else_is_waited_for_and_ended_with_its_session(tmp_path: Path) -> None:
    with subprocess.Popen(("sh", "-c", "sleep 60 & exec sleep 60"), start_new_session=True) as started:
        ticks = start_ticks(started.pid)
        assert ticks is not None
        process = ProcessRef(started.pid, ticks)
        await until(lambda: len(process.session()) == 2)
        await process.end(grace_s=LIMIT_S)
        assert process.session() == ()
        assert not process.alive  # though it is a zombie until its parent looks
        assert not process.signal(signal.SIGTERM)


async def test_a_process_that_leads_no_session_is_ended_alone() -> None:
    with subprocess.Popen(("sleep", "60")) as ended, subprocess.Popen(("sleep", "60")) as neighbour:
        ticks = start_ticks(ended.pid)
        assert ticks is not None
        await ProcessRef(ended.pid, ticks).end(grace_s=LIMIT_S)
        assert start_ticks(ended.pid) is None
        assert start_ticks(neighbour.pid) is not None
        neighbour.kill()


async def test_a_program_with_parentheses_in_its_name_is_read_right(children: Children, tmp_path: Path) -> None:
    odd = tmp_path / "a) Z 1 (b"
    odd.symlink_to("/bin/sleep")
    child = await children.start(ChildSpec("child", (str(odd), "60"), tmp_path / "child.log"))
    assert child.alive
    assert [member.pid for member in child.process.session()] == [child.pid]
