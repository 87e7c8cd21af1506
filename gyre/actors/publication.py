"""The publication of a step: the transaction after which it is taken, and what has become of it.

One transaction writes the snapshot, the step's record, the job's count and the groups as consumed, or nothing of it. It
compares the leader's token, the snapshot that it replaces, the office by which the core is the core, and the groups as they
have settled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from gyre.actors.batch import Batch
from gyre.actors.site import Site
from gyre.store.election import Verdict, publish_snapshot_txn, verdict
from gyre.store.protocol import Compare
from gyre.store.records import CoreRecord, GroupRecord, GroupState, JobRecord, RunRecord, SnapshotRecord, StepRecord
from gyre.store.typed import Versioned, put_record


class Published(StrEnum):
    """What has become of a step that was taken."""

    DONE = "done"
    """Also when the answer to an earlier try was lost."""
    OVERTAKEN = "overtaken"
    """Another version was published meanwhile."""
    REPLACED = "replaced"
    """Another cell is the core by now."""
    REOPENED = "reopened"
    """A group was opened again, and may have settled since: the leader had given this node up, and runs of it are run again."""
    DEPOSED = "deposed"
    """Nothing is written: the token is no leader's any more. The next leader's may be tried."""


@dataclass(frozen=True)
class Publication:
    """Of `new` in place of `old`, by the core of `office`."""

    site: Site
    office: Versioned[CoreRecord]
    old: Versioned[SnapshotRecord]
    new: SnapshotRecord
    step: StepRecord
    batch: Batch
    """What the step was taken on."""

    async def publish(self, token: int) -> tuple[Published, Versioned[SnapshotRecord]]:
        """Try until it is decided; the snapshot that is published then."""
        site = self.site
        while True:
            outcome = await self._commit(token)
            now = await site.store.get(site.keys.snapshot, SnapshotRecord)
            assert now is not None
            if now.record == self.new:
                return Published.DONE, now
            if now.mod_revision != self.old.mod_revision:
                return Published.OVERTAKEN, now
            if await self._replaced():
                return Published.REPLACED, now
            if outcome is None:
                return Published.REOPENED, now
            if outcome is Verdict.DEPOSED:
                return Published.DEPOSED, now

    async def _commit(self, token: int) -> Verdict | None:
        """None when a group was opened again meanwhile."""
        site = self.site
        job = await site.store.get(site.keys.job, JobRecord)
        assert job is not None
        consumed = job.record.consumed_groups + len(self.step.groups)
        counted = replace(job.record, consumed_groups=consumed, active_s=site.active_s())
        puts = [put_record(site.keys.step(self.step.step), self.step), put_record(site.keys.job, counted)]
        as_settled: list[Compare] = []
        for group in self.step.groups:
            found = await site.store.get(site.keys.group(group), GroupRecord)
            assert found is not None
            if found.record.state is GroupState.OPEN or not self.batch.is_of(await runs_of(site, found.record)):
                return None
            as_settled.append(Compare.modified(found.key, found.mod_revision))
            taken = replace(found.record, state=GroupState.CONSUMED, step=self.step.step)
            puts.append(put_record(site.keys.group(group), taken))
        fence = (
            Compare.modified(site.keys.core, self.office.mod_revision),
            Compare.modified(site.keys.job, job.mod_revision),
            *as_settled,
        )
        result = await site.store.commit(publish_snapshot_txn(site.keys, token, self.old, self.new, puts, fence))
        return verdict(result, token)

    async def _replaced(self) -> bool:
        now = await self.site.store.get(self.site.keys.core, CoreRecord)
        return now is None or now.mod_revision != self.office.mod_revision


async def runs_of(site: Site, group: GroupRecord) -> list[RunRecord]:
    """The group's runs as they are in the store now, without those that are not there."""
    found = [await site.store.get(site.keys.run(run), RunRecord) for run in group.runs]
    return [run.record for run in found if run is not None]
