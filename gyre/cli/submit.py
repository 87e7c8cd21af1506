"""Give a cluster its next job: one transaction, refused while the job before it has not ended."""

from __future__ import annotations

from gyre.config import JobSpec
from gyre.errors import BadInput, Refused
from gyre.store.open import cluster_of, keys_for, open_store
from gyre.store.protocol import Compare, Txn
from gyre.store.records import CurrentJobRecord, JobRecord, JobState, current_key
from gyre.store.typed import TypedStore, put_record


async def submit_job(url: str, spec: JobSpec) -> None:
    """`url`: of the cluster's store. Raises Refused while it has another job, BadInput for a name that was used."""
    cluster = cluster_of(url)
    assert cluster is not None
    store, key, name = TypedStore(open_store(url), away_s=0.0), current_key(cluster), spec.job.name
    try:
        if await store.get(keys_for(url, name).job, JobRecord) is not None:
            raise BadInput("job.name", name, "a name that no job of this cluster has had")
        before = await store.get(key, CurrentJobRecord)
        if before is not None:
            found = await store.get(keys_for(url, before.record.name).job, JobRecord)
            if found is None or found.record.state not in (JobState.FINISHED, JobState.FAILED):
                raise Refused(f"the cluster works on {before.record.name}; stop it first, or wait for its end")
        compare = Compare.modified(key, before.mod_revision if before else 0)
        put = put_record(key, CurrentJobRecord(name, spec.to_json()))
        if not (await store.commit(Txn((compare,), (put,)))).succeeded:
            raise Refused("another job was submitted at the same moment")
    finally:
        await store.store.close()
