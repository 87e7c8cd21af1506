"""The actors' metrics: sums and maxima by process and kind, and counters that keep what ended actors have done."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gyre.actors.inspection import ActorInfo, ActorList, ActorTotals
from gyre.telemetry.actor_metrics import render


def totals(kind: str, handled: int) -> ActorTotals:
    return ActorTotals(kind, handled, handled * 0.5, expired=1, dropped=2, refused=3, failures=4)


def info(name: str, kind: str, handled: int, waiting: int, oldest_s: float) -> ActorInfo:
    return ActorInfo(
        name,
        "running",
        totals(kind, handled),
        slowest_s=oldest_s * 2,
        waiting=waiting,
        control=0,
        mailbox_messages=10,
        oldest_s=oldest_s,
        in_hand="",
        in_hand_s=0.0,
        beside=0,
        tasks=0,
        timers=0,
        last_failure="",
    )


def test_actors_of_a_kind_are_one_series_and_those_that_ended_still_count() -> None:
    runs = (info("node/run-1", "RunActor", 5, 1, 0.5), info("node/run-2", "RunActor", 7, 2, 0.25))
    text = render(
        {
            "node": ActorList("node", (*runs, info("node/core", "CoreActor", 3, 0, 0.0)), (totals("RunActor", 100),)),
            "gateway": ActorList("gateway", (), (totals("GatewayFront", 9),)),
        }
    )
    told = {
        (sample.name, sample.labels["process"], sample.labels["kind"]): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert told["gyre_actors", "node", "RunActor"] == 2
    assert told["gyre_actor_mailbox_messages", "node", "RunActor"] == 3
    assert told["gyre_actor_oldest_message_seconds", "node", "RunActor"] == 0.5
    assert told["gyre_actor_slowest_handling_seconds", "node", "RunActor"] == 1.0
    assert told["gyre_actor_handled_total", "node", "RunActor"] == 112
    assert told["gyre_actor_handling_seconds_total", "node", "RunActor"] == 56
    assert told["gyre_actor_failures_total", "node", "RunActor"] == 12
    assert told["gyre_actor_handled_total", "node", "CoreActor"] == 3
    assert told["gyre_actor_refused_total", "gateway", "GatewayFront"] == 3
    assert ("gyre_actors", "gateway", "GatewayFront") not in told
