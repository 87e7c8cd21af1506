"""How a job ends before its end, and goes on: Ctrl-C, `--resume`, a killed gyrectl, signals to gyred, a port in use."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from gyre.engine.ports import free_port
from gyre.train.snapshot import snapshot_path

from .a_job import Job, gated

STOP_S = 30.0
"""A stop that takes longer hangs; on a free machine it takes one or two seconds."""


async def stopped(job: Job) -> int:
    """The exit code of a gyrectl that was told to stop; nothing of the job may be left then."""
    began_s = time.monotonic()
    code = await job.ended()
    assert time.monotonic() - began_s < STOP_S, job.tail()
    assert job.processes() == {}, job.tail()
    return code


async def test_ctrl_c_ends_all_and_resume_goes_on_from_the_last_snapshot(job: Job) -> None:
    job.start()
    job.open_gate()
    await job.until_status("one step", lambda status: status.step == 1)
    assert job.up is not None
    job.up.send_signal(signal.SIGINT)
    assert await stopped(job) == 130
    first = (await job.books()).steps
    assert "go on with: gyrectl up" in job.said
    assert "failed in" not in job.log, job.tail()

    job.start("--resume")
    assert await job.ended() == 0
    books = await job.books()
    assert books.steps[: len(first)] == first, "no step is taken twice"
    assert [step.metrics["moments_behind"] for step in books.steps] == [0.0, 0.0], "nor is one forgotten by AdamW"
    interrupted = [run.run for run in books.runs if run.attempt > 1]
    await job.check_books(2, hurt=interrupted)


async def test_a_snapshot_that_is_damaged_meanwhile_is_mended_with_its_checkpoint(job: Job) -> None:
    job.start()
    await job.until_status("runs at the gate", gated)
    job.open_gate("t*")
    await job.until_status("one step, and runs at the next gate", lambda now: now.step == 1 and gated(now))
    assert job.up is not None
    job.up.send_signal(signal.SIGINT)
    assert await stopped(job) == 130
    weights = snapshot_path(job.dir.snapshots, 1) / "model.safetensors"
    right = weights.read_bytes()
    weights.write_bytes(right[:-4000] + bytes(byte ^ 1 for byte in right[-4000:]))

    job.start("--resume")
    job.open_gate()
    assert await job.ended() == 0
    assert "snapshot 1 is damaged here" in job.log
    assert weights.read_bytes() == right
    await job.check_books(2, hurt=[run.run for run in (await job.books()).runs if run.attempt > 1])


async def test_a_killed_gyrectl_leaves_the_job_running_and_resume_watches_it(job: Job) -> None:
    job.start()
    status = await job.until_status("runs at the gate", gated)
    gyred, harnesses = job.gyred(), job.harnesses("t*")
    assert job.up is not None
    job.up.kill()
    job.up.wait()

    job.start("--resume", "--steps", "9")
    assert await job.ended() == 2
    assert "job.steps: 'given' is not allowed; the job is running" in job.said
    job.start("--resume")
    now = await job.until_status("the same runs", lambda now: now.live == 3)
    assert job.gyred() == gyred
    assert job.harnesses("t*") == harnesses
    assert (now.pids.items() ^ status.pids.items()) == set()
    job.open_gate()
    assert await job.ended() == 0
    await job.check_books(2)


async def test_a_second_ctrl_c_ends_a_gyred_that_hangs_and_sigterm_ends_one_that_does_not(job: Job) -> None:
    job.start()
    await job.until_status("runs at the gate", gated)
    assert job.up is not None
    os.kill(job.gyred(), signal.SIGSTOP)
    job.up.send_signal(signal.SIGINT)
    await job.until(lambda: "stopping; press Ctrl-C again" in job.said, "gyrectl to stop")
    job.up.send_signal(signal.SIGINT)
    assert await stopped(job) == 130

    job.start("--resume")
    status = await job.until_status("runs at the gate again", gated)
    os.kill(status.pids["gateway"], signal.SIGSTOP)  # it answers nobody: the stop must not wait for it
    os.kill(job.gyred(), signal.SIGTERM)
    assert await stopped(job) == 1
    assert "gyred was sent a signal to end" in job.log


async def test_a_port_in_use_is_one_clear_line(make_job: Callable[..., Job]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = make_job(server={"port": port})
        job.start()
        assert await job.ended() == 2
    assert job.said.splitlines() == [
        f"job.toml: server.port: {port} on '127.0.0.1' is not allowed; a free port is needed (Address already in use)"
    ]


async def test_a_port_taken_after_the_check_fails_the_job_with_the_reason(make_job: Callable[..., Job]) -> None:
    port = free_port("127.0.0.1")
    job = make_job(server={"port": port})
    job.start()
    await job.until(lambda: (job.dir.root / "node.toml").exists(), "the check to be over")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert await job.ended() == 1
    last = job.said.splitlines()[-1]
    assert "the job failed: the gateway cannot run" in last
    assert f"server.port: {port} is not allowed" in last


def test_gyred_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "tokenizers", "renderers", "openai", "numpy", "megatron", "safetensors", "sglang")
    program = f"import gyre.cli.gyred, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
