from __future__ import annotations

from .a_job import Job


async def test_a_job_runs_to_its_end(job: Job) -> None:
    job.start()
    assert await job.ended() == 0
    await job.check_books(2)
