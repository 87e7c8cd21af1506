"""Metrics: one registry an object, rendered as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gyre.telemetry.metrics import GatewayMetrics, NodeMetrics


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_a_node_tells_roles_runs_and_switches() -> None:
    metrics = NodeMetrics()
    metrics.snapshot_version.set(7)
    metrics.runs.labels(state="queued").set(12)
    metrics.cell_role.labels(cell="c0", role="train").set(1)
    metrics.switches.labels(cell="c0", end="train").inc()
    metrics.switch_stage_s.labels(stage="drain").observe(0.2)
    told = samples(metrics.render())
    assert told["gyre_snapshot_version", ()] == 7
    assert told["gyre_runs", (("state", "queued"),)] == 12
    assert told["gyre_cell_role", (("cell", "c0"), ("role", "train"))] == 1
    assert told["gyre_switches_total", (("cell", "c0"), ("end", "train"))] == 1
    assert told["gyre_switch_stage_seconds_bucket", (("le", "0.3"), ("stage", "drain"))] == 1


def test_two_objects_of_one_process_do_not_share_a_registry() -> None:
    one, two = GatewayMetrics(), GatewayMetrics()
    one.sampled_tokens.inc(40)
    one.calls.labels(dialect="openai-chat", end="stop").inc()
    assert samples(one.render())["gyre_sampled_tokens_total", ()] == 40
    assert samples(two.render())["gyre_sampled_tokens_total", ()] == 0
