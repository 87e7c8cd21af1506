"""Which transfers hold blocks of a source, and until when: pure, time is told to it.

A transfer is opened once and then read over connections that come and go. It ends by its acknowledgement, by its time,
when no connection of it is left for `RESUME_S`, or with the epoch. What names another epoch than that of the transfer,
or comes after its end, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.errors import Refused

RESUME_S = 1.0
"""How long a receiver whose connections all broke may take to come back."""
LONGEST_S = 600.0
"""Nobody holds blocks for longer, whatever it asked for."""


@dataclass
class _Held:
    epoch: int
    until_s: float
    readers: int = 1
    left_s: float | None = None
    """Since when nobody reads it."""

    def ends_s(self) -> float:
        return self.until_s if self.left_s is None else min(self.until_s, self.left_s + RESUME_S)


class LeaseTable:
    """Begins with `epoch`, which only grows."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._held

    def open(self, transfer: str, epoch: int, now_s: float, hold_s: float) -> None:
        """A transfer begins, read by the connection that opens it.

        Raises Refused for another epoch than the one that runs, and for a name that is in use.
        """
        if epoch != self.epoch:
            raise Refused(f"epoch {epoch} is over here; this is {self.epoch}")
        if transfer in self._held:
            raise Refused(f"transfer {transfer} is under way already")
        self._held[transfer] = _Held(epoch, now_s + min(hold_s, LONGEST_S))

    def attach(self, transfer: str, epoch: int, now_s: float) -> None:
        """Another connection reads it from now on. Raises Refused when it holds nothing (any more)."""
        held = self._held.get(transfer)
        if held is None or held.epoch != epoch or held.ends_s() <= now_s:
            raise Refused(f"transfer {transfer} of epoch {epoch} holds no blocks here")
        held.readers += 1
        held.left_s = None

    def detach(self, transfer: str, epoch: int, now_s: float) -> None:
        """That connection is gone."""
        held = self._held.get(transfer)
        if held is not None and held.epoch == epoch and held.readers:
            held.readers -= 1
            held.left_s = None if held.readers else now_s

    def acknowledge(self, transfer: str, epoch: int) -> bool:
        """The receiver has it all. True when its blocks are free by this."""
        held = self._held.get(transfer)
        if held is None or held.epoch != epoch:
            return False
        del self._held[transfer]
        return True

    def expire(self, now_s: float) -> tuple[str, ...]:
        """End those whose time is over: their names."""
        over = tuple(transfer for transfer, held in self._held.items() if held.ends_s() <= now_s)
        for transfer in over:
            del self._held[transfer]
        return over

    def next_s(self) -> float | None:
        """When `expire` would next end one, as things stand."""
        return min((held.ends_s() for held in self._held.values()), default=None)

    def fence(self) -> None:
        """End the epoch. What it holds may be read to its end, until `cut`."""
        self.epoch += 1

    def cut(self) -> tuple[str, ...]:
        """End everything of the epochs that are over: their names."""
        over = tuple(transfer for transfer, held in self._held.items() if held.epoch != self.epoch)
        for transfer in over:
            del self._held[transfer]
        return over

    def of_older_epochs(self) -> int:
        """How many transfers of epochs that are over still hold blocks."""
        return sum(held.epoch != self.epoch for held in self._held.values())
