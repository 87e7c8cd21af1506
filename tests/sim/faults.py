"""What goes wrong in one simulated job: a list of events that a seed chooses, and its shortest part that still fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

LAST_S = 18.0
"""No fault begins later, and none lasts beyond QUIET_S: from then on everything has to settle."""
QUIET_S = 50.0
GIVEN_UP_S = (16.0, 30.0)
"""A node's lease, and the grace after it, are over by then."""


class Kind(StrEnum):
    CRASH = "kill -9 of gyred"
    PAUSE = "SIGSTOP of gyred"
    ACTOR = "an actor fails"
    KILL = "kill -9 of a child"
    CUT = "no messages either way"
    CUT_ONE_WAY = "no messages one way"
    BREAK = "connections break"
    SLOW_NET = "messages take long"
    REPEAT = "messages to the gateway arrive twice"
    STORE_AWAY = "the store does not answer"
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


@dataclass(frozen=True)
class Layout:
    """Which nodes there are, and what each has."""

    nodes: tuple[str, ...]
    cells: tuple[str, ...]
    """The node of each cell; the first is the core's, and is node n0."""


STAGES = ("drain", "release", "resume", "weights", "load", "offload", "ship", "stage", "merge", "step", "micro-step")


WRITES = ("leader", "snapshot", "job", "groups", "runs", "roles", "switches")
"""Parts of the keys by which a fault tells writes apart. `amount` 1: the write is carried out all the same."""


def layout(seed: int) -> Layout:
    rng = random.Random(f"layout {seed}")
    nodes = tuple(f"n{index}" for index in range(rng.choice((1, 2, 3))))
    others = [rng.choice(nodes) for _ in range(rng.choice((0, 1, 1, 2)))]
    return Layout(nodes, ("n0", *others))


def faults(seed: int) -> tuple[Fault, ...]:
    """The faults of `seed`, in their order."""
    rng = random.Random(f"faults {seed}")
    found = layout(seed)
    chosen = [_fault(rng, found) for _ in range(rng.randint(1, 7))]
    return tuple(sorted(chosen, key=lambda fault: fault.at_s))


def _fault(rng: random.Random, found: Layout) -> Fault:
    kind = rng.choice(tuple(Kind))
    at_s = round(rng.uniform(0.0, LAST_S), 2)
    node = rng.choice(found.nodes)
    cells = range(len(found.cells))
    children = [f"{name}-c{cell}" for cell in cells for name in ("engine", "replica")] + ["gateway", "harness"]
    links = [link for node in found.nodes for link in (f"{node} store", f"store {node}")]
    links += [f"{a} {b}" for a in found.nodes for b in found.nodes if a != b]
    match kind:
        case Kind.CRASH:
            return Fault(at_s, kind, node, _lasting(rng, 0.2, 8.0))
        case Kind.PAUSE:
            return Fault(at_s, kind, node, _lasting(rng, 0.5, 12.0))
        case Kind.ACTOR:
            actors = [f"{node} scheduler", "n0 core", "n0 gateway", "n0 node"]
            actors += [f"{found.cells[cell]} cell-c{cell}" for cell in cells]
            return Fault(at_s, kind, rng.choice(actors))
        case Kind.KILL:
            return Fault(at_s, kind, rng.choice(children))
        case Kind.CUT | Kind.CUT_ONE_WAY:
            return Fault(at_s, kind, rng.choice(links), _lasting(rng, 0.5, 14.0))
        case Kind.BREAK:
            return Fault(at_s, kind, rng.choice(links))
        case Kind.SLOW_NET:
            return Fault(
                at_s, kind, rng.choice(links), round(rng.uniform(1.0, 8.0), 2), round(rng.uniform(0.05, 2.0), 2)
            )
        case Kind.REPEAT:
            return Fault(at_s, kind, "gateway", round(rng.uniform(1.0, 10.0), 2))
        case Kind.STORE_AWAY:
            return Fault(at_s, kind, "store", round(rng.uniform(0.3, 15.0), 2))
        case Kind.CUT_AT_WRITE:
            return Fault(
                at_s, kind, f"{node} {rng.choice(WRITES)}", round(rng.uniform(0.3, 12.0), 2), rng.choice((0.0, 1.0))
            )
        case Kind.CRASH_AT_WRITE:
            return Fault(
                at_s, kind, f"n0 {rng.choice(WRITES)}", round(rng.uniform(0.2, 6.0), 2), rng.choice((0.0, 1.0))
            )
        case Kind.CLOCK:
            return Fault(at_s, kind, node, 0.0, rng.choice((-3600.0, -60.0, 60.0, 3600.0)))
        case Kind.SLOW:
            return Fault(
                at_s, kind, f"{rng.choice(STAGES)} c{rng.choice(cells)}", 0.0, round(rng.uniform(1.0, 12.0), 2)
            )
        case Kind.FAIL:
            return Fault(at_s, kind, f"{rng.choice(STAGES)} c{rng.choice(cells)}")


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
