"""Groups from their launch until their tokens are trained: what a leader writes of them, as gyre.sched.launch says."""

from __future__ import annotations

from dataclasses import replace

from gyre.actors.measures import Measures
from gyre.actors.site import Site
from gyre.actors.term import Term
from gyre.actors.view import View
from gyre.sched.launch import Launch, LaunchPlan, is_finished, mean, next_launches, run_id
from gyre.sched.placement import NOWHERE
from gyre.store.election import Verdict
from gyre.store.protocol import Compare
from gyre.store.records import (
    GroupRecord,
    GroupState,
    JobRecord,
    JobState,
    Purpose,
    RunRecord,
    RunState,
)
from gyre.store.typed import Versioned, put_record


class Groups:
    def __init__(self, site: Site, view: View, term: Term, measures: Measures) -> None:
        self._site = site
        self._view = view
        self._term = term
        self._measures = measures
        spec = site.spec
        self._plan = LaunchPlan(
            steps=spec.job.steps,
            batch_groups=spec.batch.groups,
            group_size=spec.batch.group_size,
            staleness=spec.batch.staleness,
            heldout=spec.tasks.heldout,
        )

    async def look(self, job: Versioned[JobRecord]) -> None:
        """What is over is dropped, what has settled is written down, and so is the held-out reward."""
        self._drop_consumed()
        await self._settle()
        await self._note_heldout(job)

    def finished(self, version: int) -> bool:
        """Whether nothing is left to do of the job."""
        return is_finished(self._plan, version, self._view.groups.records)

    async def launch(self, job: JobRecord, version: int) -> None:
        """Those that the staleness bound lets begin now."""
        groups = self._view.groups.records
        launches = next_launches(self._plan, version, job.launched_groups, job.consumed_groups, groups)
        for launch in launches:
            if not await self._launch(launch, version):
                return

    # ------------------------------------------------------------------------------------------ the end

    def _drop_consumed(self) -> None:
        """What has been trained is decided about no more: a long job costs no more per decision than a short one."""
        view, keys = self._view, self._site.keys
        for group in [group for group in view.groups.records if group.state is GroupState.CONSUMED]:
            for run in group.runs:
                found = view.run(run)
                if found is not None and found.trace is not None:
                    self._measures.trained(found.trace)
                view.runs.drop(keys.run(run))
            view.groups.drop(keys.group(group.group))

    def _has_settled(self, group: GroupRecord) -> bool:
        """As far as we have heard: of the group's settling we may hear before we hear of its runs'."""
        return group.state is not GroupState.OPEN and self._runs_settled(group)

    def _runs_settled(self, group: GroupRecord) -> bool:
        runs = [self._view.run(run) for run in group.runs]
        return all(run is not None and run.state is RunState.SETTLED for run in runs)

    async def _settle(self) -> None:
        """The runs are compared as well: that a group is open again we may hear before we hear that its runs are."""
        view, keys = self._view, self._site.keys
        for seen in list(view.groups.items.values()):
            group = seen.record
            if group.state is GroupState.OPEN and self._runs_settled(group):
                runs = [view.runs.items[keys.run(run)] for run in group.runs]
                compares = [Compare.modified(run.key, run.mod_revision) for run in runs]
                await self._term.replace(view.groups, seen, replace(group, state=GroupState.SETTLED), compares)

    async def _note_heldout(self, job: Versioned[JobRecord]) -> None:
        """The mean held-out reward, once every run of its purpose has settled."""
        for purpose, known in (
            (Purpose.HELDOUT_BEFORE, job.record.heldout_before),
            (Purpose.HELDOUT_AFTER, job.record.heldout_after),
        ):
            groups = [group for group in self._view.groups.records if group.purpose is purpose]
            if (
                known is not None
                or len(groups) < max(1, self._plan.heldout)
                or not all(self._has_settled(group) for group in groups)
            ):
                continue
            reward = mean([reward for group in groups for reward in self._rewards(group)])
            if reward is None:
                await self._term.end_job(
                    JobState.FAILED, "no held-out run could be scored; see the runs' reasons in the log"
                )
                return
            field = "heldout_before" if purpose is Purpose.HELDOUT_BEFORE else "heldout_after"
            await self._term.update_job(**{field: reward})
            self._site.say(f"held-out reward {'before' if field.endswith('before') else 'after'}: {reward:.3f}")

    def _rewards(self, group: GroupRecord) -> list[float]:
        runs = [self._view.run(run) for run in group.runs]
        return [run.reward for run in runs if run is not None and run.reward is not None]

    # ------------------------------------------------------------------------------------------ the beginning

    async def _launch(self, launch: Launch, version: int) -> bool:
        site = self._site
        runs = tuple(run_id(launch.group, member) for member in range(launch.runs))
        group = GroupRecord(
            launch.group,
            site.task(launch.purpose, launch.index).id,
            launch.purpose,
            launch.index,
            runs,
            GroupState.OPEN,
            version,
            0,
        )
        queued = [
            RunRecord(run, launch.group, RunState.QUEUED, 1, NOWHERE, None, None, "", None, 0.0, 0.0) for run in runs
        ]
        puts = [put_record(site.keys.group(launch.group), group)]
        puts += [put_record(site.keys.run(run.run), run) for run in queued]
        compares = [Compare.created(site.keys.group(launch.group), 0)]
        if launch.purpose is Purpose.TRAIN:
            job = await site.store.get(site.keys.job, JobRecord)
            assert job is not None
            if job.record.launched_groups != launch.index:
                return False
            puts.append(put_record(site.keys.job, replace(job.record, launched_groups=launch.index + 1)))
            compares.append(Compare.modified(site.keys.job, job.mod_revision))
        if await self._term.commit(puts, compares) is not Verdict.WRITTEN:
            return False
        written = await site.store.get(site.keys.group(launch.group), GroupRecord)
        if written is not None:
            self._view.groups.put(written)
        return True
