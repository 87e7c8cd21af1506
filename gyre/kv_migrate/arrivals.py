"""Pages that have come from a peer and wait until the engine asks for them. Pure bookkeeping over memory that others made.

    arrivals.put(7, staging_bytes, {name: pieces})     # what one pull has brought, of version 7
    arrivals.find([name])                              # the pieces, which nobody changes as long as they are held
    arrivals.take(name)                                # the same, and they are gone from here

What is here is bounded. A pull's memory is one piece, so it counts and goes as a whole: first pulls of versions
that are over, then the oldest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Pieces = Sequence[memoryview]


@dataclass(eq=False)
class _Pull:
    version: int
    bytes: int
    pages: dict[bytes, Pieces]


class Arrivals:
    """At most `keep_bytes` are kept. Every method may be called on any thread."""

    def __init__(self, keep_bytes: int) -> None:
        self.keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._pulls: list[_Pull] = []
        self._whose: dict[bytes, _Pull] = {}
        self._newest = -1

    def __contains__(self, name: bytes) -> bool:
        with self._lock:
            return name in self._whose

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(pull.bytes for pull in self._pulls)

    def put(self, version: int, size: int, pages: Mapping[bytes, Pieces]) -> None:
        """Keep the pages of a pull whose memory has `size` bytes, as far as there is room for it at all."""
        with self._lock:
            self._newest = max(self._newest, version)
            new = {name: pieces for name, pieces in pages.items() if name not in self._whose}
            if not new or size > self.keep_bytes:
                return
            pull = _Pull(version, size, new)
            self._pulls.append(pull)
            self._whose.update(dict.fromkeys(new, pull))
            while sum(kept.bytes for kept in self._pulls) > self.keep_bytes:
                self._drop(next((old for old in self._pulls if old.version < self._newest), self._pulls[0]))

    def find(self, names: Iterable[bytes]) -> list[Pieces | None]:
        """The pages that are here; each stays what it is for who holds it, also when it is taken or dropped meanwhile."""
        with self._lock:
            return [self._whose[name].pages[name] if name in self._whose else None for name in names]

    def take(self, name: bytes) -> Pieces | None:
        with self._lock:
            pull = self._whose.pop(name, None)
            if pull is None:
                return None
            pieces = pull.pages.pop(name)
            if not pull.pages:
                self._pulls.remove(pull)
            return pieces

    def _drop(self, pull: _Pull) -> None:
        self._pulls.remove(pull)
        for name in pull.pages:
            del self._whose[name]
