"""Which chunk of an object is asked of which peer next. Pure: it is told what peers hold and what came of each ask.

Many peers gather one object at the same time, and one has it. Each takes its own share of the chunks, by number, from
the peer that has all; the others' shares it has from them, as they come by them. So the first source sends about one
copy, however many want it. A gatherer that comes by nothing for a while is not counted on: its share is then asked of
who has all.

Sets of chunks are the bits of an int, which also is how peers tell them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

WINDOW = 2
"""Chunks asked of one peer at a time."""
FAILED_CHUNKS = 3
"""A peer of which so many chunks were wrong is asked no more."""


@dataclass(frozen=True)
class Ask:
    source: str
    chunk: int


@dataclass
class _Source:
    held: int = 0
    whole: bool = False
    asked: set[int] = field(default_factory=set[int])
    failed: int = 0
    reason: str = ""
    grew: bool = False
    counted_on: bool = True
    slow: bool = False
    lost: bool = False


class Chunks:
    """The chunks 0 to `count` - 1 that `me` gathers; `have` are there. A source holds nothing until it is said to."""

    def __init__(self, me: str, count: int, have: int, sources: Sequence[str]) -> None:
        self._me = me
        self._count = count
        self._missing = all_of(count) & ~have
        self._sources = {name: _Source() for name in sources}

    @property
    def done(self) -> bool:
        return not self._missing

    @property
    def in_flight(self) -> int:
        return sum(len(source.asked) for source in self._sources.values())

    @property
    def can_go_on(self) -> bool:
        """Whether some source has something that is missing."""
        return any(self._missing & self._usable(source) for source in self._sources.values())

    @property
    def gatherers(self) -> list[str]:
        """The sources that do not have all, as far as is known: what they hold may grow."""
        return [name for name, source in self._sources.items() if not source.lost and not source.whole]

    def reason(self, name: str) -> str:
        """Why nothing more comes from the source."""
        source = self._sources[name]
        return source.reason or f"it holds {source.held.bit_count()} of {self._count} chunks"

    # ------------------------------------------------------------------ what is told

    def holds(self, name: str, held: int | None) -> bool:
        """The source holds these chunks now; None: all. Whether that is more than before."""
        source = self._sources[name]
        source.whole = held is None
        held = all_of(self._count) if held is None else held & all_of(self._count)
        more = held & ~source.held != 0
        source.grew = source.grew or more
        source.counted_on = source.counted_on or (more and not source.slow)
        source.held = held
        return more

    def gone(self, name: str, reason: str) -> None:
        """The source holds nothing, until it is said to again. What it was asked may be asked of others."""
        source = self._sources[name]
        source.asked.clear()
        source.held, source.whole, source.reason = 0, False, reason

    def arrived(self, ask: Ask) -> None:
        """The chunk came and is right."""
        self._sources[ask.source].asked.discard(ask.chunk)
        self._missing &= ~(1 << ask.chunk)

    def failed(self, ask: Ask, reason: str) -> None:
        """What came is not the chunk, or the source does not have it after all. It is not asked for that again."""
        source = self._sources[ask.source]
        source.asked.discard(ask.chunk)
        source.failed |= 1 << ask.chunk
        source.reason = reason
        if source.failed.bit_count() >= FAILED_CHUNKS:
            source.asked.clear()
            source.lost = True

    def patience_ended(self) -> None:
        """Nothing came for a while: gatherers that came by nothing are not counted on until they do.

        If all came by something, the slowest is not counted on any more.
        """
        counted_on = [self._sources[name] for name in self.gatherers if self._sources[name].counted_on]
        idle = [source for source in counted_on if not source.grew]
        if not idle and counted_on:
            idle = [min(counted_on, key=lambda source: source.held.bit_count())]
            idle[0].slow = True
        for source in idle:
            source.counted_on = False
        for source in counted_on:
            source.grew = False

    # ------------------------------------------------------------------ what is asked

    def next(self) -> Ask | None:
        """The next to ask, which is then in flight; None when there is nothing to ask now."""
        wanted = self._missing
        for source in self._sources.values():
            for chunk in source.asked:
                wanted &= ~(1 << chunk)
        own = wanted & self._share()
        free = [(name, source) for name, source in self._sources.items() if len(source.asked) < WINDOW]
        # Gatherers first: who has all is asked for what nobody else has, and least asked of.
        for name, source in sorted(free, key=lambda item: (item[1].whole, len(item[1].asked))):
            found = (own if source.whole else wanted) & self._usable(source)
            if found:
                chunk = _lowest(found)
                source.asked.add(chunk)
                return Ask(name, chunk)
        return None

    def _usable(self, source: _Source) -> int:
        return 0 if source.lost else source.held & ~source.failed

    def _share(self) -> int:
        """My share: of those who gather each comes to the same division by itself."""
        ring = sorted({self._me, *(name for name in self.gatherers if self._sources[name].counted_on)})
        return _every(len(ring), ring.index(self._me), self._count)


def all_of(count: int) -> int:
    return (1 << count) - 1


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


@lru_cache(maxsize=16)
def _every(step: int, first: int, count: int) -> int:
    return sum(1 << chunk for chunk in range(first, count, step))
