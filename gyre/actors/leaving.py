"""A gyred that is told to end by a signal: what it gives away before it does.

Others take the runs that wait here; those that live here have `node.drain_s` to come to their end; what our engines have of
other nodes' runs goes on there with its KV. A second signal cuts each of these short.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from gyre.actors.messages import AwaitEmpty, DrainReport, Leave, LeaveEngine, Ok
from gyre.actors.messages_journals import Copies, GetCopies
from gyre.actors.site import Site
from gyre.errors import GyreError
from gyre.service import Service

LEAVE_S = 5.0
"""For others to take the queued runs of a node that was told to end; then it ends all the same."""
COPIES_S, LOOK_S = 5.0, 0.2
HAND_OVER_S = 20.0
"""For the engines' requests to go on elsewhere; what has not by then is computed again."""


class Told:
    """Whether gyred was told to end by a signal, whatever it is at; `at_once` by a second one."""

    def __init__(self) -> None:
        self.ended, self.at_once = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._hear)

    def _hear(self) -> None:
        (self.at_once if self.ended.is_set() else self.ended).set()


async def end_when_told(
    site: Site, told: Told, ended: asyncio.Event, service: Service, drain_s: float, end_s: float
) -> None:
    """Set `ended` when a signal has come and all is given away. `end_s`: what the end itself takes at most after that."""
    await told.ended.wait()
    room_s = LEAVE_S + drain_s + HAND_OVER_S + end_s
    service.stopping("waits for its live runs" if drain_s else "ends what it has at hand", room_s)
    if not site.stopping:
        site.say("ending: gyred was sent a signal to end")
        await _leave(site)
        if drain_s:
            await _unless_at_once(site, told, _drain(site, drain_s))
            service.status("ends what it has at hand")
            await _unless_at_once(site, told, _hand_over(site))
    site.stopping = True
    ended.set()


async def _unless_at_once(site: Site, told: Told, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, which a second signal cuts short. The node ends, whatever becomes of it."""
    doing, at_once = asyncio.ensure_future(work), asyncio.ensure_future(told.at_once.wait())
    try:
        await asyncio.wait((doing, at_once), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (doing, at_once):
            task.cancel()
        done, _ = await asyncio.gather(doing, at_once, return_exceptions=True)
    if isinstance(done, Exception):
        site.warn(f"the node ends at once: {done!r}")


async def _drain(site: Site, drain_s: float) -> None:
    """Until no run lives here, and what they left is with another node too: `drain_s` at most."""
    site.leaving = True
    site.say(f"the runs that live here have {drain_s:g} s to come to their end; a second signal ends them at once")
    if not any(room.max_live and not room.draining for room in site.directory.rooms if room.node != site.node):
        site.warn("no other node takes runs: what still lives here when that time is over waits for one that does")
    try:
        async with asyncio.timeout(drain_s):
            await _emptied(site, drain_s)
    except TimeoutError:
        site.warn("what lives here still begins again elsewhere")


async def _hand_over(site: Site) -> None:
    """What our engines have of other nodes' runs goes on at other engines, with its KV, where any serves."""
    if not any(route.accepting for cell, route in site.routes.items() if cell not in site.cells):
        return
    cells = {cell: ref for cell in site.cells if (ref := site.refs.get(f"cell-{cell}")) is not None}
    asks = (ref.ask(LeaveEngine(), HAND_OVER_S, DrainReport) for ref in cells.values())
    reports = await asyncio.gather(*asks, return_exceptions=True)
    for cell, report in zip(cells, reports, strict=True):
        if isinstance(report, DrainReport):
            site.say(
                f"{cell}: {report.requests} requests go on elsewhere, {report.moved_blocks} blocks of KV moved there"
            )
        else:
            site.warn(f"{cell}: what its engine has of other nodes' runs is computed again there ({report!r})")


async def _emptied(site: Site, within_s: float) -> None:
    while True:
        try:
            await site.refs["node"].ask(AwaitEmpty(), within_s, Ok)
            copies = None
            if site.has_copies and len(site.directory.nodes) > 1:
                copies = await site.gateway.ask(GetCopies(site.node), COPIES_S, Copies)
            if copies is None or not copies.behind_runs:
                return
        except (GyreError, KeyError):  # an actor has just failed and comes again, or was just beginning
            pass
        await asyncio.sleep(LOOK_S)


async def _leave(site: Site) -> None:
    """Have others take the runs that wait here: they need not wait until we are gone."""
    if not any(node != site.node for node in site.directory.nodes):
        return
    try:
        async with asyncio.timeout(LEAVE_S):
            for name in ("member", "node"):
                await site.refs[name].ask(Leave(), LEAVE_S, Ok)
    except (TimeoutError, GyreError, KeyError) as error:  # KeyError: it was just beginning
        site.warn(f"nobody has taken the runs that wait here; they are taken when we are gone ({error!r})")
