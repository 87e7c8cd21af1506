"""The cells' roles: what a leader orders, as the policy (gyre.sched.policy) and people say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gyre.actors.measures import Measures
from gyre.actors.messages import GatewayStatus
from gyre.actors.messages_core import GetProgress, Progress
from gyre.actors.messages_gyrectl import SwitchCell
from gyre.actors.site import Site
from gyre.actors.term import Term
from gyre.actors.view import View
from gyre.errors import Refused, Unavailable
from gyre.ids import CellId
from gyre.sched.launch import batch_of
from gyre.sched.orders import refuse_switch, standing_orders
from gyre.sched.policy import CellView, ClusterView, PolicyParams, decide
from gyre.sched.revival import Revival
from gyre.store.records import CellRoleRecord, GroupState, JobState, Purpose, Role, RunState
from gyre.store.typed import Versioned

PROGRESS_S = 5.0


class Roles:
    def __init__(self, site: Site, view: View, term: Term, measures: Measures) -> None:
        self._site = site
        self._view = view
        self._term = term
        self._measures = measures
        self._switched: dict[CellId, int] = {}
        """By cell, the epoch of a switch that a person ordered: the policy waits until the cell has come to rest."""
        self._revival = Revival()
        self._params = PolicyParams(**site.spec.scheduler.model_dump())

    async def look(self, now_s: float, gateway: GatewayStatus | None, *, paused: bool) -> None:
        """`gateway` is all gateways together, as last heard."""
        there = {spec.cell for spec in self._site.directory.cells}
        roles = {cell: seen for cell, seen in self._view.seen_roles.items() if cell in there}
        if len(roles) < len(there):
            return  # the cells have not reported yet
        try:
            progress = await self._site.core.ask(GetProgress(), PROGRESS_S, Progress)
        except Unavailable:  # it starts again; the next tick asks it again
            return
        failed = [cell for cell, seen in roles.items() if seen.record.observed is Role.FAILED]
        back = [cell for cell, seen in roles.items() if seen.record.came_back]
        due = self._revival.due([*failed, *back], now_s)
        for cell in due:
            if cell in failed:
                await self._order(cell, roles[cell], Role.ROLLOUT, "it failed and is tried again")
        if self._revival.hopeless(failed, len(roles)):
            await self._term.end_job(
                JobState.FAILED, f"no cell works; the logs of the engines in {self._site.job.logs} say why"
            )
            return
        records = {cell: seen.record for cell, seen in roles.items()}
        for cell, epoch in list(self._switched.items()):
            if records[cell].epoch != epoch or records[cell].rested >= epoch:
                del self._switched[cell]
        pinned, standing = self._view.pinned, self._standing(records)
        plan = decide(self._cluster(records, standing, progress, gateway, paused=paused), self._params)
        for cell, desired in plan.desired.items():
            if roles[cell].record.desired is not desired or (cell in due and cell in back):
                reason = "it is pinned" if cell in pinned else "its node drains" if cell in standing else plan.reason
                await self._order(cell, roles[cell], desired, reason)

    async def switch(self, order: SwitchCell) -> None:
        """A person's order. Raises Refused."""
        cell, role = order.cell, order.role
        roles = self._view.seen_roles
        records = {name: seen.record for name, seen in roles.items()}
        water_level = sum(run.state in (RunState.QUEUED, RunState.LIVE) for run in self._view.runs.records)
        if why := refuse_switch(cell, role, records, self._view.pinned, water_level):
            raise Refused(why)
        if self._standing(records).get(cell, role) is not role:
            raise Refused(f"{cell} serves no more: its node drains")
        if not await self._order(cell, roles[cell], role, f"ordered by {order.by}"):
            raise Refused(f"{cell} has just changed; look again, and order it again")
        self._switched[cell] = records[cell].epoch + 1

    def _standing(self, roles: Mapping[CellId, CellRoleRecord]) -> dict[CellId, Role]:
        directory = self._site.directory
        working = [cell for cell, seen in roles.items() if seen.observed is not Role.FAILED]
        homes = {
            cell: node for cell in working if (node := directory.node_of(cell)) is not None and node in directory.nodes
        }
        return standing_orders(self._view.pinned, homes, directory.draining)

    async def _order(self, cell: CellId, seen: Versioned[CellRoleRecord], desired: Role, reason: str) -> bool:
        site = self._site
        with site.tracing.span("decide", cell=cell, desired=desired.value, reason=reason) as span:
            order = replace(
                seen.record,
                desired=desired,
                epoch=seen.record.epoch + 1,
                token=self._term.token,
                traceparent=span.traceparent,
            )
            written = await self._term.replace(self._view.roles, seen, order)
            if written:
                site.say(f"{cell}: {seen.record.observed.value} -> {desired.value} ({reason})")
            return written

    def _cluster(
        self,
        roles: Mapping[CellId, CellRoleRecord],
        standing: Mapping[CellId, Role],
        progress: Progress,
        gateway: GatewayStatus | None,
        *,
        paused: bool,
    ) -> ClusterView:
        spec, view, measures = self._site.spec, self._view, self._measures
        in_flight = gateway.in_flight if gateway else {}
        runs = view.runs.records
        past = batch_of(progress.step, spec.batch.groups).stop
        later = [
            trace
            for group in view.groups.records
            if group.purpose is Purpose.TRAIN and group.state is GroupState.SETTLED and group.index >= past
            for run in group.runs
            if (found := view.run(run)) is not None and (trace := found.trace) is not None
        ]
        return ClusterView(
            cells=tuple(
                CellView(
                    cell=cell,
                    core=cell == self._site.core_cell,
                    role=seen.observed,
                    desired=seen.desired,
                    slots=spec.cells.slots,
                    live=in_flight.get(cell, 0),
                    pinned=seen.desired if cell in self._switched else standing.get(cell),
                )
                for cell, seen in roles.items()
            ),
            queued=0 if paused else sum(run.state is RunState.QUEUED for run in runs),
            live=sum(run.state is RunState.LIVE for run in runs),
            ready_runs=progress.untrained_runs,
            ready_tokens=progress.untrained_tokens,
            later_tokens=sum(item.tokens for trace in later for item in trace.lineages),
            batch_complete=progress.planned_groups >= spec.batch.groups,
            step_waits=progress.step_due,
            batch_runs=spec.batch.groups * spec.batch.group_size,
            staleness=spec.batch.staleness,
            train_tokens_s=progress.train_tokens_s,
            rollout_tokens_s=measures.rollout_tokens_s,
            run_train_tokens=measures.run_train_tokens,
            run_sampled_tokens=measures.run_sampled_tokens,
            switch_s=measures.switch_s,
        )
