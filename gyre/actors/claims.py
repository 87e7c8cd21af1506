"""A cell's work in train: claim a micro-step, run it, and ship the gradient sums; the loop of DESIGN §8.

Sums are shipped when there is nothing left to claim, so that a batch waits for nobody, and when the cell leaves. While
the core's replica cannot take them they are kept and shipped later: it may be starting again. The core's ledger has the
last word on every shipment: sums that it refuses are gone and their micro-steps wait again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping

from gyre.actors.messages import Ok, Place
from gyre.actors.messages_core import Claim, ClaimMicroStep, GiveBack, Merged, SumsStaged
from gyre.actors.messages_replica import DropOwnSums, MicroStep, MicroStepDone, RunMicroStep, ShipSums, SumsShipped
from gyre.actors.remote import RemoteRef
from gyre.actors.site import Site
from gyre.errors import GyreError, NotLoaded, OthersAway, Refused, Unavailable
from gyre.ids import CellId, MicroStepId, NodeId

ASK_S = 600.0
"""For an answer of the core actor, which may wait for its replica's turn."""
MICRO_STEP_S = 3600.0
SHIP_S = 300.0
IDLE_S = 0.2
FAILED_S = 1.0
TRIES = 5
LAST_TRIES = 10
"""Shipments that a cell tries before it leaves without having shipped."""


class Claims:
    """The claims of one stay in train, at one version. `on_busy` is told when a micro-step begins and ends."""

    def __init__(
        self, site: Site, cell: CellId, replica: RemoteRef, version: int, on_busy: Callable[[bool], None]
    ) -> None:
        self._site = site
        self._cell = cell
        self._replica = replica
        self._version = version
        self._on_busy = on_busy
        self._leaving = asyncio.Event()
        self._done: dict[MicroStepId, Mapping[str, float]] = {}
        """What was run and not shipped, and its metrics. The replica may hold less: a new core has its replica drop all."""
        self._failures = 0
        self._kept = False
        """The last shipment was not taken; the sums are still ours."""

    @property
    def holds(self) -> bool:
        """Whether the replica has sums that nobody else tells of."""
        return bool(self._done)

    @property
    def version(self) -> int:
        return self._version

    def leave(self) -> None:
        """Claim no more; what runs is finished."""
        self._leaving.set()

    def stay(self) -> None:
        """The cell does not leave after all."""
        self._leaving.clear()

    async def work(self) -> None:
        """Claim and run micro-steps until `leave`.

        Raises Unavailable when the replica is gone, and NotLoaded when it does not hold our version any more: a step that
        was given up leaves it so, and our cell may hear late that it has to end it.
        """
        while not self._leaving.is_set():
            claim = await self._site.core.ask(ClaimMicroStep(self._cell, self._version), ASK_S, Claim)
            if claim.work is not None:
                await self._run(claim.work, claim.homes)
                continue
            pause_s = IDLE_S if await self._ship() else FAILED_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._leaving.wait()
            except TimeoutError:
                continue

    async def _run(self, work: MicroStep, homes: Mapping[str, NodeId]) -> None:
        gateways = {run: self._site.place(node, "gateway") for run, node in homes.items()}
        if away := sorted({homes[run] for run, place in gateways.items() if place is None}):
            await self._put_off(f"{work.micro_step} waits for the gateway of {', '.join(away)}")
            return
        away = ""
        self._on_busy(True)
        try:
            order = RunMicroStep(work, {run: place for run, place in gateways.items() if place is not None})
            done = await self._replica.ask(order, MICRO_STEP_S, MicroStepDone)
        except (Unavailable, NotLoaded):  # no micro-step has failed
            raise
        except OthersAway as error:
            away = str(error)
        except GyreError as error:
            await self._fail(f"{work.micro_step} on {self._cell} failed ({error})")
        else:
            self._failures = 0
            sums = {**done.metrics, "seconds_sum": done.seconds, "tokens_count": float(work.tokens)}
            self._done[work.micro_step] = sums
        finally:
            self._on_busy(False)
        if away:
            await self._put_off(f"{work.micro_step} waits ({away})")

    async def _put_off(self, reason: str) -> None:
        """What it takes is there anew in a moment, or its runs are run again elsewhere: nobody has failed."""
        await self._ship()
        await self._drop(reason)
        await asyncio.sleep(FAILED_S)

    async def _fail(self, reason: str) -> None:
        """What the replica holds cannot be told any more: forget it and let the micro-steps be done again."""
        await self._drop(reason)
        self._failures += 1
        if self._failures >= TRIES:
            self._site.fail(f"{self._failures} micro-steps in a row failed: {reason}")
        await asyncio.sleep(FAILED_S)

    async def _drop(self, reason: str) -> None:
        self._site.say(f"{reason}; its micro-steps are given back")
        self._kept = False
        self._done.clear()
        await self._replica.ask(DropOwnSums(), MICRO_STEP_S, Ok)
        await self._site.core.ask(GiveBack(self._cell), ASK_S, Ok)

    async def ship_rest(self) -> None:
        """Before the cell leaves: ship what is left, or give it back when nobody takes it."""
        for _ in range(LAST_TRIES):
            if await self._ship():
                return
            await asyncio.sleep(FAILED_S)
        await self._drop(f"{self._cell} leaves and the core's replica does not take its sums")

    async def _ship(self) -> bool:
        """Send the sums of what was run since the last time, if any, and have them merged.

        False: the core's replica does not take them now. They stay ours as long as the ledger lets us hold them.
        """
        if not self._done:
            return True
        # A new name each time: a transfer whose answer was lost may lie staged, and is never merged.
        transfer = f"{self._cell}-{secrets.token_hex(6)}"
        try:
            shipped = await self._replica.ask(ShipSums(self._core(), transfer), SHIP_S, SumsShipped)
        except (Unavailable, NotLoaded):
            raise
        except GyreError as error:
            if self._cell == self._site.core_cell:
                await self._fail(f"the sums of {self._cell} could not be kept for the batch ({error})")
                return True
            if not self._kept:
                self._site.say(f"the sums of {self._cell} are shipped later ({error})")
            self._kept = True
            return False
        metrics = Counter({"sums_error_sum": shipped.error, "transfer_count": 1.0})
        for name in shipped.micro_steps:
            metrics.update(self._done[name])
        message = SumsStaged(self._cell, transfer, shipped.micro_steps, self._version, dict(metrics))
        self._kept = False
        self._done.clear()
        await self._site.core.ask(message, ASK_S, Merged)
        return True

    def _core(self) -> Place | None:
        """Where the core's replica takes sums; None when ours is that one. Raises Refused while it is not known."""
        core = self._site.directory.core
        if core is None:
            raise Refused("there is no core just now")
        if core.record.cell == self._cell:
            return None
        place = self._site.place(core.record.node, f"replica-{core.record.cell}")
        if place is None:
            raise Refused("where the core's replica is reached is not known just now")
        return place
