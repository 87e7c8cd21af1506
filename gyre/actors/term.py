"""A term of leadership, as what a leader writes sees it: every transaction is fenced by the term's token.

The token is 0 while the node does not lead or cannot prove that it does; then nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gyre.actors.campaign import Campaign
from gyre.actors.mirror import Mirror
from gyre.actors.site import Site
from gyre.errors import Unavailable
from gyre.store.election import Verdict, fenced_txn, publish_snapshot_txn, verdict
from gyre.store.protocol import Compare, Delete, Put
from gyre.store.records import JobRecord, JobState, SnapshotRecord
from gyre.store.typed import Versioned, put_record
from gyre.train.snapshot import make_first_snapshot

T = TypeVar("T")


class Term:
    """`begin` takes an election up; until then its token counts for nothing."""

    def __init__(self, site: Site, campaign: Campaign) -> None:
        self._site = site
        self._campaign = campaign
        self._begun = 0

    @property
    def token(self) -> int:
        """Fences what is written now; also for a handler that has waited for long."""
        return self._begun if self._begun == self._campaign.token else 0

    def begin(self, token: int) -> None:
        self._begun = token

    def must_lead(self) -> None:
        if not self.token:
            raise Unavailable("this node's scheduler does not lead just now; ask again in a few seconds")

    async def commit(
        self, puts: Sequence[Put], compares: Sequence[Compare] = (), deletes: Sequence[Delete] = ()
    ) -> Verdict:
        """One fenced transaction; the term is over when it turns out that another leads."""
        if not (token := self.token):
            return Verdict.DEPOSED
        result = await self._site.store.commit(fenced_txn(self._site.keys, token, compares, puts, deletes))
        outcome = verdict(result, token)
        if outcome is Verdict.DEPOSED and self._begun == token:
            self._begun = 0
        return outcome

    async def replace(self, mirror: Mirror[T], seen: Versioned[T], new: T, compares: Sequence[Compare] = ()) -> bool:
        """Replace one mirrored record, unless somebody was quicker; `compares` are further ones."""
        fence = (Compare.modified(seen.key, seen.mod_revision), *compares)
        outcome = await self.commit((put_record(seen.key, new),), fence)
        if outcome is Verdict.WRITTEN:
            now = await self._site.store.get(seen.key, type(new))
            if now is not None:
                mirror.put(now)
        return outcome is Verdict.WRITTEN

    # ------------------------------------------------------------------------------------------ the job

    async def ensure_job(self) -> None:
        """The job's record and its first snapshot, on the first day of the job."""
        site = self._site
        if await site.store.get(site.keys.job, JobRecord) is None:
            job = JobRecord(
                site.spec.job.name,
                site.spec.to_json(),
                JobState.RUNNING,
                "",
                0,
                0,
                None,
                None,
                site.outside.unix_s(),
                0.0,
            )
            absent = (Compare.created(site.keys.job, 0),)
            await self.commit((put_record(site.keys.job, job),), absent)
        if await site.store.get(site.keys.snapshot, SnapshotRecord) is None and (token := self.token):
            _, digest = make_first_snapshot(site.model_dir, site.job.snapshots)
            first = SnapshotRecord(0, digest, site.node)
            await site.store.commit(publish_snapshot_txn(site.keys, token, None, first))

    async def update_job(self, **changes: Any) -> None:
        site = self._site
        while self.token:
            job = await site.store.get(site.keys.job, JobRecord)
            assert job is not None
            put = put_record(site.keys.job, replace(job.record, active_s=site.active_s(), **changes))
            if await self.commit((put,), (Compare.modified(site.keys.job, job.mod_revision),)) is not Verdict.OUTDATED:
                return

    async def end_job(self, state: JobState, reason: str) -> None:
        await self.update_job(state=state, reason=reason)
        if self.token:
            tell = self._site.warn if state is JobState.FAILED else self._site.say
            tell(f"the job has {state.value}{': ' + reason if reason else ''}")
