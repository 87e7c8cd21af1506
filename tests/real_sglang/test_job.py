"""A whole job on one cell whose engine is SGLang: it serves, gives its memory back, trains, and serves what was trained."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from job.a_job import Job, gated
from job.conftest import make_job as make_job

from gyre.actors.engine_process import read_ready
from gyre.engine.access import http_key
from gyre.engine.client import EngineClient

from .servers import MISSING, PYTHON

ENGINE = {"kind": "sglang", "python": str(PYTHON), "device": "cpu", "dtype": "float32", "moves_kv": True}


async def test_a_cell_goes_from_sglang_to_training_and_back_and_its_engine_outlives_gyred(
    make_job: Callable[..., Job],
) -> None:
    if MISSING:
        pytest.skip(MISSING)
    job = make_job(engine=ENGINE, cells={"count": 1})
    job.start()
    engine = (await job.until_status("runs at the gate", gated)).pids["engine-c0"]
    assert "sglang.launch_server" in job.processes()[engine]
    url = read_ready(job.dir.state / "engine-c0.json")
    async with EngineClient(url, key=http_key(job.dir.secret_file.read_text().strip())) as client:
        about = await client.info()
        lack = await client.kv_lack(list(range(3, 43)), 0)
    assert (about.kv_model, about.block_tokens, lack.blocks) == ("small", 16, 2)
    os.kill(job.gyred(), signal.SIGKILL)
    job.open_gate()
    assert await job.ended() == 0
    books = await job.check_books(2)
    assert f"adopted engine-c0 (pid {engine})" in job.log
    assert "engine-c0 (pid" not in job.log.split("adopted engine-c0")[1].split("ending: ")[0], "it never ended"
    assert min(step.metrics["trained_tokens"] for step in books.steps) > 0
    for order in ("rollout -> train", "train -> rollout"):
        assert job.log.count(f"c0: {order}") == 2, job.tail()
