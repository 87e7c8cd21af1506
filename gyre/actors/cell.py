"""The cell actor: feeds its role machine (gyre.sched.role) and carries out what it returns.

Events come from the store (the leader's orders), from the core (a new authoritative version), from its two processes
(up, died), and from its own stages. Actions that take time are a stage: one task, whose end is the next event.

    order -> step(state, event) -> actions -> a stage's task -> event -> step …

The role machine decides; nothing here does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from gyre.actors.cell_processes import CellProcesses
from gyre.actors.claims import Claims
from gyre.actors.gateways import STAGE_S, Gateways, insist
from gyre.actors.messages import (
    Authority,
    ClusterChanged,
    DrainEngine,
    DrainReport,
    EngineRoute,
    GetCellStatus,
    LeaveEngine,
    Ok,
)
from gyre.actors.messages_core import CoreLeaving, CoreLost, GiveBack
from gyre.actors.messages_gyrectl import CellStatus
from gyre.actors.mirror import Mirror
from gyre.actors.runtime import Actor, handles
from gyre.actors.site import Site
from gyre.actors.switch_log import SwitchLog
from gyre.children import Child
from gyre.errors import GyreError
from gyre.ids import CellId
from gyre.sched import cell as role
from gyre.sched.role import step
from gyre.store.protocol import Compare, Txn
from gyre.store.records import CellRoleRecord, Role, SnapshotRecord
from gyre.store.typed import put_record

_STAGES: dict[type[role.Action], role.Stage] = {
    role.Drain: role.Stage.DRAIN,
    role.ReleaseEngine: role.Stage.RELEASE,
    role.ResumeEngine: role.Stage.RESUME,
    role.LoadWeights: role.Stage.WEIGHTS,
    role.LoadReplica: role.Stage.LOAD,
    role.ShipSums: role.Stage.SHIP,
    role.OffloadReplica: role.Stage.UNLOAD,
}


@dataclass(frozen=True)
class _Heard:
    """An event for the role machine. `serial` is that of the stage it ends; 0: it comes from outside."""

    event: role.Event
    serial: int = 0


class CellActor(Actor):
    def __init__(self, site: Site, cell: CellId) -> None:
        self._site = site
        self._cell = cell
        self._processes = CellProcesses(site, cell)
        self._gateways = Gateways(site)
        self._unsubscribe: Callable[[], None] = lambda: None
        self._state = role.CellState()
        self._log = SwitchLog(site, cell)
        self._running: asyncio.Task[None] | None = None
        self._claims: Claims | None = None
        self._claiming: asyncio.Task[None] | None = None
        self._accepting = False
        self._leaving = False
        """The node ends: our engine takes no request any more."""
        self._orders = Mirror(site.store, site.keys.cell_role(cell), CellRoleRecord)

    async def pre_start(self) -> None:
        site = self._site
        key = site.keys.cell_role(self._cell)
        first = CellRoleRecord(Role.ROLLOUT, Role.RESUMING, 0, 0, "", -1)
        await site.store.commit(Txn((Compare.created(key, 0),), (put_record(key, first),)))
        found = await site.store.get(key, CellRoleRecord)
        snapshot = await site.store.get(site.keys.snapshot, SnapshotRecord)
        assert found is not None
        assert snapshot is not None
        before = found.record
        self._state = role.CellState(
            desired=before.desired,
            goal=before.desired,
            epoch=before.epoch,
            token=before.token,
            traceparent=before.traceparent,
        )
        self.task(self._orders.follow(self._look_at_order))
        self._unsubscribe = site.directory.subscribe(lambda: self.ref.tell(ClusterChanged()))
        await self._turn(role.AuthoritativeVersion(snapshot.record.version))
        engine = await self._processes.adopt_engine(before.observed)
        if engine is None:
            await self._close_left_route()
        # Before the engine may take memory: one that is adopted has given its own back, one that is not is dead.
        replica = await self._processes.adopt_replica()
        if not replica:
            await self._processes.stop_replica()
        if engine is None:
            await self._turn(role.EngineDied("not started yet"))
        else:
            self._watch(self._processes.engine, role.EngineDied)
            await self._turn(role.EngineUp(engine.version, engine.released))
        if replica:
            self._watch(self._processes.replica, role.ReplicaDied)
            await self._turn(role.ReplicaUp())
        else:
            await self._turn(role.ReplicaDied("not started yet"))

    async def post_stop(self) -> None:
        self._unsubscribe()
        self._log.abandon("the cell's actor ended")
        await self._processes.close()

    # ------------------------------------------------------------------------------------------ what is heard

    def _look_at_order(self) -> None:
        seen = self._orders.items.get(self._site.keys.cell_role(self._cell))  # c10's key begins as c1's does
        if seen is not None:
            order = seen.record
            self.ref.tell(_Heard(role.DesiredRole(order.desired, order.epoch, order.token, order.traceparent)))

    @handles(Authority)
    async def on_authority(self, message: Authority) -> None:
        await self._turn(role.AuthoritativeVersion(message.version))

    @handles(CoreLost)
    async def on_core_lost(self, _: CoreLost) -> None:
        """The core actor does not know any more what the replica holds: end it, a fresh one loads the snapshot.

        One without parameters is spared: it loads them before it is of use, and its sums are dropped then.
        """
        if self._processes.replica is not None and self._state.replica_version >= 0:
            self._processes.replica.signal(9)

    @handles(_Heard)
    async def on_heard(self, message: _Heard) -> None:
        if message.serial and message.serial != self._state.serial:
            return  # of a stage that a death or a failure has ended before
        event = message.event
        if isinstance(event, role.DesiredRole) and event.epoch <= self._state.epoch:
            return
        await self._turn(event)

    # ------------------------------------------------------------------------------------------ the role machine

    async def _turn(self, event: role.Event) -> None:
        before = self._state
        self._state, actions = step(before, event)
        if self._state.epoch != before.epoch and self._state.goal is not before.role:
            self._log.begin(self._state.epoch, before.role, self._state.desired, self._state.traceparent)
        self._log.stage(self._state.stage.value if self._state.stage else "")
        if isinstance(event, role.StageFailed | role.StageTimedOut):
            reason = event.reason if isinstance(event, role.StageFailed) else f"no end within {STAGE_S:g} s"
            self._log.failed(f"{event.stage.value}: {reason}")
            self._site.warn(f"{self._cell}: {event.stage.value} failed ({reason})")
        if isinstance(event, role.EngineDied | role.ReplicaDied):
            self._log.failed(event.reason)
        for action in actions:
            await self._carry_out(action)
        if self._state.settled:
            await self._log.settle(self._state.role)

    async def _carry_out(self, action: role.Action) -> None:
        site = self._site
        match action:
            case role.StopRouting():
                self._accepting = False
                if self._processes.engine_url:
                    await self._route()
            case role.OpenRouting():
                self._accepting = not self._leaving
                await self._route()
            case role.Report(now, reason):
                if reason:
                    site.say(f"{self._cell}: {now.value} ({reason})")
                await self._report(now)
                if now is Role.FAILED and [spec.cell for spec in site.directory.specs] == [self._cell]:
                    site.fail(f"the only cell failed: {reason}")
            case role.Refuse(reason):
                site.warn(f"{self._cell}: an order is refused: {reason}")
            case role.AllowClaims():
                self._allow_claims()
            case role.StopClaims():
                if self._claims is not None:
                    self._claims.leave()
            case role.AbandonClaims():
                await self._abandon_claims()
            case role.StopEngine():
                await self._processes.stop_engine()
            case role.StopReplica():
                self._tell_lost()
                await self._processes.stop_replica()
            case role.RestartEngine():
                self._begin(self._start_engine, role.Stage.ENGINE)
            case role.RestartReplica():
                self._tell_lost()
                self.task(self._start_replica(), self._heard, self._replica_failed)
            case _:
                self._begin(lambda: self._stage(action), _STAGES[type(action)])

    def _begin(self, work: Callable[[], Awaitable[role.Event]], stage: role.Stage) -> None:
        """Run a stage; its end is an event that counts only while nothing else has ended the stage."""
        if self._running is not None and not self._running.done():
            self._running.cancel()
        serial = self._state.serial

        async def run() -> role.Event:
            try:
                async with asyncio.timeout(STAGE_S):
                    return await work()
            except TimeoutError:
                return role.StageTimedOut(stage)
            except GyreError as error:
                return role.StageFailed(stage, str(error))

        self._running = self.task(run(), lambda event: _Heard(event, serial))

    def _heard(self, event: role.Event) -> _Heard:
        return _Heard(event)

    def _watch(self, child: Child | None, died: Callable[[str], role.Event]) -> None:
        """Hear of the child's end, whenever it comes, unless another has its place by then."""
        assert child is not None

        async def wait() -> role.Event | None:
            status = await child.wait()
            if child not in (self._processes.engine, self._processes.replica):
                return None
            self._processes.say_ended(child, status)
            return died(f"{child.name} ended: {status}")

        self.task(wait(), lambda event: None if event is None else _Heard(event))

    # ------------------------------------------------------------------------------------------ stages

    async def _stage(self, action: role.Action) -> role.Event:
        match action:
            case role.Drain(move):
                report, left = await self._gateways.drain(DrainEngine(self._cell, move))
                self._log.drained(report)
                if left:
                    await self._processes.end_requests()
                return role.Drained()
            case role.ReleaseEngine():
                await self._processes.release_engine()
                return role.Released()
            case role.ResumeEngine():
                await self._processes.resume_engine()
                return role.Resumed()
            case role.LoadWeights(version):
                return role.WeightsLoaded(await self._processes.load_weights(version))
            case role.LoadReplica(version):
                return role.Loaded(await self._processes.load_replica(version))
            case role.ShipSums():
                await self._ship_rest()
                return role.SumsShipped()
            case role.OffloadReplica():
                await self._processes.offload_replica()
                return role.Unloaded()
            case _:
                raise AssertionError(f"{action} is no stage")

    async def _start_engine(self) -> role.Event:
        version = self._state.authoritative
        await self._processes.start_engine(version)
        self._watch(self._processes.engine, role.EngineDied)
        return role.EngineUp(version)

    async def _start_replica(self) -> role.Event:
        await self._processes.start_replica()
        self._watch(self._processes.replica, role.ReplicaDied)
        return role.ReplicaUp()

    def _replica_failed(self, error: Exception) -> _Heard:
        if not isinstance(error, GyreError):
            raise error
        return _Heard(role.ReplicaDied(str(error)))

    # ------------------------------------------------------------------------------------------ claims

    def _allow_claims(self) -> None:
        """A cell that was to leave and is ordered back goes on with what it holds: its sums, and what is told of them."""
        claims, works = self._claims, self._claiming is not None and not self._claiming.done()
        if claims is not None and (works or claims.holds) and claims.version == self._state.replica_version:
            claims.stay()
            if works:
                return
        else:
            claims = self._claims = Claims(
                self._site, self._cell, self._processes.replica_ref, self._state.replica_version, self._busy
            )
        self._claiming = self.task(claims.work(), on_error=self._claims_failed)

    def _busy(self, busy: bool) -> None:
        self.ref.tell(_Heard(role.MicroStepBegan() if busy else role.MicroStepEnded()))

    def _claims_failed(self, error: Exception) -> object | None:
        """The replica is gone, which its own end reports; or somebody of ours is, which the log shall say."""
        self._site.say(f"{self._cell} stopped claiming: {error}")
        if self._processes.replica is not None:
            self._processes.replica.signal(9)
        return None

    async def _ship_rest(self) -> None:
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
        if self._claims is not None:
            await self._claims.ship_rest()
        if self._cell == self._site.core_cell:
            await self._site.core.ask(CoreLeaving(), STAGE_S, Ok)

    def _tell_lost(self) -> None:
        """The replica is ended or is dead, for whatever reason: with the core's go the sums of the batch."""
        if self._cell == self._site.core_cell:
            self._site.core.tell(CoreLost())

    async def _abandon_claims(self) -> None:
        if self._claiming is not None:
            self._claiming.cancel()
        self._claims = self._claiming = None
        if self._cell == self._site.core_cell:
            self._site.core.tell(CoreLeaving())
        await insist(self._site.core, GiveBack(self._cell), Ok, STAGE_S)

    # ------------------------------------------------------------------------------------------ what is told

    async def _route(self) -> None:
        await self._gateways.route(
            EngineRoute(
                cell=self._cell,
                url=self._processes.engine_url,
                version=self._state.engine_version,
                accepting=self._accepting,
                slots=self._site.spec.cells.slots,
            )
        )

    async def _close_left_route(self) -> None:
        """The gateway may go by what an earlier life of ours told it, and that engine is to be ended."""
        left = self._site.routes.get(self._cell)
        if left is not None and left.accepting:
            await self._gateways.route(replace(left, accepting=False))

    @handles(LeaveEngine, concurrent=True)
    async def leave_engine(self, _: LeaveEngine) -> DrainReport:
        self._leaving, self._accepting = True, False
        if self._processes.engine_url:
            await self._route()
        report, _left = await self._gateways.drain(DrainEngine(self._cell, move=True))
        return report

    @handles(ClusterChanged)
    async def on_cluster_changed(self, _: ClusterChanged) -> None:
        """A gateway that has joined, or joined again, has to know our engine."""
        if self._processes.engine_url and self._gateways.joined():
            await self._route()

    async def _report(self, now: Role) -> None:
        """Write the observed role beside the desired one, which may be a newer order meanwhile."""
        site, key = self._site, self._site.keys.cell_role(self._cell)
        version = self._state.engine_version if now is Role.ROLLOUT else self._state.replica_version
        while True:
            found = await site.store.get(key, CellRoleRecord)
            assert found is not None
            rested = self._state.epoch if self._state.settled else found.record.rested
            put = put_record(key, replace(found.record, observed=now, version=version, rested=rested))
            if (await site.store.commit(Txn((Compare.modified(key, found.mod_revision),), (put,)))).succeeded:
                return

    @handles(GetCellStatus)
    async def status(self, _: GetCellStatus) -> CellStatus:
        engine, replica, gateway = self._processes.engine, self._processes.replica, self._site.gateway_status
        return CellStatus(
            cell=self._cell,
            core=self._cell == self._site.core_cell,
            role=self._state.role,
            version=self._state.engine_version if self._state.routing else self._state.replica_version,
            in_flight=gateway.in_flight.get(self._cell, 0) if gateway else 0,
            engine_pid=engine.pid if engine and engine.alive else 0,
            replica_pid=replica.pid if replica and replica.alive else 0,
            kv_carrier=self._processes.kv_carrier,
        )
