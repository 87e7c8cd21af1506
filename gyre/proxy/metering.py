"""The gateway's calls as metrics: counted as they end, rendered when asked for at `/metrics`."""

from __future__ import annotations

from gyre.actors.messages import GatewayStatus
from gyre.kv_migrate.prefix import MoveReport
from gyre.proxy.sampling import Ending
from gyre.telemetry.metrics import CONTENT_TYPE, GatewayMetrics
from gyre.trajectory.records import RunTrace

__all__ = ["CONTENT_TYPE", "Metering"]


class Metering:
    def __init__(self) -> None:
        self._metrics = GatewayMetrics()

    def ended(self, dialect: str, ending: Ending, seconds: float, prompt_tokens: int, output_tokens: int) -> None:
        """A call has all its tokens, `seconds` after its sampling began."""
        metrics = self._metrics
        metrics.calls.labels(dialect, ending.finish.value).inc()
        metrics.call_s.observe(seconds)
        metrics.sampled_tokens.inc(output_tokens)
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.cached_tokens.inc(ending.cached_tokens)
        metrics.recomputed_tokens.inc(ending.recomputed_tokens)
        if ending.continued:
            metrics.continued_calls.inc()
            metrics.silence_s.observe(ending.max_silence_s)

    def failed(self, dialect: str) -> None:
        """A call ended in an error that is ours."""
        self._metrics.calls.labels(dialect, "unavailable").inc()

    def moved(self, report: MoveReport, awaited: bool) -> None:
        """A prefix was brought to another engine, or what of it came."""
        metrics, whose = self._metrics, "request" if awaited else "resting"
        metrics.moved_blocks.labels(whose).inc(report.blocks)
        metrics.moved_bytes.labels(whose).inc(report.bytes)
        metrics.moved_tokens.labels(whose).inc(report.tokens)
        metrics.move_s.labels(whose, "short" if report.reason else "whole").observe(report.seconds)

    def closed(self, trace: RunTrace) -> None:
        """A run was closed: how its tree branched, and whether it is sound."""
        for reason, count in trace.forks.items():
            self._metrics.forks.labels(reason).inc(count)
        self._metrics.tree_faults.inc(len(trace.faults))

    def render(self, status: GatewayStatus, copy_behind_bytes: int) -> bytes:
        metrics = self._metrics
        metrics.copy_behind_bytes.set(copy_behind_bytes)
        metrics.open_runs.set(status.open_runs)
        metrics.calls_waiting.set(status.calls_waiting)
        for cell, count in status.in_flight.items():
            metrics.calls_in_flight.labels(cell).set(count)
        return metrics.render()
