"""The actors of a job's processes as Prometheus metrics, made at the moment of asking: `gyrectl actor metrics`.

Series are by process and kind of actor, not by actor: a job has thousands of runs. Counters include actors that have
ended, so they never fall while their process lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gyre.actors.inspection import ActorInfo, ActorList, ActorTotals, totals_by_kind

_LABELS = ("process", "kind")

_OfActors = Callable[[Sequence[ActorInfo]], float]
_OfTotals = Callable[[ActorTotals], float]

_COUNTERS: tuple[tuple[str, str, _OfTotals], ...] = (
    ("handled", "Messages handled.", lambda of: of.handled),
    ("handling_seconds", "Time in handlers.", lambda of: of.handling_s),
    ("expired", "Asks dropped unhandled, for nobody waited any more.", lambda of: of.expired),
    ("dropped", "Tells that made room for newer ones.", lambda of: of.dropped),
    ("refused", "Messages that met a full mailbox.", lambda of: of.refused),
    ("failures", "Failures.", lambda of: of.failures),
)


def render(processes: Mapping[str, ActorList]) -> bytes:
    """Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Actors(processes))
    return generate_latest(registry)


class _Actors(Collector):
    def __init__(self, processes: Mapping[str, ActorList]) -> None:
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        yield self._gauge("gyre_actors", "Actors alive.", len)
        yield self._gauge("gyre_actor_mailbox_messages", "Messages that wait.", lambda of: sum(a.waiting for a in of))
        yield self._gauge(
            "gyre_actor_oldest_message_seconds",
            "How long the message that has waited longest has waited.",
            lambda of: max(a.oldest_s for a in of),
        )
        yield self._gauge(
            "gyre_actor_slowest_handling_seconds",
            "The longest time that a handler has taken.",
            lambda of: max(a.slowest_s for a in of),
        )
        for name, about, value in _COUNTERS:
            yield self._counter(f"gyre_actor_{name}", about, value)

    def _gauge(self, name: str, about: str, value: _OfActors) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, about, labels=_LABELS)
        for process, listed in self._processes.items():
            kinds: dict[str, list[ActorInfo]] = {}
            for actor in listed.actors:
                kinds.setdefault(actor.totals.kind, []).append(actor)
            for kind, actors in kinds.items():
                family.add_metric((process, kind), float(value(actors)))
        return family

    def _counter(self, name: str, about: str, value: _OfTotals) -> CounterMetricFamily:
        family = CounterMetricFamily(name, about, labels=_LABELS)
        for process, listed in self._processes.items():
            for totals in totals_by_kind(listed):
                family.add_metric((process, totals.kind), float(value(totals)))
        return family
