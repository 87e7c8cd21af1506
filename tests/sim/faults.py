"""What goes wrong in one simulated job: a list of events that a seed chooses, and its shortest part that still fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gyre.actors.supervision import Failure

LAST_S = 18.0
"""No fault begins later, and none lasts beyond QUIET_S: from then on everything has to settle."""
QUIET_S = 50.0
GIVEN_UP_S = (16.0, 30.0)
"""A node's lease, and the grace after it, are over by then."""


class Kind(StrEnum):
    CRASH = "kill -9 of gyred"
    DIE = "a node dies for good, with its disk"
    PAUSE = "SIGSTOP of gyred"
    TWIN = "another gyred begins under a node's name"
    ACTOR = "an actor fails"
    KILL = "kill -9 of a child"
    CUT = "no messages either way"
    CUT_ONE_WAY = "no messages one way"
    SEVER = "no messages either way, and connections break"
    BREAK = "connections break"
    SLOW_NET = "messages take long"
    REPEAT = "messages to gateways arrive twice"
    STORE_AWAY = "the store does not answer"
    STORE_REFUSES = "the store refuses everybody"
    STORE_FULL = "the store takes no writes"
    COMPACT = "the store forgets its history"
    CUT_AT_WRITE = "the store is out of reach from its next write on"
    CRASH_AT_WRITE = "kill -9 of gyred at its next write"
    CLOCK = "the wall clock jumps"
    SLOW = "a stage is slow"
    FAIL = "a stage fails"


@dataclass(frozen=True)
class Fault:
    """`where` is a node, a child, an actor or a link, by its kind; `amount` is what the kind makes of it."""

    at_s: float
    kind: Kind
    where: str
    for_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.for_s:.2f} s" if self.for_s else ""
        amount = f" ({self.amount:g})" if self.amount else ""
        return f"{self.at_s:6.2f} s  {self.kind.value}: {self.where}{lasting}{amount}"


class Injected(Exception):
    """What an actor fails by when a fault says so."""


_EXPLAINED = (Injected,)
"""The errors by which an actor may fail and start again. Nothing that happens outside it is here, a store that is away and
a peer that is lost least of all: an actor that has to do with them handles that, or forgets what it had in hand."""


def explains(failure: Failure) -> bool:
    """Whether a fault of this seed, and no mistake of ours, has made the actor fail."""
    return any(failure.error == repr(error()) for error in _EXPLAINED)


@dataclass(frozen=True)
class Layout:
    """Which nodes there are, and what each has."""

    nodes: tuple[str, ...]
    cells: tuple[str, ...]
    """The node of each cell; the first is at first the core's, and is node n0's."""

    def outlives(self, dead: Collection[str]) -> bool:
        """Whether the job can be ended without these nodes."""
        return any(node not in dead for node in self.cells)


STAGES = ("drain", "release", "resume", "weights", "load", "offload", "ship", "stage", "merge", "step", "micro-step")


WRITES = ("leader", "snapshot", "job", "groups", "runs", "roles", "switches")
"""Parts of the keys by which a fault tells writes apart. `amount` 1: the write is carried out all the same."""


def layout(seed: int) -> Layout:
    rng = random.Random(f"layout {seed}")
    nodes = tuple(f"n{index}" for index in range(rng.choice((1, 2, 3))))
    others = [rng.choice(nodes) for _ in range(rng.choice((0, 1, 1, 2)))]
    return Layout(nodes, ("n0", *others))


def faults(seed: int) -> tuple[Fault, ...]:
    """The faults of `seed`, in their order.

    Seeds differ in what goes wrong in them, how much of it, when and where (as in swarm testing): what takes two faults that
    meet is met by those seeds that have few kinds of them, close together, and at one place.
    """
    rng = random.Random(f"faults {seed}")
    found = layout(seed)
    kinds = rng.sample(_DRAWN, rng.choice((1, 2, 3, 4, len(_DRAWN))))
    moments = _Moments(rng)
    again = rng.choice((0.0, 0.6))
    chosen: list[Fault] = []
    for _ in range(rng.choice((1, 2, 3, 4, 5, 6, 8))):
        there = _Places(found, rng.choice(chosen).where.split() if chosen and rng.random() < again else ())
        chosen.append(_fault(rng, rng.choice(kinds), moments.next_s(), there))
    return tuple(sorted(chosen, key=lambda fault: fault.at_s))


class _Moments:
    """Some seeds have their faults at any time, and others all of them around one moment or two."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._around = [rng.uniform(0.0, LAST_S) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
        self._spread_s = rng.choice((0.2, 1.0, 3.0))

    def next_s(self) -> float:
        rng = self._rng
        at_s = rng.choice(self._around) + rng.uniform(0.0, self._spread_s) if self._around else rng.uniform(0.0, LAST_S)
        return round(min(at_s, LAST_S), 2)


class _Places:
    """Where faults may fall, of which some are near `before`: what a fault before it was about."""

    def __init__(self, found: Layout, before: Collection[str]) -> None:
        self._before = set(before)
        self.nodes = self._near(list(found.nodes))
        cells = range(len(found.cells))
        self.cells = self._near([f"c{cell}" for cell in cells])
        children = [f"{found.cells[cell]} {name}-c{cell}" for cell in cells for name in ("engine", "replica")]
        self.children = self._near(
            children + [f"{node} {name}" for node in found.nodes for name in ("gateway", "harness")]
        )
        actors = [
            f"{node} {name}" for node in found.nodes for name in ("scheduler", "core", "gateway", "node", "member")
        ]
        self.actors = self._near(actors + [f"{found.cells[cell]} cell-c{cell}" for cell in cells])
        links = [link for node in found.nodes for link in (f"{node} store", f"store {node}")]
        self.links = self._near(links + [f"{a} {b}" for a in found.nodes for b in found.nodes if a != b])

    def _near(self, places: list[str]) -> list[str]:
        """Those that have the most in common with it."""
        shared = [len(self._before.intersection(place.split())) for place in places]
        return [place for place, count in zip(places, shared, strict=True) if count == max(shared)]


_STORE = (Kind.STORE_AWAY, Kind.STORE_REFUSES, Kind.STORE_FULL)
_DRAWN = tuple(kind for kind in Kind if kind not in _STORE[1:])
"""One that a store is to be away by becomes any of `_STORE`."""


def _fault(rng: random.Random, kind: Kind, at_s: float, places: _Places) -> Fault:
    match kind:
        case Kind.CRASH:
            return Fault(at_s, kind, rng.choice(places.nodes), _lasting(rng, 0.2, 8.0))
        case Kind.DIE:
            return Fault(at_s, kind, rng.choice(places.nodes))
        case Kind.PAUSE:
            return Fault(at_s, kind, rng.choice(places.nodes), _lasting(rng, 0.5, 12.0))
        case Kind.TWIN:
            return Fault(at_s, kind, rng.choice(places.nodes), round(rng.uniform(1.0, 20.0), 2))
        case Kind.ACTOR:
            return Fault(at_s, kind, rng.choice(places.actors))
        case Kind.KILL:
            return Fault(at_s, kind, rng.choice(places.children))
        case Kind.CUT | Kind.CUT_ONE_WAY:
            return Fault(at_s, kind, rng.choice(places.links), _lasting(rng, 0.5, 14.0))
        case Kind.SEVER:
            between = [link for link in places.links if "store" not in link]
            return Fault(at_s, kind, rng.choice(between or places.links), _lasting(rng, 4.0, 24.0))
        case Kind.BREAK:
            return Fault(at_s, kind, rng.choice(places.links))
        case Kind.SLOW_NET:
            extra_s = round(rng.uniform(0.05, 2.0), 2)
            return Fault(at_s, kind, rng.choice(places.links), round(rng.uniform(1.0, 8.0), 2), extra_s)
        case Kind.REPEAT:
            return Fault(at_s, kind, "gateways", round(rng.uniform(1.0, 10.0), 2))
        case Kind.STORE_AWAY | Kind.STORE_REFUSES | Kind.STORE_FULL:
            return Fault(at_s, rng.choice(_STORE), "store", round(rng.uniform(0.3, 15.0), 2))
        case Kind.COMPACT:
            return Fault(at_s, kind, "store", _lasting(rng, 0.3, 8.0))
        case Kind.CUT_AT_WRITE | Kind.CRASH_AT_WRITE:
            where = f"{rng.choice(places.nodes)} {rng.choice(WRITES)}"
            return Fault(at_s, kind, where, round(rng.uniform(0.2, 12.0), 2), rng.choice((0.0, 1.0)))
        case Kind.CLOCK:
            return Fault(at_s, kind, rng.choice(places.nodes), 0.0, rng.choice((-3600.0, -60.0, 60.0, 3600.0)))
        case Kind.SLOW:
            stage = f"{rng.choice(STAGES)} {rng.choice(places.cells)}"
            return Fault(at_s, kind, stage, 0.0, round(rng.uniform(1.0, 12.0), 2))
        case Kind.FAIL:
            return Fault(at_s, kind, f"{rng.choice(STAGES)} {rng.choice(places.cells)}")


def _lasting(rng: random.Random, least_s: float, most_s: float) -> float:
    """One in five lasts so long that a node is given up by the others."""
    if rng.random() < 0.2:
        return round(rng.uniform(*GIVEN_UP_S), 2)
    return round(rng.uniform(least_s, most_s), 2)


def shortest(events: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool], tries: int = 200) -> tuple[Fault, ...]:
    """The events without those that the failure does not need. `events` must fail; at most `tries` replays."""
    left = list(events)
    size = max(1, len(left) // 2)
    while left and tries > 0:
        for start in range(0, len(left), size):
            tries -= 1
            fewer = left[:start] + left[start + size :]
            if tries >= 0 and fails(fewer):
                left = fewer
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    return tuple(left)
