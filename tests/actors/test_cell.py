"""The cell actor around its role machine: what it does to its processes and tells the others, in which order, through
orders, new versions, deaths, failures and its own restarts."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gyre.actors.cell import CellActor
from gyre.actors.cell_processes import AdoptedEngine
from gyre.actors.claims import TRIES
from gyre.actors.messages import Authority, DrainEngine, DrainReport, GetCellStatus, LeaveEngine, Ok, RouteChanged
from gyre.actors.messages_core import Claim, ClaimMicroStep, CoreLeaving, CoreLost, GiveBack, Merged, SumsStaged
from gyre.actors.messages_gyrectl import CellStatus
from gyre.actors.messages_replica import (
    DropOwnSums,
    DropSums,
    MicroStep,
    MicroStepDone,
    RunMicroStep,
    ShipSums,
    SumsShipped,
)
from gyre.actors.runtime import Actor, ActorSystem, Backoff, Ref, handles
from gyre.actors.site import Site
from gyre.children import ExitStatus
from gyre.errors import GyreError, NotLoaded, OthersAway, Unavailable
from gyre.ids import CellId, MicroStepId
from gyre.store.protocol import Compare, Txn
from gyre.store.records import CellRoleRecord, NodeRecord, Role, SwitchRecord
from gyre.store.typed import put_record

from .stand_ins import a_site, first_records, follow, until

CELL = CellId("c0")
DEADLINE_S = 20.0


@dataclass
class Process:
    """A child that lives until it is sent a signal."""

    name: str
    pid: int
    died: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def alive(self) -> bool:
        return not self.died.is_set()

    def signal(self, _: int) -> bool:
        self.died.set()
        return True

    async def wait(self) -> ExitStatus:
        await self.died.wait()
        return ExitStatus(signal=9)


@dataclass
class Machine:
    """What outlives the actor: the two processes, what was done to them and told to others, and the faults to come."""

    engine: Process | None = None
    engine_version: int = -1
    replica: Process | None = None
    pids: int = 100
    done: list[str] = field(default_factory=list)
    faults: dict[str, GyreError] = field(default_factory=dict)
    hold: dict[str, asyncio.Event] = field(default_factory=dict)
    replica_ref: Ref | None = None
    work: list[MicroStep] = field(default_factory=list)
    """What the core has to give to those who claim."""
    staged: list[SumsStaged] = field(default_factory=list)

    async def do(self, what: str) -> None:
        self.done.append(what)
        if what in self.hold:
            await self.hold[what].wait()
        if what in self.faults:
            raise self.faults.pop(what)

    def start(self, name: str) -> Process:
        self.pids += 1
        return Process(name, self.pids)


class Processes:
    """In place of gyre.actors.cell_processes.CellProcesses."""

    machine: Machine

    def __init__(self, site: Site, cell: CellId) -> None:
        self.cell = cell
        self.engine: Process | None = None
        self.replica: Process | None = None
        self.engine_url = ""
        self.kv_carrier = ""
        self.replica_ref = self.machine.replica_ref

    def say_ended(self, child: Process, status: ExitStatus) -> None:
        return

    async def close(self) -> None:
        return

    async def adopt_engine(self, observed: Role) -> AdoptedEngine | None:
        self.engine = self.machine.engine
        if self.engine is None or not self.engine.alive:
            return None
        await self.machine.do("adopt engine")
        self.engine_url = "http://engine"
        released = observed in (Role.LOADING, Role.TRAIN, Role.UNLOADING)
        return AdoptedEngine(-1 if released else self.machine.engine_version, released)

    async def start_engine(self, version: int) -> None:
        await self.stop_engine()
        await self.machine.do(f"start engine {version}")
        self.engine = self.machine.engine = self.machine.start("engine-c0")
        self.machine.engine_version = version
        self.engine_url = "http://engine"

    async def stop_engine(self) -> None:
        self.engine = None
        if self.machine.engine is not None:
            self.machine.engine.signal(9)

    async def release_engine(self) -> None:
        await self.machine.do("release engine")

    async def resume_engine(self) -> None:
        await self.machine.do("resume engine")

    async def load_weights(self, version: int) -> int:
        await self.machine.do(f"load weights {version}")
        self.machine.engine_version = version
        return version

    async def adopt_replica(self) -> bool:
        self.replica = self.machine.replica
        if self.replica is None or not self.replica.alive:
            return False
        await self.machine.do("adopt replica")
        return True

    async def start_replica(self) -> None:
        await self.stop_replica()
        await self.machine.do("start replica")
        self.replica = self.machine.replica = self.machine.start("replica-c0")

    async def stop_replica(self) -> None:
        self.replica = None
        if self.machine.replica is not None:
            self.machine.replica.signal(9)

    async def load_replica(self, version: int) -> int:
        await self.machine.do(f"load replica {version}")
        return version

    async def offload_replica(self) -> None:
        await self.machine.do("offload replica")


class Others(Actor):
    """Gateway and core in one."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @handles(RouteChanged)
    async def route(self, message: RouteChanged) -> Ok:
        route = message.route
        await self._machine.do(f"open {route.version}" if route.accepting else "close")
        return Ok()

    @handles(DrainEngine, concurrent=True)
    async def drain(self, message: DrainEngine) -> DrainReport:
        await self._machine.do("drain with KV" if message.move else "drain")
        return DrainReport(2, 3, 400, 0.1, 0.2)

    @handles(ClaimMicroStep)
    async def claim(self, message: ClaimMicroStep) -> Claim:
        if "claim" not in self._machine.done[-1:]:
            await self._machine.do("claim")
        return Claim(self._machine.work.pop(0) if self._machine.work else None, {})

    @handles(SumsStaged)
    async def sums(self, message: SumsStaged) -> Merged:
        self._machine.staged.append(message)
        return Merged(True)

    @handles(GiveBack)
    async def give_back(self, _: GiveBack) -> Ok:
        await self._machine.do("give back")
        return Ok()

    @handles(CoreLeaving)
    async def leaving(self, _: CoreLeaving) -> Ok:
        await self._machine.do("core leaves")
        return Ok()

    @handles(CoreLost)
    async def lost(self, _: CoreLost) -> None:
        await self._machine.do("core lost")


class Trainer(Actor):
    """The replica's actor: each micro-step has ten tokens."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._own: list[MicroStepId] = []

    @handles(RunMicroStep)
    async def run(self, message: RunMicroStep) -> MicroStepDone:
        await self._machine.do(f"run {message.work.micro_step}")
        self._own.append(message.work.micro_step)
        return MicroStepDone(message.work.micro_step, 0.1, {"token_count": 10.0})

    @handles(ShipSums)
    async def ship(self, message: ShipSums) -> SumsShipped:
        await self._machine.do("ship")
        shipped, self._own = tuple(self._own), []
        return SumsShipped(message.transfer, shipped, 4)

    @handles(DropSums)
    async def drop(self, _: DropSums) -> Ok:
        self._own.clear()
        return Ok()

    @handles(DropOwnSums)
    async def drop_own(self, _: DropOwnSums) -> Ok:
        self._own.clear()
        return Ok()


@dataclass
class Bench:
    site: Site
    machine: Machine

    async def order(self, desired: Role) -> None:
        key = self.site.keys.cell_role(CELL)
        while True:
            found = await self.site.store.get(key, CellRoleRecord)
            assert found is not None
            order = replace(found.record, desired=desired, epoch=found.record.epoch + 1, token=1)
            txn = Txn((Compare.modified(key, found.mod_revision),), (put_record(key, order),))
            if (await self.site.store.commit(txn)).succeeded:
                return

    async def until(self, *expected: str) -> None:
        """Until just these were done, in this order; they are then forgotten."""
        await until(lambda: len(self.machine.done) >= len(expected))
        await self.status()  # whatever else the actor was at is done by now
        assert tuple(self.machine.done) == expected
        self.machine.done.clear()

    async def until_role(self, enough: Callable[[CellRoleRecord], bool]) -> CellRoleRecord:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = await self.site.store.get(self.site.keys.cell_role(CELL), CellRoleRecord)
                if found is not None and enough(found.record):
                    return found.record
                await asyncio.sleep(0.01)

    async def status(self) -> CellStatus:
        return await self.site.cell(CELL).ask(GetCellStatus(), DEADLINE_S, CellStatus)

    async def in_rollout(self, version: int = 0) -> None:
        await self.until_role(lambda found: found.observed is Role.ROLLOUT and found.version == version)
        self.machine.done.clear()

    async def in_rollout_again(self) -> None:
        await self.until_role(lambda found: found.observed is Role.ROLLOUT)

    async def in_train(self, version: int = 0) -> None:
        await self.until_role(lambda found: found.observed is Role.TRAIN and found.version == version)

    async def switches(self) -> list[SwitchRecord]:
        listing = await self.site.store.range(f"{self.site.keys.root}switches/", SwitchRecord)
        return [item.record for item in listing.items]


@asynccontextmanager
async def a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    site, machine = a_site(tmp_path), Machine()
    monkeypatch.setattr("gyre.actors.cell.CellProcesses", type("Processes", (Processes,), {"machine": machine}))
    await first_records(site)
    async with ActorSystem.running("test") as system:
        await follow(site, system)
        for name in ("gateway", "core", "scheduler"):
            site.refs[name] = system.spawn(name, lambda: Others(machine))
        machine.replica_ref = system.spawn("trainer", lambda: Trainer(machine))
        site.refs["cell-c0"] = system.spawn("cell-c0", lambda: CellActor(site, CELL), restart=Backoff(initial_s=0.01))
        yield Bench(site, machine)
    await site.store.store.close()


async def test_it_starts_both_processes_and_opens_when_the_engine_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.until_role(lambda found: found.observed is Role.ROLLOUT)
        assert bench.machine.done.index("start engine 0") < bench.machine.done.index("open 0")
        assert sorted(bench.machine.done) == ["core lost", "open 0", "start engine 0", "start replica"]


async def test_a_cell_whose_node_ends_hands_on_what_its_engine_has_with_the_kv_and_opens_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.in_rollout()
        bench.machine.done.clear()
        report = await bench.site.refs["cell-c0"].ask(LeaveEngine(), DEADLINE_S, DrainReport)
        assert (report.requests, report.moved_blocks) == (2, 3)
        assert bench.machine.done == ["close", "drain with KV"]
        await bench.order(Role.TRAIN)
        await bench.in_train()
        await bench.order(Role.ROLLOUT)
        await bench.in_rollout()
        assert not [done for done in bench.machine.done if done.startswith("open")]


async def test_a_switch_there_and_back_and_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.in_rollout()
        await bench.order(Role.TRAIN)
        await bench.until("close", "drain with KV", "release engine", "load replica 0", "claim")
        await bench.in_train()
        await bench.order(Role.ROLLOUT)
        await bench.until("core leaves", "offload replica", "resume engine", "load weights 0", "open 0")
        there, back = await bench.switches()
        assert (there.start, there.end, there.moved_requests, there.moved_blocks) == (Role.ROLLOUT, Role.TRAIN, 2, 3)
        assert [stage.stage for stage in there.stages] == ["drain", "release", "load"]
        (drain,) = (span for span in bench.site.tracing.spans(there.trace_id) if span.name == "drain")
        told = {name: drain.attributes[name] for name in ("requests", "moved_blocks", "stop_s", "move_s")}
        assert told == {"requests": "2", "moved_blocks": "3", "stop_s": "0.1", "move_s": "0.2"}
        assert (back.start, back.end, back.reason) == (Role.TRAIN, Role.ROLLOUT, "")


async def test_a_cell_that_is_ordered_back_in_a_micro_step_tells_of_all_that_it_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Role] = []
    look = CellActor._look_at_order  # pyright: ignore[reportPrivateUsage]

    def look_and_note(self: CellActor) -> None:
        look(self)
        heard.extend(order.desired for order in self._orders.records)  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(CellActor, "_look_at_order", look_and_note)
    async with a_cell(tmp_path, monkeypatch) as bench:
        machine = bench.machine
        await bench.in_rollout()
        machine.work = [MicroStep(MicroStepId(name), 1, 0, (), 10) for name in ("one", "two")]
        machine.hold["run one"] = asyncio.Event()
        await bench.order(Role.TRAIN)
        await until(lambda: "run one" in machine.done)
        for back in (Role.ROLLOUT, Role.TRAIN):
            await bench.order(back)
            await until(lambda back=back: heard[-1] is back)
            await bench.status()  # what it has heard it has taken in
        machine.hold["run one"].set()
        await until(lambda: sum(len(sums.micro_steps) for sums in machine.staged) == 2)
        told = sum(sums.metrics["token_count"] for sums in machine.staged)
        assert told == 20.0


async def test_of_sums_that_a_new_core_had_dropped_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        machine = bench.machine
        await bench.in_rollout()
        machine.work = [MicroStep(MicroStepId(name), 1, 0, (), 10) for name in ("one", "two")]
        machine.hold["run one"] = asyncio.Event()
        await bench.order(Role.TRAIN)
        await until(lambda: "run one" in machine.done)
        machine.hold["claim"] = asyncio.Event()
        machine.hold["run one"].set()
        await until(lambda: machine.done[-1] == "claim")
        assert machine.replica_ref is not None
        await machine.replica_ref.ask(DropSums(), DEADLINE_S, Ok)
        machine.hold["claim"].set()
        await until(lambda: bool(machine.staged))
        (sums,) = machine.staged
        assert (sums.micro_steps, sums.metrics["token_count"]) == (("two",), 10.0)


@pytest.mark.parametrize("what", ["run one", "ship"])
async def test_a_replica_that_does_not_hold_the_version_any_more_is_ended_and_no_micro_step_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        machine = bench.machine
        await bench.in_rollout()
        machine.work = [MicroStep(MicroStepId("one"), 1, 0, (), 10)]
        machine.faults[what] = NotLoaded("no parameters are loaded")
        await bench.order(Role.TRAIN)
        await until(lambda: machine.done.count("load replica 0") == 2)
        assert machine.done.count("start replica") == 1, "after the one that it began with"
        assert machine.done.count("give back") == 1
        assert not machine.staged


async def test_micro_steps_whose_runs_cannot_be_had_are_put_off_and_none_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.actors.claims.FAILED_S", 0.0)
    async with a_cell(tmp_path, monkeypatch) as bench:
        machine = bench.machine
        await bench.in_rollout()
        failed: list[str] = []
        monkeypatch.setattr(bench.site, "fail", failed.append)
        names = [f"step-{number}" for number in range(2 * TRIES + 1)]
        machine.work = [MicroStep(MicroStepId(name), 1, 0, (), 10) for name in names]
        machine.faults = {f"run {name}": OthersAway("the lineages of r are not to be had") for name in names[1:]}
        await bench.order(Role.TRAIN)
        await until(lambda: machine.done.count("give back") == 2 * TRIES)
        assert [sums.micro_steps for sums in machine.staged] == [("step-0",)], "what was run before is not given away"
        assert not failed


async def test_a_gateway_that_has_joined_anew_is_told_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.in_rollout()
        await bench.site.store.put(bench.site.keys.node(bench.site.node), NodeRecord(bench.site.node, "", "again", 4))
        await bench.until("open 0")


async def test_a_new_version_in_either_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.in_rollout()
        bench.site.cell(CELL).tell(Authority(1))
        await bench.until("close", "drain", "load weights 1", "open 1")
        await bench.order(Role.TRAIN)
        await bench.in_train(1)
        bench.machine.done.clear()
        bench.site.cell(CELL).tell(Authority(2))
        await bench.until_role(lambda found: found.observed is Role.TRAIN and found.version == 2)
        assert [what for what in bench.machine.done if what != "claim"] == [
            "core leaves",
            "give back",
            "load replica 2",
        ]


async def test_a_drain_that_fails_leads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.in_rollout()
        bench.machine.faults["drain with KV"] = Unavailable("the gateway did not answer")
        await bench.order(Role.TRAIN)
        await bench.until("close", "drain with KV", "open 0")
        (switch,) = await bench.switches()
        assert (switch.desired, switch.end) == (Role.TRAIN, Role.ROLLOUT)
        assert "the gateway did not answer" in switch.reason


async def test_a_dead_replica_is_given_up_told_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.in_rollout()
        await bench.order(Role.TRAIN)
        await bench.until("close", "drain with KV", "release engine", "load replica 0", "claim")
        assert bench.machine.replica is not None
        bench.machine.replica.signal(9)
        await bench.until("core leaves", "give back", "core lost", "start replica", "load replica 0", "claim")


async def test_a_replica_that_dies_as_it_is_unloaded_is_told_of_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage fails before the death is heard of; what the core's replica had merged is gone all the same."""
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.in_rollout()
        await bench.order(Role.TRAIN)
        await bench.until("close", "drain with KV", "release engine", "load replica 0", "claim")
        bench.machine.faults["offload replica"] = Unavailable("the connection broke before the answer")
        await bench.order(Role.ROLLOUT)
        await bench.in_rollout_again()
        assert bench.machine.done[:4] == ["core leaves", "offload replica", "core lost", "start replica"]


async def test_a_dead_engine_is_closed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.in_rollout()
        assert bench.machine.engine is not None
        bench.machine.engine.signal(9)
        await bench.until("close", "start engine 0", "open 0")


async def test_a_sick_replica_is_ended_only_while_it_holds_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.in_rollout()
        before = (await bench.status()).replica_pid
        bench.site.cell(CELL).tell(CoreLost())
        assert (await bench.status()).replica_pid == before
        await bench.order(Role.TRAIN)
        await bench.in_train()
        bench.site.cell(CELL).tell(CoreLost())
        await until(lambda: bench.machine.replica is not None and bench.machine.replica.pid != before)


@pytest.mark.parametrize("stage", ["drain with KV", "release engine", "load replica 0"])
async def test_an_actor_that_fails_in_a_stage_comes_back_and_gets_there(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_cell(tmp_path, monkeypatch) as bench:
        await bench.in_rollout()
        bench.machine.hold[stage] = asyncio.Event()
        await bench.order(Role.TRAIN)
        await until(lambda: stage in bench.machine.done)
        await bench.status()
        bench.machine.hold.clear()
        bench.machine.done.clear()
        bench.site.cell(CELL).tell(Authority("a fault of ours"))  # type: ignore[arg-type]
        await bench.in_train()
        await until(lambda: "claim" in bench.machine.done)
        assert bench.machine.replica is not None
        assert bench.machine.replica.alive


async def test_a_stage_that_is_ended_before_its_first_step_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, cancelled = CellActor._begin, 0  # pyright: ignore[reportPrivateUsage]

    def begin_and_cancel(self: CellActor, work: Any, stage: Any) -> None:
        nonlocal cancelled
        begin(self, work, stage)
        if cancelled == 0:
            cancelled += 1
            assert self._running is not None  # pyright: ignore[reportPrivateUsage]
            self._running.cancel()  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(CellActor, "_begin", begin_and_cancel)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with a_cell(tmp_path, monkeypatch):
            await until(lambda: cancelled)
        gc.collect()
    assert [str(warning.message) for warning in warned if "never awaited" in str(warning.message)] == []
