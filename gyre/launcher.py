"""The parent of one child process: starts it, says which one it is, and keeps its exit status for whoever comes.

Run by gyre.children as `python -I -S launcher.py RECORD EXIT NAME DIGEST SOCKET ARGV…`, and never imported: one stays
beside every child, so it loads the least that it can.

It outlives the process that started it, so that a later one still learns how the child ended. It promises: RECORD is
there before the starter knows of the child; EXIT is there before the child's pid is free for another process; a child
that its starter did not acknowledge does not live on.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def main(record: str, exit_file: str, name: str, digest: str, socket: str, *argv: str) -> int:
    starter = int(socket)
    os.set_inheritable(starter, False)
    exec_error, report_exec_error = os.pipe()
    child = os.fork()
    if child == 0:
        _become(argv, report_exec_error)
    os.close(report_exec_error)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        # Closed by the exec itself: from here on the child runs its own program, in its own session.
        error = os.read(exec_error, 4096)
        if error:
            raise OSError(error.decode())
        os.close(exec_error)
        ticks, me, my_ticks = _start_ticks(child), os.getpid(), _start_ticks(os.getpid())
        _replace(
            record,
            f'{{"name": "{name}", "argv_digest": "{digest}", "boot": "{_boot()}", "pid": {child}, '
            f'"start_ticks": {ticks}, "launcher_pid": {me}, "launcher_start_ticks": {my_ticks}}}\n',
        )
        os.write(starter, f"{child} {ticks} {me} {my_ticks}\n".encode())
        if not os.read(starter, 1):
            raise OSError("the starter went away")
    except OSError as failure:
        _give_up(child, record, starter, str(failure))
        return 1
    os.close(starter)
    os.chdir("/")
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    if ended is not None:
        kind = "code" if ended.si_code == os.CLD_EXITED else "signal"
        _replace(exit_file, f'{{"pid": {child}, "start_ticks": {ticks}, "{kind}": {ended.si_status}}}\n')
    os.waitpid(child, 0)
    return 0


def _become(argv: tuple[str, ...], report_error: int) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two, and exec would keep that.
            signal.signal(number, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(report_error, (error.strerror or str(error)).encode())
    finally:
        os._exit(127)


def _give_up(child: int, record: str, starter: int, reason: str) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except OSError:  # it has not become a group of its own, or is gone
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for remains in (record, record + ".new"):
        try:
            os.unlink(remains)
        except OSError:
            continue
    try:
        os.write(starter, f"! {reason}\n".encode())
    except OSError:  # nobody is left to tell
        return


def _replace(path: str, text: str) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def _start_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return file.read().strip()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
