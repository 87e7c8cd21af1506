"""What a sampled command can do to the machine, tried by real commands in every sandbox that this machine offers."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gyre
from gyre.harness.confine import Sandbox

from .conftest import Bench, processes, python


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user that no run has anything to do with."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_run_writes_its_workspace_its_home_and_its_own_tmp(bench: Bench, confined: Sandbox) -> None:
    folder = bench.prepared("r1")
    said = bench.shell(folder, confined, "sort a.txt > b.txt && echo x > ~/x && echo y > /tmp/y && cat /tmp/y && pwd")
    assert said.split() == ["y", str(folder.workspace)]
    assert (folder.workspace / "b.txt").read_bytes() == b"a\nb\n"
    assert (folder.home / "x").exists()
    assert not Path("/tmp/y").exists()
    assert (folder.workspace / "b.txt").stat().st_uid == os.getuid()


def test_nothing_else_of_the_machine_can_be_written(bench: Bench, confined: Sandbox) -> None:
    folder, other = bench.prepared("r1"), bench.prepared("r2")
    home = pwd.getpwuid(os.getuid()).pw_dir
    repository = Path(__file__).parent
    targets = ["/", "/etc", "/usr/bin", "/var", home, repository, bench.job, other.workspace, folder.root]
    script = "".join(f"(echo harm > {target}/harm) 2>/dev/null && echo wrote {target}\n" for target in targets)
    script += "echo seen by this run alone > /tmp/harm\n"
    script += f"rm -rf {other.workspace} {bench.job} 2>/dev/null\n"
    assert bench.shell(folder, confined, script) == ""
    assert not any(Path(target, "harm").exists() for target in (*targets, "/tmp"))
    assert (other.workspace / "a.txt").exists()


def test_the_jobs_state_and_other_runs_are_not_there(bench: Bench, confined: Sandbox) -> None:
    folder, other = bench.prepared("r1"), bench.prepared("r2")
    (bench.job / "journal").mkdir()
    (bench.job / "journal" / "secret").write_text("answers")
    said = bench.shell(folder, confined, f"ls -A {bench.job} {bench.job}/work; cat {bench.job}/journal/secret")
    assert "journal" not in said.replace("journal/secret: No such file", "")
    assert "answers" not in said
    assert other.run not in said.split()


KILL_ALL = """
import os, signal, sys
if os.readlink("/proc/self/ns/pid") == sys.argv[1]:
    sys.exit("not confined: killing everything would be the end of this machine")
if os.fork() == 0:
    os.kill(-1, signal.SIGKILL)
for pid in range(2, 70000):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
"""


def test_kill_9_of_everything_hurts_nobody_else(
    bench: Bench, confined: Sandbox, bystander: subprocess.Popen[bytes]
) -> None:
    kept = bench.keep(bench.prepared("r2"), confined, "sleep", "600")
    folder = bench.prepared("r1")
    end = bench.run(folder, confined, *python(KILL_ALL), os.readlink("/proc/self/ns/pid"))
    assert end.exit_code == 128 + 9, folder.log.read_text()
    assert bystander.poll() is None
    assert kept.poll() is None


def test_a_run_sees_only_its_own_processes(bench: Bench, confined: Sandbox) -> None:
    said = bench.shell(bench.prepared("r1"), confined, "cat /proc/[0-9]*/comm")
    assert "pytest" not in said
    assert len(said.split()) <= 4


def test_a_run_has_no_capability_and_gets_none(bench: Bench, confined: Sandbox) -> None:
    said = bench.shell(bench.prepared("r1"), confined, "grep -E 'Cap(Prm|Eff|Bnd|Amb)|NoNewPrivs' /proc/self/status")
    values = dict(line.split(":\t") for line in said.splitlines())
    assert values.pop("NoNewPrivs") == "1"
    assert {int(value, 16) for value in values.values()} == {0}


def test_the_view_cannot_be_undone_from_inside(bench: Bench, confined: Sandbox, tmp_path: Path) -> None:
    folder = bench.prepared("r1")
    (bench.job / "secret").write_text("answers")
    undo = f"mount -o remount,rw / ; umount -l {bench.job}; echo harm > {tmp_path}/harm; cat {bench.job}/secret"
    said = bench.shell(folder, confined, f"({undo}) 2>/dev/null; unshare -Urm sh -c '{undo}' 2>/dev/null")
    assert "answers" not in said
    assert not (tmp_path / "harm").exists()


def test_the_kernels_switches_and_disks_are_out_of_reach(bench: Bench, confined: Sandbox) -> None:
    switches = [
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sysrq-trigger",
        "/sys/power/state",
    ]
    # Opened and closed again, with nothing written: the machine must not suffer where this fails.
    opened = "".join(f"(: >> {switch}) 2>/dev/null && echo {switch} is open\n" for switch in switches)
    made = "mknod disk b 8 0 2>/dev/null && echo a disk was made\nfind /dev -type b\n"
    assert bench.shell(bench.prepared("r1"), confined, opened + made) == ""


def test_devices_that_programs_need_are_there(bench: Bench, confined: Sandbox) -> None:
    script = "head -c 4 /dev/urandom | wc -c; echo gone > /dev/null; head -c 2 /dev/zero | wc -c; echo x > /dev/shm/x; ls /dev/pts/ptmx"
    assert bench.shell(bench.prepared("r1"), confined, script).split() == ["4", "2", "/dev/pts/ptmx"]


def test_loopback_is_reachable(bench: Bench, confined: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port})).sendall(b'hello')"
        bench.run(bench.prepared("r1"), confined, *python(code))
        server.settimeout(10)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(5) == b"hello"


def test_ending_the_run_ends_what_left_its_session(bench: Bench, sandbox: Sandbox) -> None:
    folder = bench.prepared("r1")
    marker = f"sleep 61{os.getpid()}"
    end = bench.run(
        folder, sandbox, "sh", "-c", f"setsid -f {marker}; setsid -f sh -c 'trap \"\" TERM; {marker}'; exit 3"
    )
    assert end.code == 3
    assert not processes(marker)


def test_it_works_for_an_ordinary_user(bench: Bench) -> None:
    """All of it again in short, for a process without any privilege (root becomes one in a user namespace)."""
    folder = bench.prepared("r1")
    (bench.job / "secret").write_text("answers")
    code = """
import json, os, subprocess, sys
from pathlib import Path
from gyre.harness import keeper
from gyre.harness.confine import View, choose
workspace, job, script = sys.argv[1:]
spec = keeper.Spec("r/1", ("sh", "-c", script), workspace, {"PATH": os.environ["PATH"]})
spec = choose("auto").apply(spec, View((Path(workspace),), (Path(job),)), fork=False)
print("user", os.getuid(), flush=True)
sys.exit(subprocess.run(keeper.command("-"), input=json.dumps(spec._asdict()), text=True, timeout=60).returncode)
"""
    script = f"id -u; echo 1 > made; cat {bench.job}/secret; echo 2 > {bench.job}/harm; exit 5"
    become = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.getuid() == 0 else []
    done = subprocess.run(
        [*become, sys.executable, "-c", code, str(folder.workspace), str(bench.job), script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(gyre.__file__).parent.parent,
    )
    user = "1000" if become else str(os.getuid())
    assert done.stdout.split() == ["user", user, user]
    assert done.returncode == 5, done
    assert (folder.workspace / "made").exists()
    assert not (bench.job / "harm").exists()
