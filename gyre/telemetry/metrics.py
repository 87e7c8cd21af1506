"""The metrics of a node and of a gateway, for Prometheus: every name, its unit and its meaning in one place.

A process makes the one object that it needs and renders it when it is asked (docs/metrics.md). `prometheus_client` brings an HTTP server
and its memory with it, so gyred imports this module only when its metrics are asked for.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_CALL_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_STAGE_S = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """A registry of one process, apart from the library's global one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def render(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)


class NodeMetrics(Metrics):
    """What gyred knows of the job and its cells."""

    def __init__(self) -> None:
        super().__init__()
        to = self.registry
        self.snapshot_version = Gauge("gyre_snapshot_version", "The authoritative version.", registry=to)
        self.mean_reward = Gauge("gyre_mean_reward", "Mean reward of the last step.", registry=to)
        self.runs = Gauge("gyre_runs", "Runs by state; queued + live is the water level.", ["state"], registry=to)
        self.cell_role = Gauge("gyre_cell_role", "1 for the role that a cell has.", ["cell", "role"], registry=to)
        self.micro_steps = Counter("gyre_micro_steps", "Micro-steps merged.", ["cell"], registry=to)
        self.switches = Counter("gyre_switches", "Role switches that ended.", ["cell", "end"], registry=to)
        self.switch_stage_s = Histogram(
            "gyre_switch_stage_seconds", "Stages of role switches.", ["stage"], buckets=_STAGE_S, registry=to
        )
        self.child_restarts = Counter(
            "gyre_child_restarts", "Children started again after a death.", ["name"], registry=to
        )


class GatewayMetrics(Metrics):
    """What a gateway knows of its calls."""

    def __init__(self) -> None:
        super().__init__()
        to = self.registry
        self.open_runs = Gauge("gyre_open_runs", "Runs that are let in.", registry=to)
        self.calls_in_flight = Gauge("gyre_calls_in_flight", "Calls with an engine, by cell.", ["cell"], registry=to)
        self.calls_waiting = Gauge(
            "gyre_calls_waiting", "Calls that wait for an engine at the right version.", registry=to
        )
        self.calls = Counter(
            "gyre_calls", "Calls answered, by dialect and how they ended.", ["dialect", "end"], registry=to
        )
        self.call_s = Histogram("gyre_call_seconds", "From request to complete answer.", buckets=_CALL_S, registry=to)
        self.sampled_tokens = Counter("gyre_sampled_tokens", "Tokens sampled by the policy.", registry=to)
        self.prompt_tokens = Counter("gyre_prompt_tokens", "Prompt tokens sent to engines.", registry=to)
        self.cached_tokens = Counter("gyre_cached_tokens", "Prompt tokens found in an engine's cache.", registry=to)
        self.recomputed_tokens = Counter(
            "gyre_prefix_tokens_recomputed", "Whole-block prefix tokens computed again after a re-route.", registry=to
        )
        self.moved_blocks = Counter(
            "gyre_kv_moved_blocks",
            "KV blocks that engines took over, for a request that waits or for a prefix that rests.",
            ["for"],
            registry=to,
        )
        self.moved_bytes = Counter("gyre_kv_moved_bytes", "Bytes of these blocks.", ["for"], registry=to)
        self.moved_tokens = Counter(
            "gyre_kv_moved_tokens", "Tokens of these blocks, which need not be computed again.", ["for"], registry=to
        )
        self.move_s = Histogram(
            "gyre_kv_move_seconds",
            "Moves of a prefix, by whether all of it came.",
            ["for", "end"],
            buckets=_STAGE_S,
            registry=to,
        )
        self.continued_calls = Counter(
            "gyre_continued_calls", "Calls carried on elsewhere or on new weights.", registry=to
        )
        self.forks = Counter(
            "gyre_forks", "Branches in the trees of closed runs, by why they began.", ["cause"], registry=to
        )
        self.tree_faults = Counter(
            "gyre_tree_faults",
            "Breaches of the lineages' invariant in closed runs; not 0 is a fault of ours.",
            registry=to,
        )
        self.copy_behind_bytes = Gauge(
            "gyre_journal_copy_behind_bytes", "Bytes of journals that the peer is not known to have.", registry=to
        )
        self.silence_s = Histogram(
            "gyre_silence_seconds", "Extra silence that a re-route put into an answer.", buckets=_STAGE_S, registry=to
        )
