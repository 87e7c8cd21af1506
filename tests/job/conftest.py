"""Jobs for the tests of the whole, and the proof that none of them leaves a process behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .a_job import Job


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes the test's job. After the test no process of it may be left."""
    jobs: list[Job] = []

    def make(**settings: dict[str, Any]) -> Job:
        jobs.append(Job(tmp_path / f"{len(jobs)}", settings))
        jobs[-1].root.mkdir()
        return jobs[-1]

    yield make
    left = [job.processes() for job in jobs]
    for job in jobs:
        job.kill_all()
    assert not any(left), left


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    return make_job()
