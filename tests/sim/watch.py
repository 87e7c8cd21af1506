"""The invariants of the control plane, checked at every event that can break one.

one name is one gyred's           its record is not replaced while it stands
only the leader writes            every accepted write of a leader's keys is by the node that leads
one engine a request              a call is sampled on one engine at a time
the version only grows            by one, from 0
records go forward only           a run's attempt and state, a group's state, an order's epoch, the job's counts
each micro-step once              the sums of every published step hold each micro-step of its groups exactly once
no memory for two                 engine and replica of a cell never hold memory together
every engine serves              a cell that is to serve, and could, is known to every gateway soon
every run has an owner            a run whose harness is gone is taken up again within a lease and some grace
what was journaled is trained     each run of a step at the attempt of its record, with the tokens that it has left, once
a copy is as good                 a run whose copy lies whole with a node that is well is not run again
a copy goes                       when a step has trained its run, from a node that is well
every span ends                   unless its process was killed
memory is bounded                 tasks, timers, messages, staged sums
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gyre.actors.campaign import LEASE_S
from gyre.actors.messages import Lineages
from gyre.actors.messages_journals import Attempt, PutAway
from gyre.actors.messages_replica import LineageWork, MicroStep, OptimizerStep
from gyre.ids import CellId, GroupId, MicroStepId, NodeId, RunId
from gyre.proxy.closed_runs import lineages_path
from gyre.proxy.held_copies import LINEAGES, HeldCopies
from gyre.store import typed
from gyre.store.protocol import Put, Txn, TxnResult
from gyre.store.records import (
    CellRoleRecord,
    GroupRecord,
    GroupState,
    JobRecord,
    JobState,
    NodeRecord,
    Role,
    RunRecord,
    RunState,
    SnapshotRecord,
    StepRecord,
)
from gyre.train.batch import SettledGroup, SettledRun, plan
from gyre.trajectory.records import Lineage
from gyre.wire import unpack

from .store import Client, now

if TYPE_CHECKING:
    from .engine import Engine, Sampling
    from .replica import Replica
    from .world import World

GRACE_S = 20.0
ROUTED_S = 8.0
"""A node that has lost its lease notices within a third of it, joins again, and is told."""
COPIES_S = 15.0
"""After a step, for the copies of its runs to go."""


class Violated(Exception):
    """An invariant does not hold."""


_RUN = {state: place for place, state in enumerate((RunState.QUEUED, RunState.LIVE, RunState.SETTLED))}
_PLACES: dict[str, tuple[type[Any], Callable[[Any], tuple[int, ...]]]] = {
    "groups": (GroupRecord, lambda group: (int(group.state is GroupState.CONSUMED),)),
    "runs": (RunRecord, lambda run: (run.attempt, _RUN[run.state])),
    "roles": (CellRoleRecord, lambda order: (order.epoch, order.token)),
    "job": (JobRecord, lambda job: (int(job.state is not JobState.RUNNING), job.launched_groups, job.consumed_groups)),
}


class Watch:
    def __init__(self, world: World) -> None:
        self._world = world
        self.first = ""
        """The first violation; the world ends with it."""
        self._live: dict[str, Engine] = {}
        self._sums: dict[str, tuple[MicroStep, ...]] = {}
        self._runs: dict[str, RunRecord] = {}
        """As last written, by key."""
        self._left: dict[Attempt, tuple[Lineage, ...]] = {}
        self._copies: dict[tuple[Attempt, str], set[str]] = {}
        """By what a run has left and whose it is, the nodes that have a whole copy of it."""
        self._trained: dict[RunId, int] = {}
        """The step of each run that was trained."""
        self._version = -1
        self._engines: dict[CellId, Engine] = {}
        self._replicas: dict[CellId, Replica] = {}
        self._at: dict[str, tuple[int, ...]] = {}
        """How far each record is."""
        self._unowned_s: dict[RunId, float] = {}
        self._unrouted_s: dict[CellId, float] = {}
        self.commits = 0

    def violated(self, what: str) -> None:
        if not self.first:
            self.first = f"{self._world.loop.time():.2f} s: {what}"

    # ------------------------------------------------------------------ the store

    def written(self, writer: str, txn: Txn, result: TxnResult, client: Client, token: int) -> None:
        """A transaction of `writer`, the actor's path, was accepted; `token` is the one that its node last won."""
        self.commits += 1
        keys = self._world.keys
        if any(put.key == keys.leader for put in txn.puts):
            client.won = result.revision
            return
        who = writer.partition(":")[0].rpartition("/")[2]
        leads = self._world.leading()
        for put in txn.puts:
            self._forward(put)
            if put.key.startswith(keys.nodes):
                self._joined(put, result.revision)
            elif put.key.startswith(f"{keys.root}runs/"):
                self._run(put, writer)
            elif put.key == keys.snapshot:
                self._published(put, txn)
            elif put.key.startswith(keys.roles) and who == "scheduler":
                self._ordered(put, leads)
        if who == "scheduler" and token != leads:
            self.violated(f"{writer} wrote {[put.key for put in txn.puts]} with token {token}, and {leads} leads")

    def _joined(self, put: Put, revision: int) -> None:
        """What stood there before was of the same gyred's folder, or had gone."""
        (event,) = self._world.server.changed(put.key, revision)
        if event.previous is None:
            return
        before, now_there = unpack(event.previous.value, NodeRecord), unpack(put.value, NodeRecord)
        if before.home != now_there.home:
            self.violated(f"two gyreds are in the cluster as {before.node}")

    def _forward(self, put: Put) -> None:
        """What is written is no earlier than what was there."""
        kind = put.key.removeprefix(self._world.keys.root).partition("/")[0]
        cls, place = _PLACES.get(kind, (None, None))
        if cls is not None and place is not None:
            now_at = place(typed.unpack(put.value, cls))
            before = self._at.get(put.key)
            if before is not None and now_at < before:
                self.violated(f"{put.key} went back from {before} to {now_at}")
            self._at[put.key] = now_at

    def _ordered(self, put: Put, leads: int) -> None:
        order = unpack(put.value, CellRoleRecord)
        if order.token != leads:
            self.violated(f"an order with token {order.token} was written, and {leads} leads")

    def _published(self, put: Put, txn: Txn) -> None:
        found = unpack(put.value, SnapshotRecord)
        if found.version != self._version + 1:
            self.violated(f"version {found.version} was published after {self._version}")
        self._version = found.version
        if found.version == 0:
            return
        steps = [unpack(other.value, StepRecord) for other in txn.puts if "/steps/" in other.key]
        if len(steps) != 1 or steps[0].version != found.version:
            self.violated(f"version {found.version} was published with the records of {len(steps)} steps")
            return
        wanted = Counter(name for group in steps[0].groups for name in self._micro_steps(group, steps[0]))
        sums = self._sums.get(found.digest, ())
        had = Counter(work.micro_step for work in sums)
        if had != wanted:
            self.violated(f"step {steps[0].step} was taken on {had}, its groups have {wanted}")
        self._took([item for work in sums for item in work.lineages], steps[0])
        told, planned = steps[0].metrics["trained_tokens"], steps[0].counted_tokens
        if told != planned:
            self.violated(f"step {steps[0].step} says that {told:g} tokens were trained, and {planned} were planned")

    def _took(self, lineages: list[LineageWork], step: StepRecord) -> None:
        """The runs of these lineages are trained: each as its record says, and by no other step."""
        attempts = {Attempt(item.run, item.attempt) for item in lineages}
        for each in attempts:
            record = self._world.run_record(each.run)
            if record is None or record.attempt != each.attempt:
                now = "no record" if record is None else f"attempt {record.attempt}"
                self.violated(f"step {step.step} has attempt {each.attempt} of {each.run}, which has {now}")
            before = self._trained.setdefault(each.run, step.step)
            if before != step.step:
                self.violated(f"{each.run} is trained by step {before} and by step {step.step}")
        if len({each.run for each in attempts}) < len(attempts):
            self.violated(f"step {step.step} has a run twice: {sorted(map(str, attempts))}")
        world = self._world
        known = {node.name for node in world.living() if not world.troubled(node.name)}
        world.later(COPIES_S, lambda: self._copies_go(step, known))

    def _micro_steps(self, group: GroupId, step: StepRecord) -> list[MicroStepId]:
        world = self._world
        kv = now(world.server.get(world.keys.group(group)))
        assert kv is not None
        runs: list[SettledRun] = []
        for run in typed.versioned(kv, GroupRecord).record.runs:
            record = world.run_record(run)
            if record is None or record.state is not RunState.SETTLED:
                self.violated(f"step {step.step} has group {group}, whose run {run} has not settled")
                continue
            if record.outcome is not None and record.trace is not None:
                runs.append(SettledRun(run, record.attempt, record.reward, record.outcome, record.trace))
        spec = world.spec
        made = plan(
            SettledGroup(group, tuple(runs)), step.version - 1, spec.batch.staleness, spec.batch, spec.loss, step.step
        )
        return [work.micro_step for work in made.micro_steps]

    # ------------------------------------------------------------------ engines and replicas

    def began(self, engine: Engine, request: Sampling) -> None:
        other = self._live.get(request.call)
        if other is not None:
            self.violated(f"{request.call} is live on {other.child.name} and on {engine.child.name}")
        self._live[request.call] = engine

    def ended(self, engine: Engine, request: Sampling) -> None:
        if self._live.get(request.call) is engine:
            del self._live[request.call]

    def engine_gone(self, engine: Engine) -> None:
        for call in [call for call, at in self._live.items() if at is engine]:
            del self._live[call]

    def engine_memory(self, cell: CellId, engine: Engine) -> None:
        self._engines[cell] = engine
        self._memory(cell)

    def replica_memory(self, cell: CellId, replica: Replica) -> None:
        self._replicas[cell] = replica
        self._memory(cell)

    def _memory(self, cell: CellId) -> None:
        engine, replica = self._engines.get(cell), self._replicas.get(cell)
        if engine is None or replica is None or not (engine.child.alive and replica.child.alive):
            return
        if replica.in_memory and not engine.released:
            self.violated(f"engine and replica of {cell} hold memory together")

    def stepped(self, order: OptimizerStep, merged: tuple[MicroStep, ...]) -> str:
        """The digest of the snapshot that was made of these sums."""
        digest = f"digest-{order.version}-{len(self._sums)}"
        self._sums[digest] = merged
        return digest

    # ------------------------------------------------------------------ what runs leave, and its copies

    def left(self, run: RunId, attempt: int, lineages: tuple[Lineage, ...]) -> None:
        """What a run's gateway has journaled is closed with this."""
        known = self._left.setdefault(Attempt(run, attempt), lineages)
        if known != lineages:
            self.violated(f"attempt {attempt} of {run} was closed twice, with other tokens")

    def read(self, item: LineageWork, found: Lineages) -> None:
        """A replica is given this to train."""
        whole = self._left.get(Attempt(item.run, item.attempt), ())
        if found.lineages != tuple(lineage for lineage in whole if lineage.index == item.index):
            self.violated(f"attempt {item.attempt} of {item.run} is trained on other tokens than it has left")

    def copied(self, holder: str, message: PutAway) -> None:
        """A node says that it has the copy whole."""
        if LINEAGES in message.files:
            attempt = Attempt(message.run, message.attempt)
            self._copies.setdefault((attempt, message.node), set()).add(holder)

    def confirmed(self, attempt: Attempt, writer: str, holder: str) -> None:
        """A run is closed, and its gateway goes by it that this node has its copy whole."""
        if not self._world.nodes[holder].dead and holder not in self._copies.get((attempt, writer), ()):
            self.violated(f"{holder} is said to have a whole copy of {attempt.run}, and has none")

    def _run(self, put: Put, writer: str) -> None:
        before, run = self._runs.get(put.key), unpack(put.value, RunRecord)
        self._runs[put.key] = run
        if before is None or before.state is not RunState.SETTLED:
            return
        if run.state is RunState.QUEUED:
            self._again(before, writer.partition("/")[0])
        elif run.node != before.node:
            left = lineages_path(self._world.job_of(run.node).trajectories, run.run, run.attempt)
            if not left.exists():
                self.violated(f"{run.run} is to be trained from {run.node}, which has not taken it over")

    def _again(self, run: RunRecord, leader: str) -> None:
        """What a run has left is given up, and it is run again: nobody who is well may have had a copy."""
        world = self._world
        for holder in self._copies.get((Attempt(run.run, run.attempt), run.node), ()):
            there = now(world.server.get(world.keys.node(NodeId(holder)))) is not None
            if there and not world.nodes[holder].dead and not world.troubled(holder, leader):
                self.violated(f"{run.run} is run again, and {holder} has a copy of what attempt {run.attempt} has left")

    def _copies_go(self, step: StepRecord, known: set[str]) -> None:
        """`known` were well when the step was taken."""
        world = self._world
        well = {name for name in known if not world.nodes[name].dead and not world.troubled(name)}
        if world.finished or world.disturbed():
            return
        for node in well:
            for place in HeldCopies(world.job_of(node).copies).places():
                if self._trained.get(place.run) == step.step and place.copy_of in well:
                    self.violated(f"{node} has a copy of {place.run} still, which step {step.step} has trained")

    # ------------------------------------------------------------------ from time to time

    def look(self) -> None:
        world = self._world
        self._leaders()
        self._owners()
        self._routed()
        sizes = {
            "tasks": (world.loop.unfinished_tasks, 500),
            "timers": (world.loop.timers, 600),
            "asks": (world.net.waiting, 150),
            "leases": (len(world.server._leases), 4 * len(world.layout.nodes) + 4),
        }
        for replica in self._replicas.values():
            sizes[f"staged sums of {replica.cell}"] = (len(replica.staged), 20)
        for node in world.nodes.values():
            if node.site is not None:
                sizes[f"routes of {node.name}"] = (len(node.site.routes), len(world.layout.cells))
                sizes[f"journals of {node.name}"] = (len(node.machine.journal.runs), 60)
                sizes[f"open runs of {node.name}"] = (len(node.site.open_runs), world.spec.harness.max_live + 4)
        for what, (size, most) in sizes.items():
            if size > most:
                self.violated(f"{size} {what}, at most {most} are right")
        for error in world.loop.errors:
            self.violated(f"nobody caught {error}")

    def _leaders(self) -> None:
        """Who goes by a token is the leader by the store too: it stops before another can begin."""
        leads = self._world.leading()
        for node in self._world.nodes.values():
            token = node.token()
            if token not in (0, leads):
                self.violated(f"{node.name} goes by token {token}, and {leads} leads")

    def _owners(self) -> None:
        world = self._world
        time_s = world.loop.time()
        records = world.run_records()
        for run in records:
            owned = run.state is RunState.SETTLED or world.disturbed()
            if run.state is RunState.LIVE:
                owned = owned or world.harness_lives(run) or world.begins(run.node)
            elif run.state is RunState.QUEUED:
                owned = owned or not world.has_room(run.node, records)
            if owned:
                self._unowned_s.pop(run.run, None)
            elif time_s - self._unowned_s.setdefault(run.run, time_s) > LEASE_S + GRACE_S:
                self.violated(f"{run.run} is {run.state.value} and nobody has seen to it for {LEASE_S + GRACE_S:g} s")

    def _routed(self) -> None:
        world = self._world
        time_s = world.loop.time()
        for cell, order in world.role_records():
            serves = order.observed is Role.ROLLOUT and order.version == max(self._version, 0)
            if not serves or world.finished or world.disturbed() or world.routed(cell):
                self._unrouted_s.pop(cell, None)
            elif time_s - self._unrouted_s.setdefault(cell, time_s) > ROUTED_S:
                self.violated(f"{cell} could serve, and the gateway has not known it for {ROUTED_S:g} s")

    def settled(self) -> None:
        """After the job's end."""
        world = self._world
        kv = now(world.server.get(world.keys.job))
        job = typed.versioned(kv, JobRecord).record if kv is not None else None
        if job is None or job.state is not JobState.FINISHED:
            self.violated(f"the job is {job.state.value if job else 'not there'} ({job.reason if job else ''})")
        if self._version != world.spec.job.steps:
            self.violated(f"the job ended at version {self._version}")
        for run in world.run_records():
            if run.state is not RunState.SETTLED:
                self.violated(f"{run.run} is {run.state.value} after the job's end")
        for process, name in world.open_spans():
            self.violated(f"span {name!r} of {process} has never ended")
