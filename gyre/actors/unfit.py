"""A job that a node of a cluster cannot work on, for what it lacks or for a fault in the job file.

What only this node lacks is no reason to end the job, and what everybody lacks is: a node that cannot work on a job leaves
it to the others for PATIENCE_S, and fails it when none of them has begun it by then. In either case gyred goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time

from gyre.actors.leaving import Told
from gyre.config import JobSpec
from gyre.errors import BadInput, GyreError, Unavailable
from gyre.store.protocol import Compare, Txn
from gyre.store.records import JobRecord, JobState, Keys
from gyre.store.typed import TypedStore, put_record

PATIENCE_S = 15.0
"""For another node to elect itself and begin the job."""
AGAIN_S = 20.0
"""Until the node looks again whether it has by now what it lacks."""
LOOK_S = 1.0

log = logging.getLogger("gyred")


class Unfit(GyreError):
    """This node cannot work on the job. `reason` is of one line or several, as BadInput gives it."""

    def __init__(self, error: BadInput) -> None:
        self.reason = "; ".join(str(error).splitlines())
        super().__init__(self.reason)


async def leave_to_others(store: TypedStore, keys: Keys, spec: JobSpec, reason: str, told: Told) -> None:
    """Until the job is over, it is time to try again, or gyred is told to end."""
    ends_s = time.monotonic() + AGAIN_S
    while not told.ended.is_set() and time.monotonic() < ends_s:
        try:
            found = await store.get(keys.job, JobRecord)
            if found is not None and found.record.state in (JobState.FINISHED, JobState.FAILED):
                return
            if found is None and time.monotonic() > ends_s - AGAIN_S + PATIENCE_S:
                log.error("%s fails, for no node has begun it", spec.job.name)
                await store.commit(Txn((Compare.created(keys.job, 0),), (put_record(keys.job, _failed(spec, reason)),)))
                return
        except Unavailable:
            pass  # the store is away: the job's record says later how it stands
        await asyncio.sleep(LOOK_S)


def _failed(spec: JobSpec, reason: str) -> JobRecord:
    return JobRecord(spec.job.name, spec.to_json(), JobState.FAILED, reason, 0, 0, None, None, time.time(), 0.0)
