"""The core actor: it turns settled groups into micro-steps, and merged micro-steps into the next snapshot.

A batch, as DESIGN §8 has it:

    groups settle     -> their plan's micro-steps enter the ledger
    a cell claims     -> one micro-step, under a deadline
    a cell ships      -> its sums are staged whole on the core's replica; the ledger says whether they count; merge once
    all are merged    -> divide, clip, step; the snapshot is on disk; one transaction publishes it, the step's record,
                         and the groups as consumed

The transaction is the point after which a step is taken. Whatever dies before it, the batch begins again from the same
groups at the same version; whatever dies after it, nothing of the batch is trained again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from gyre.actors.batch import Batch, Stepping, step_record
from gyre.actors.copies import copied
from gyre.actors.messages import ClusterChanged, Ok
from gyre.actors.messages_core import (
    Claim,
    ClaimMicroStep,
    CoreLeaving,
    CoreLost,
    GetProgress,
    GiveBack,
    Lead,
    Merged,
    Progress,
    Progressed,
    SumsStaged,
    WhoLeads,
)
from gyre.actors.messages_replica import DropSums, MergeSums, OptimizerStep, StepDone
from gyre.actors.publication import Publication, Published, runs_of
from gyre.actors.remote import RemoteRef
from gyre.actors.runtime import Actor, handles
from gyre.actors.site import Site
from gyre.errors import GyreError
from gyre.ids import CellId, GroupId, NodeId
from gyre.sched.launch import batch_of, group_id
from gyre.store.protocol import Compacted
from gyre.store.records import (
    CoreRecord,
    GroupRecord,
    GroupState,
    Purpose,
    RunState,
    SnapshotRecord,
)
from gyre.store.typed import Versioned
from gyre.train.batch import SettledGroup, SettledRun, learning_rate, plan
from gyre.train.ledger import Ledger
from gyre.train.snapshot import snapshot_path
from gyre.wire import record

REPLICA_S = 600.0
"""For a short order to the core's replica, which may be in the middle of a micro-step."""
STEP_S = 600.0
STEP_TRIES = 3
NOTHING = Claim(None, {})


@record("core.group_changed")
@dataclass(frozen=True)
class _GroupChanged:
    group: GroupRecord


@record("core.step_failed")
@dataclass(frozen=True)
class _StepFailed:
    reason: str


@record("core.copied")
@dataclass(frozen=True)
class _Copied:
    done: StepDone


@record("core.expire")
@dataclass(frozen=True)
class _Expire:
    pass


class CoreActor(Actor):
    """Owns the ledger of the batch in preparation, and the authority over the snapshot."""

    def __init__(self, site: Site, office: Versioned[CoreRecord]) -> None:
        self._site = site
        self._office = office
        """By which we are the core: what is published compares it, so that a core that was replaced publishes nothing."""
        self._nodes: set[NodeId] = set()
        self._token = 0
        """The leader's; 0 while none is known that may still write."""
        self._newest_token = 0
        self._snapshot: Versioned[SnapshotRecord] | None = None
        self._batch: Batch | None = None
        self._ready = False
        self._fresh = True
        """The core's replica may still hold sums of a batch that this actor knows nothing of."""
        self._losses = 0
        """Times that the sums in the core's replica were lost: what was asked of it before says nothing after."""
        self._replica_turn = asyncio.Lock()
        self._merging = False
        self._stepping: Stepping | None = None
        self._taken: StepDone | None = None
        """The step is taken, its snapshot is with two nodes if there are two, and it is not published yet."""
        self._outdated: GroupRecord | None = None
        """A group that was opened again during the step: if the step is given up, its plan is worth nothing."""
        self._stepped = asyncio.Event()
        self._failures = 0
        self._train_tokens = 0.0
        self._train_s = 0.0
        self._replica: RemoteRef | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    async def pre_start(self) -> None:
        site = self._site
        snapshot = await site.store.get(site.keys.snapshot, SnapshotRecord)
        assert snapshot is not None, "the node starts its core after the first snapshot"
        self._replica = site.connect(f"replica-{self._cell}")
        await self._begin(snapshot)
        self.task(self._watch_groups())
        self.after(1.0, _Expire())
        self._nodes = set(site.directory.nodes)
        self._unsubscribe = site.directory.subscribe(lambda: self.ref.tell(ClusterChanged()))
        site.scheduler.tell(WhoLeads())
        if f"cell-{self._cell}" in site.refs:  # the replica may be at a step that the actor before us had ordered
            site.cell(self._cell).tell(CoreLost())

    @property
    def _cell(self) -> CellId:
        return self._office.record.cell

    async def post_stop(self) -> None:
        self._unsubscribe()
        if self._replica is not None:
            await self._replica.close()

    # ------------------------------------------------------------------------------------------ the batch grows

    async def _begin(self, snapshot: Versioned[SnapshotRecord]) -> None:
        """A new batch at this snapshot, with the groups that have settled already."""
        site, version = self._site, snapshot.record.version
        self._snapshot = snapshot
        self._batch = Batch(Ledger(version + 1, version))
        if version >= site.spec.job.steps:
            self._batch.ledger.close()
            return
        for index in batch_of(version + 1, site.spec.batch.groups):
            group = await site.store.get(site.keys.group(group_id(Purpose.TRAIN, index)), GroupRecord)
            if group is not None and group.record.state is GroupState.SETTLED:
                await self._plan(group.record)

    async def _watch_groups(self) -> None:
        site = self._site
        prefix = f"{site.keys.root}groups/"
        while True:
            listing = await site.store.range(prefix, GroupRecord)
            for item in listing.items:
                self.ref.tell(_GroupChanged(item.record))
            changes = site.store.watch(prefix, GroupRecord, listing.revision + 1)
            try:
                async with aclosing(changes):
                    async for change in changes:
                        if change.now is not None:
                            self.ref.tell(_GroupChanged(change.now.record))
            except Compacted:
                continue

    @handles(_GroupChanged)
    async def on_group(self, message: _GroupChanged) -> None:
        group = message.group
        if group.purpose is not Purpose.TRAIN:
            return
        if group.state is GroupState.SETTLED:
            if self._batch is not None and group.index in self._batch.plans:
                await self._settled_again(self._batch, group)
            else:
                await self._plan(group)
            await self._step_if_due()
        elif group.state is GroupState.OPEN and self._batch is not None and group.index in self._batch.plans:
            await self._reopened(group)

    async def _reopened(self, group: GroupRecord) -> None:
        """Runs of it are run again, for their tokens are gone with their node: the batch begins anew without it."""
        assert self._snapshot is not None
        if self._stepping is not None:  # the step is given up when it is to be published, if it does not fail before
            self._outdated = group
            return
        self._lose(f"{group.group} is run again")
        await self._begin(self._snapshot)

    async def _look_at(self, groups: Iterable[GroupId]) -> None:
        """What became of them, whether or not the store's watch tells it."""
        for group in groups:
            if (found := await self._site.store.get(self._site.keys.group(group), GroupRecord)) is not None:
                self.ref.tell(_GroupChanged(found.record))

    async def _settled_again(self, batch: Batch, group: GroupRecord) -> None:
        """Runs of it may be another node's by now, which has the copies of one that is gone. Or they were run again, and
        that the group was open in between was not heard of."""
        runs = await runs_of(self._site, group)
        if not batch.is_of(runs):
            await self._reopened(group)
            return
        for run in runs:
            batch.homes[run.run] = run.node

    async def _plan(self, group: GroupRecord) -> None:
        batch, spec = self._batch, self._site.spec
        assert batch is not None
        members = batch_of(batch.ledger.step, spec.batch.groups)
        if group.index not in members or group.index in batch.plans or batch.ledger.closed:
            return
        found = await runs_of(self._site, group)
        if len(found) < len(group.runs) or any(run.state is not RunState.SETTLED for run in found):
            return  # it is run again, and that its group is open we hear next
        runs: list[SettledRun] = []
        for run in found:
            batch.attempts[run.run] = run.attempt
            if run.outcome is None or run.trace is None:
                continue
            runs.append(SettledRun(run.run, run.attempt, run.reward, run.outcome, run.trace))
            batch.homes[run.run] = run.node
        made = plan(
            SettledGroup(group.group, tuple(runs)),
            batch.ledger.version,
            spec.batch.staleness,
            spec.batch,
            spec.loss,
            batch.ledger.step,
        )
        batch.plans[group.index] = made
        batch.ledger.add(made.micro_steps)
        if len(batch.plans) == len(members):
            batch.ledger.close()
        self._site.scheduler.tell(Progressed())

    # ------------------------------------------------------------------------------------------ cells at work

    @handles(ClaimMicroStep, concurrent=True)
    async def claim(self, message: ClaimMicroStep) -> Claim:
        """A micro-step, if one waits. A claim of the core cell says that its replica is there, with that version."""
        batch = self._batch
        if batch is None or message.version != batch.ledger.version:
            return NOTHING
        if message.cell == self._cell and not self._ready:
            await self._take_up(batch)
        if self._fresh or self._batch is not batch:
            return NOTHING
        work = batch.ledger.claim(message.cell, self.now_s, self._site.spec.batch.claim_s)
        if work is None:
            return NOTHING
        self._site.scheduler.tell(Progressed())
        return Claim(work, batch.homes_of(work))

    @handles(SumsStaged, concurrent=True)
    async def staged(self, message: SumsStaged) -> Merged:
        assert self._replica is not None
        async with self._replica_turn:
            batch, losses = self._batch, self._losses
            assert batch is not None
            if self._fresh:  # the core's replica has lost what was staged, or will drop it
                batch.ledger.forfeit(message.cell)
                return Merged(False)
            why = batch.ledger.refusal(message.transfer, message.cell, message.micro_steps, message.version)
            if not batch.ledger.shipped(message.transfer, message.cell, message.micro_steps, message.version):
                self._site.warn(f"sums of {message.cell} are refused: {why}")
                return Merged(False)
            self._merging = True
            try:
                await self._replica.ask(MergeSums(message.transfer), REPLICA_S, Ok)
            except GyreError as error:
                # Whether it was merged cannot be known: all sums of the batch are taken back and made anew.
                if losses == self._losses:
                    self._lose(f"the core's replica did not merge ({error})")
                return Merged(False)
            finally:
                self._merging = False
            if losses != self._losses:  # merged, and lost since
                return Merged(False)
        batch.merged.update(message.micro_steps)
        batch.metrics.update(message.metrics)
        self._train_tokens += message.metrics.get("tokens_count", 0.0)
        self._train_s += message.metrics.get("seconds_sum", 0.0)
        self._site.scheduler.tell(Progressed())
        await self._step_if_due()
        return Merged(True)

    @handles(GiveBack)
    async def give_back(self, message: GiveBack) -> Ok:
        self._forfeit(message.cell, f"{message.cell} gave back")
        return Ok()

    def _forfeit(self, cell: CellId, what: str) -> None:
        if self._batch is not None and (returned := self._batch.ledger.forfeit(cell)):
            self._site.say(f"{what} {len(returned)} micro-steps")
            self._site.scheduler.tell(Progressed())

    @handles(ClusterChanged)
    async def cluster_changed(self, _: ClusterChanged) -> None:
        """What the cells of a node that is gone had claimed waits again."""
        directory = self._site.directory
        gone, self._nodes = self._nodes - set(directory.nodes), set(directory.nodes)
        for spec in directory.specs:
            if spec.node in gone:
                self._forfeit(spec.cell, f"{spec.node} is gone; {spec.cell} had claimed")

    @handles(_Expire)
    async def expire(self, _: _Expire) -> None:
        if self._batch is not None:
            late = self._batch.ledger.expire(self.now_s)
            if late:
                self._site.say(f"{len(late)} micro-steps were claimed and not shipped in time; they wait again")
                self._site.scheduler.tell(Progressed())
        self.after(1.0, _Expire())

    # ------------------------------------------------------------------------------------------ the core's replica

    async def _take_up(self, batch: Batch) -> None:
        """The core cell is in train and its replica holds the batch's version: from now on it can step."""
        assert self._replica is not None
        async with self._replica_turn:
            losses = self._losses
            if self._fresh:
                await self._replica.ask(DropSums(), REPLICA_S, Ok)
            if losses != self._losses or self._batch is not batch:
                return
            self._ready, self._fresh = True, False
        await self._step_if_due()

    @handles(CoreLeaving, concurrent=True)
    async def core_leaving(self, _: CoreLeaving) -> Ok:
        while self._stepping is not None:
            await self._stepped.wait()
        self._ready = False
        return Ok()

    @handles(CoreLost)
    async def core_lost(self, _: CoreLost) -> None:
        self._lose("the core's replica died")

    def _lose(self, reason: str) -> None:
        """What was merged is gone, or cannot be told: the batch's micro-steps are done again.

        The core cell's next claim finds us not ready, and has the sums dropped that its replica may still hold.
        """
        self._losses += 1
        self._ready, self._fresh = False, True
        lost = self._batch.restart() if self._batch is not None else 0
        if lost:
            self._site.say(f"{reason}; {lost} merged micro-steps are done again")

    # ------------------------------------------------------------------------------------------ the step

    @handles(Lead)
    async def lead(self, message: Lead) -> None:
        """A token is heard late, or again, and then says nothing: a later leader's is higher."""
        if message.token <= self._newest_token:
            return
        self._token = self._newest_token = message.token
        if self._taken is not None:
            await self._publish()
        await self._step_if_due()

    def _step_due(self) -> bool:
        batch, steps = self._batch, self._site.spec.job.steps
        if batch is None or self._merging or self._stepping is not None:
            return False
        return batch.ledger.complete and batch.ledger.step <= steps

    async def _step_if_due(self) -> None:
        batch = self._batch
        if batch is None or not self._step_due():
            return
        self._site.scheduler.tell(Progressed())
        if batch.scored_runs == 0:
            reason = "no run of the batch could be scored; see the runs' reasons in the log"
            self._site.fail(reason)
            return
        if not self._ready or self._token == 0:
            return
        assert self._replica is not None
        ledger, spec = batch.ledger, self._site.spec
        self._stepping = Stepping(ledger.step, self._losses, ledger.total, ledger.cells, Counter(batch.metrics))
        self._stepped.clear()
        order = OptimizerStep(
            step=ledger.step,
            version=ledger.version + 1,
            scored_runs=batch.scored_runs,
            lr=learning_rate(spec.optimizer, ledger.step),
            path=str(snapshot_path(self._site.job.snapshots, ledger.version + 1)),
        )
        self.task(self._replica.ask(order, STEP_S, StepDone), lambda done: done, lambda error: _StepFailed(str(error)))

    @handles(_StepFailed)
    async def step_failed(self, message: _StepFailed) -> None:
        assert self._stepping is not None
        self._failures += 1
        if self._failures >= STEP_TRIES:
            reason = f"the optimizer step failed {self._failures} times: {message.reason}"
            self._site.fail(reason)
        self._give_up_step(f"the optimizer step failed ({message.reason})")

    def _give_up_step(self, reason: str) -> None:
        """The parameters in the core's replica may be half way: it is ended, and the batch begins again."""
        assert self._stepping is not None
        if self._stepping.losses == self._losses:
            self._lose(reason)
            self._site.cell(self._cell).tell(CoreLost())
        else:  # it died, which was heard of before
            self._site.say(reason)
        if self._outdated is not None:
            self.ref.tell(_GroupChanged(self._outdated))
        self._end_step()

    @handles(StepDone)
    async def step_done(self, done: StepDone) -> None:
        """The snapshot is on disk: publish it, and begin the next batch."""
        assert self._stepping is not None
        stepped_on = int(done.metrics["micro_steps"])
        if stepped_on != self._stepping.micro_steps:  # sums were lost and nobody told us
            had = f"{stepped_on} of {self._stepping.micro_steps} micro-steps"
            await self.step_failed(_StepFailed(f"the core's replica had the sums of {had}; nothing is published"))
            return
        self._site.snapshots.folders.has_come(snapshot_path(self._site.job.snapshots, done.version))
        self.task(self._copied(done), lambda message: message)

    async def _copied(self, done: StepDone) -> _Copied:
        await copied(self._site, done.version, done.digest)
        return _Copied(done)

    @handles(_Copied)
    async def on_copied(self, message: _Copied) -> None:
        """The death of this node loses the snapshot no more."""
        if self._stepping is not None:  # else it was given up meanwhile
            self._taken = message.done
            await self._publish()

    async def _publish(self) -> None:
        """Publish the step that is taken. Without a leader it waits for the next one, whose Lead comes here again."""
        site, batch, old, done, stepping = self._site, self._batch, self._snapshot, self._taken, self._stepping
        assert batch is not None
        assert old is not None
        assert done is not None
        assert stepping is not None
        step = step_record(batch.plans, stepping, done, site.outside.unix_s())
        new = SnapshotRecord(done.version, done.digest, site.node)
        outcome, now = Published.DEPOSED, old
        if self._token != 0:
            outcome, now = await Publication(site, self._office, old, new, step, batch).publish(self._token)
        match outcome:
            case Published.DEPOSED:
                self._token = 0
                site.say(f"step {step.step} is taken and waits for a leader, to be published")
                return
            case Published.REOPENED:
                self._give_up_step(f"step {step.step} was taken, and some of its runs are run again")
                await self._look_at(step.groups)
                return
            case Published.OVERTAKEN:
                self._give_up_step(f"step {step.step} was taken and version {now.record.version} was there before it")
                await self._go_on_from(now)
                return
            case Published.REPLACED:
                self._give_up_step(f"step {step.step} was taken, and another cell is the core by now")
                return
            case Published.DONE:
                pass
        self._failures = 0
        site.say(
            f"step {step.step}: mean reward {step.mean_reward:.3f}, {step.counted_tokens} tokens, version {done.version}"
        )
        if behind := int(done.metrics.get("moments_behind", 0)):
            site.warn(f"step {step.step}: the optimizer's state lacked {behind} steps, whose checkpoint is not there")
        self._ready, self._fresh = False, stepping.losses != self._losses
        self._end_step()
        site.snapshots.folders.keep_newest()
        await self._go_on_from(now)

    async def _go_on_from(self, published: Versioned[SnapshotRecord]) -> None:
        """The next batch begins at this snapshot. Everybody hears of it from the store."""
        await self._begin(published)
        self._site.scheduler.tell(Progressed())

    def _end_step(self) -> None:
        self._stepping = self._taken = self._outdated = None
        self._stepped.set()

    # ------------------------------------------------------------------------------------------ how it stands

    @handles(GetProgress)
    async def progress(self, _: GetProgress) -> Progress:
        batch = self._batch
        assert batch is not None
        ledger = batch.ledger
        untrained = batch.untrained()
        return Progress(
            step=ledger.step,
            planned_groups=len(batch.plans),
            untrained_runs=len({item.run for work in untrained for item in work.lineages}),
            untrained_tokens=sum(work.tokens for work in untrained),
            merged_micro_steps=ledger.merged,
            micro_steps=ledger.total,
            step_due=self._step_due() or self._stepping is not None,
            train_tokens_s=self._train_tokens / self._train_s if self._train_s > 0 else 0.0,
        )
