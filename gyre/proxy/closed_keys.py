"""The keys of runs that are closed: their harness is told that its run is over, and not that nobody knows it.

Those of the gateway's earlier lives are in the journals, each read when its run is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from gyre.ids import RunId
from gyre.proxy.journals import closed_folder, closed_journals, segment_path
from gyre.trajectory.journal import RunOpened, read

_REMEMBERED = 4096
_OPENING_BYTES = 64 * 1024
"""Of a journal: its first record is well within."""


class ClosedKeys:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: OrderedDict[RunId, str] = OrderedDict()
        self._before: dict[RunId, int] = {}

    def restore(self) -> None:
        """See which runs were closed before, and the last attempt of each."""
        self._before = {place.run: place.attempt for place in closed_journals(self._root)}

    def add(self, run: RunId, key: str) -> None:
        self._known[run] = key
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def of(self, run: RunId) -> str | None:
        """The key of a closed run, or None where there is no such run."""
        if run not in self._known and run in self._before:
            key = self._read(run, self._before[run])
            if key is None:
                del self._before[run]
            else:
                self.add(run, key)
        return self._known.get(run)

    def _read(self, run: RunId, attempt: int) -> str | None:
        try:
            with segment_path(closed_folder(self._root, run, attempt), 0).open("rb") as file:
                records = read(file.read(_OPENING_BYTES)).records
        except OSError:
            return None
        return records[0].key if records and isinstance(records[0], RunOpened) else None
