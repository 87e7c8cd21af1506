"""A person's orders to the leader: what gyrectl asks of it, refused with the reason where it cannot be done."""

from __future__ import annotations

from gyre.actors.messages_gyrectl import DrainNode, EndJob, PauseJob, PinCell
from gyre.actors.site import Site
from gyre.actors.term import Term
from gyre.actors.view import View
from gyre.errors import Refused, Unavailable
from gyre.sched.orders import refuse_pin
from gyre.store.election import Verdict
from gyre.store.protocol import Delete
from gyre.store.records import DrainRecord, JobRecord, JobState, PinRecord
from gyre.store.typed import put_record


class PersonsOrders:
    """Each raises Refused, or Unavailable where another leads meanwhile."""

    def __init__(self, site: Site, view: View, term: Term) -> None:
        self._site = site
        self._view = view
        self._term = term

    async def pin(self, order: PinCell) -> None:
        cell, role, view = order.cell, order.role, self._view
        key = self._site.keys.pin(cell)
        if role is None:
            if cell not in view.pinned:
                raise Refused(f"{cell} is not pinned")
            outcome = await self._term.commit((), deletes=(Delete(key),))
            if outcome is Verdict.WRITTEN:
                view.pins.items.pop(key, None)
        else:
            records = {name: seen.record for name, seen in view.seen_roles.items()}
            if why := refuse_pin(cell, role, records, view.pinned):
                raise Refused(why)
            outcome = await self._term.commit((put_record(key, PinRecord(cell, role)),))
            if outcome is Verdict.WRITTEN and (now := await self._site.store.get(key, PinRecord)) is not None:
                view.pins.put(now)
        self._must_be_written(outcome)
        self._site.say(f"{cell}: {'unpinned' if role is None else f'pinned to {role.value}'}, by {order.by}")

    async def drain(self, order: DrainNode) -> None:
        node, key = order.node, self._site.keys.drain(order.node)
        seen, drain = self._site.directory.drains.get(node), DrainRecord(node, order.within_s)
        if order.draining:
            if seen is not None and seen.record == drain:
                raise Refused(f"{node} is draining already")
            outcome = await self._term.commit((put_record(key, drain),))
        else:
            if seen is None:
                raise Refused(f"{node} is not draining")
            outcome = await self._term.commit((), deletes=(Delete(key),))
        self._must_be_written(outcome)
        within = "" if order.within_s is None else f" within {order.within_s:g} s"
        self._site.say(f"{node}: {f'draining{within}' if order.draining else 'takes runs again'}, by {order.by}")

    async def pause(self, order: PauseJob) -> None:
        job = await self._site.store.get(self._site.keys.job, JobRecord)
        before, after = (JobState.RUNNING, JobState.PAUSED) if order.paused else (JobState.PAUSED, JobState.RUNNING)
        if job is None or job.record.state is not before:
            raise Refused(f"the job is {job.record.state.value if job else 'not begun'}, not {before.value}")
        await self._term.update_job(state=after)
        self._term.must_lead()
        self._site.say(f"the job is {after.value}, by {order.by}")

    async def end_job(self, order: EndJob) -> None:
        job = await self._site.store.get(self._site.keys.job, JobRecord)
        if job is None or job.record.state not in (JobState.RUNNING, JobState.PAUSED):
            raise Refused(f"the job is {job.record.state.value if job else 'not begun'}")
        await self._term.end_job(JobState.FAILED, f"stopped by {order.by}")
        self._term.must_lead()

    def _must_be_written(self, outcome: Verdict) -> None:
        if outcome is not Verdict.WRITTEN:
            raise Unavailable("another leads now; ask again")
