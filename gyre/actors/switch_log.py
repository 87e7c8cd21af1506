"""What a role switch leaves for people: one trace of spans, and one SwitchRecord in the state store.

The cell's actor tells it what the role machine does; it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre.actors.messages import DrainReport
from gyre.actors.site import Site
from gyre.ids import CellId, SwitchId
from gyre.store.protocol import Txn
from gyre.store.records import Role, StageRecord, SwitchRecord
from gyre.store.typed import put_record
from gyre.telemetry.tracing import Span


@dataclass
class _Open:
    epoch: int
    start: Role
    desired: Role
    span: Span
    began_unix_s: float
    stages: list[StageRecord] = field(default_factory=list[StageRecord])
    stage: Span | None = None
    stage_name: str = ""
    stage_began_s: float = 0.0
    drained: DrainReport | None = None
    reason: str = ""


class SwitchLog:
    def __init__(self, site: Site, cell: CellId) -> None:
        self._site = site
        self._cell = cell
        self._open: _Open | None = None

    def begin(self, epoch: int, start: Role, desired: Role, traceparent: str) -> None:
        """A switch to `desired` has been ordered. One that was under way is over."""
        if self._open is not None:
            self._open.reason = self._open.reason or "overtaken by a newer order"
        span = self._site.tracing.start(
            f"switch {self._cell} {start.value} to {desired.value}", traceparent, cell=self._cell, epoch=epoch
        )
        if self._open is not None:
            self._end_stage()
            self._open.span.end(self._open.reason)
        self._open = _Open(epoch, start, desired, span, self._site.outside.unix_s())

    def stage(self, name: str) -> None:
        """A stage begins; the one before it has ended. An empty name: none follows."""
        if self._open is None or self._open.stage_name == name:
            return
        self._end_stage()
        if name:
            self._open.stage = self._site.tracing.start(name, self._open.span.traceparent, cell=self._cell)
            self._open.stage_name = name
            self._open.stage_began_s = self._site.outside.monotonic_s()

    def drained(self, report: DrainReport) -> None:
        """What the drain did is told beside its stage: how long until the requests had stopped, and until all had moved."""
        if self._open is None:
            return
        self._open.drained = report
        if self._open.stage is not None:
            self._open.stage.set(
                requests=report.requests,
                moved_blocks=report.moved_blocks,
                moved_bytes=report.moved_bytes,
                stop_s=round(report.stop_s, 3),
                move_s=round(report.move_s, 3),
            )

    def failed(self, reason: str) -> None:
        if self._open is not None:
            self._open.reason = reason

    def abandon(self, reason: str) -> None:
        """Nobody will hear of the switch that is under way: end its trace. It has no record."""
        ended, self._open = self._open, None
        if ended is not None:
            if ended.stage is not None:
                ended.stage.end(reason)
            ended.span.end(ended.reason or reason)

    async def settle(self, role: Role) -> None:
        """The cell has come to rest in `role`: end the trace, write the record."""
        ended, self._open = self._open, None
        if ended is None:
            return
        if ended.stage is not None:
            ended.stage.end()
            ended.stages.append(StageRecord(ended.stage_name, self._site.outside.monotonic_s() - ended.stage_began_s))
        ended.span.end(ended.reason)
        drained = ended.drained
        switch = SwitchRecord(
            switch=SwitchId(f"{self._cell}-{ended.epoch:06d}"),
            cell=self._cell,
            epoch=ended.epoch,
            start=ended.start,
            end=role,
            desired=ended.desired,
            started_unix_s=ended.began_unix_s,
            ended_unix_s=self._site.outside.unix_s(),
            stages=tuple(ended.stages),
            trace_id=ended.span.trace_id,
            moved_requests=drained.requests if drained else 0,
            moved_blocks=drained.moved_blocks if drained else 0,
            moved_bytes=drained.moved_bytes if drained else 0,
            max_silence_s=drained.stop_s + drained.move_s if drained else 0.0,
            reason=ended.reason,
        )
        site = self._site
        await site.store.commit(Txn(puts=(put_record(site.keys.switch(switch.switch), switch),)))

    def _end_stage(self) -> None:
        found = self._open
        if found is not None and found.stage is not None:
            found.stage.end()
            found.stages.append(StageRecord(found.stage_name, self._site.outside.monotonic_s() - found.stage_began_s))
            found.stage, found.stage_name = None, ""
