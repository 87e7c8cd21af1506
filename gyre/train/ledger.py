"""The ledger of one batch: which micro-step is waiting, claimed by whom, or merged.

The core actor adds the micro-steps of each group as it settles, and asks `claim` and `shipped` for the cells. The
ledger promises that, whatever cells come, die, hang or repeat themselves, the sums of each micro-step enter the batch
exactly once: a shipment is accepted whole or not at all, and only for micro-steps that its cell still holds.

No clock is read here: whoever calls brings the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gyre.actors.messages_replica import MicroStep
from gyre.errors import BadInput
from gyre.ids import CellId, MicroStepId


@dataclass
class _Entry:
    place: int
    work: MicroStep
    holder: CellId | None = None
    due_s: float = 0.0
    merged_from: CellId | None = None


class Ledger:
    """The micro-steps of step `step`, whose gradients are all taken at snapshot `version`."""

    def __init__(self, step: int, version: int) -> None:
        self.step = step
        self.version = version
        self.closed = False
        self._entries: dict[MicroStepId, _Entry] = {}
        self._waiting: list[tuple[int, MicroStepId]] = []
        self._transfers: set[str] = set()

    # ------------------------------------------------------------------------------------------ the batch grows

    def add(self, micro_steps: Iterable[MicroStep]) -> None:
        """Let more micro-steps wait. Raises BadInput for one that is known, of another version, or after `close`."""
        for work in micro_steps:
            if self.closed:
                raise BadInput("micro_step", work.micro_step, "the batch is closed; nothing can be added to it")
            if work.version != self.version or work.step != self.step:
                was = (work.step, work.version)
                raise BadInput("micro_step (step, version)", was, f"the batch is of {(self.step, self.version)}")
            if work.micro_step in self._entries:
                raise BadInput("micro_step", work.micro_step, "each is added once")
            entry = _Entry(len(self._entries), work)
            self._entries[work.micro_step] = entry
            heapq.heappush(self._waiting, (entry.place, work.micro_step))

    def close(self) -> None:
        """No more will be added: once all are merged the batch is complete."""
        self.closed = True

    # ------------------------------------------------------------------------------------------ cells at work

    def claim(self, cell: CellId, now_s: float, deadline_s: float) -> MicroStep | None:
        """The oldest waiting micro-step, now held by `cell` for `deadline_s` seconds; None when none waits.

        A cell that gets more work is alive, so its earlier claims are renewed too: it ships them all in one set of
        sums. One that gets none has to ship in the time it has, else claims it forgot would be held for ever.
        """
        if self._waiting:
            self.renew(cell, now_s, deadline_s)
        self.expire(now_s)
        if not self._waiting:
            return None
        _, micro_step = heapq.heappop(self._waiting)
        entry = self._entries[micro_step]
        entry.holder, entry.due_s = cell, now_s + deadline_s
        return entry.work

    def renew(self, cell: CellId, now_s: float, deadline_s: float) -> None:
        """`cell` was heard of: what it still holds is due `deadline_s` seconds from now."""
        for entry in self._entries.values():
            if entry.holder == cell:
                entry.due_s = now_s + deadline_s

    def shipped(self, transfer: str, cell: CellId, micro_steps: Sequence[MicroStepId], version: int) -> bool:
        """Whether the received sums of `transfer` are to be merged; when true, its micro-steps are merged from here on.

        When false the sums must be dropped, and what the cell still held of them waits again.
        """
        if not self.refusal(transfer, cell, micro_steps, version):
            self._transfers.add(transfer)
            for micro_step in micro_steps:
                entry = self._entries[micro_step]
                entry.holder, entry.merged_from = None, cell
            return True
        if transfer not in self._transfers:
            for micro_step in micro_steps:
                entry = self._entries.get(micro_step)
                if entry is not None and entry.holder == cell:
                    self._release(entry)
        return False

    def refusal(self, transfer: str, cell: CellId, micro_steps: Sequence[MicroStepId], version: int) -> str:
        """Why `shipped` would say no, in words; empty when it would say yes. Changes nothing."""
        if transfer in self._transfers:
            return f"transfer {transfer} was accepted before"
        if version != self.version:
            return f"the sums are of version {version}, the batch of {self.version}"
        if not micro_steps or len(set(micro_steps)) != len(micro_steps):
            return "a shipment names each of its micro-steps once, and at least one"
        for micro_step in micro_steps:
            entry = self._entries.get(micro_step)
            if entry is None:
                return f"{micro_step} is not of this batch"
            if entry.holder != cell:
                return f"{micro_step} is no longer held by {cell}"
        return ""

    def forfeit(self, cell: CellId) -> tuple[MicroStepId, ...]:
        """`cell` died or left: what it held and had not shipped waits again. Returns those."""
        return self._release_all(entry for entry in self._entries.values() if entry.holder == cell)

    def expire(self, now_s: float) -> tuple[MicroStepId, ...]:
        """Claims whose time is over wait again. Returns those."""
        late = (entry for entry in self._entries.values() if entry.holder is not None and entry.due_s <= now_s)
        return self._release_all(late)

    def restart(self) -> tuple[MicroStepId, ...]:
        """The core lost the sums that were merged: all of those wait again. Returns them.

        Claims of other cells stand, since their sums are still with them. Transfers accepted before stay used up.
        """
        return self._release_all(entry for entry in self._entries.values() if entry.merged_from is not None)

    # ------------------------------------------------------------------------------------------ how it stands

    @property
    def complete(self) -> bool:
        """Closed, and every micro-step merged."""
        return self.closed and self.merged == len(self._entries)

    @property
    def total(self) -> int:
        return len(self._entries)

    @property
    def merged(self) -> int:
        return sum(entry.merged_from is not None for entry in self._entries.values())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return sum(self._entries[micro_step].work.tokens for _, micro_step in self._waiting)

    @property
    def cells(self) -> tuple[CellId, ...]:
        """The cells whose sums are merged, in order of their names."""
        return tuple(sorted({e.merged_from for e in self._entries.values() if e.merged_from is not None}))

    def held(self, cell: CellId) -> tuple[MicroStepId, ...]:
        """What `cell` has claimed and not shipped, in the order of the batch."""
        return tuple(micro_step for micro_step, entry in self._entries.items() if entry.holder == cell)

    # ------------------------------------------------------------------------------------------ private

    def _release_all(self, entries: Iterable[_Entry]) -> tuple[MicroStepId, ...]:
        released = tuple(entries)
        for entry in released:
            self._release(entry)
        return tuple(entry.work.micro_step for entry in released)

    def _release(self, entry: _Entry) -> None:
        entry.holder = entry.merged_from = None
        heapq.heappush(self._waiting, (entry.place, entry.work.micro_step))
