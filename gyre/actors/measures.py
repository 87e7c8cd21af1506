"""What the scheduler measures of the job, from its own records: how fast cells sample, what a run brings, what a switch costs.

Pure: whoever calls brings the time and the records.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from gyre.actors.messages import GatewayStatus
from gyre.sched.launch import mean
from gyre.store.records import CellRoleRecord, Role, RunRecord, SwitchRecord
from gyre.trajectory.records import RunTrace

MEASURED_RUNS = 256
MEASURED_SWITCHES = 20
NEWEST = 0.2
"""Weight of the newest speed in the running mean."""


class Measures:
    """Each is 0 until it was measured."""

    def __init__(self) -> None:
        self.rollout_tokens_s = 0.0
        self.run_train_tokens = 0.0
        self.run_sampled_tokens = 0.0
        self.switch_s = 0.0
        self._heard: GatewayStatus | None = None
        self._sampled: tuple[float, int] | None = None
        self._traces: deque[RunTrace] = deque(maxlen=MEASURED_RUNS)
        """Of runs that have been trained."""

    def trained(self, trace: RunTrace) -> None:
        """A run whose record will not be shown any more."""
        self._traces.append(trace)

    def look(
        self, now_s: float, gateway: GatewayStatus | None, roles: Sequence[CellRoleRecord], runs: Sequence[RunRecord]
    ) -> None:
        if gateway is not None and gateway is not self._heard:  # the same answer again says nothing
            self._heard = gateway
            before, self._sampled = self._sampled, (now_s, gateway.sampled_tokens)
            serving = sum(role.observed is Role.ROLLOUT for role in roles)
            if before is not None and serving and gateway.calls_in_flight and now_s > before[0]:
                speed = max(0, gateway.sampled_tokens - before[1]) / (now_s - before[0]) / serving
                known = self.rollout_tokens_s
                self.rollout_tokens_s = (1 - NEWEST) * known + NEWEST * speed if known else speed
        traces = [*self._traces, *(run.trace for run in runs if run.trace is not None)][-MEASURED_RUNS:]
        self.run_train_tokens = mean([float(sum(item.tokens for item in trace.lineages)) for trace in traces]) or 0.0
        self.run_sampled_tokens = mean([float(trace.sampled_tokens) for trace in traces]) or 0.0

    def look_at_switches(self, switches: Sequence[SwitchRecord]) -> None:
        """A switch there and one back, each as its last few lasted."""
        last = sorted(switches, key=lambda switch: switch.ended_unix_s)[-MEASURED_SWITCHES:]
        lasted = {
            end: mean([switch.ended_unix_s - switch.started_unix_s for switch in last if switch.end is end])
            for end in (Role.TRAIN, Role.ROLLOUT)
        }
        self.switch_s = sum(cost or 0.0 for cost in lasted.values())


def together(statuses: Sequence[GatewayStatus]) -> GatewayStatus:
    """The gateways of several nodes as one: what they have, summed; the longest silence of all."""
    in_flight: Counter[str] = Counter()
    for status in statuses:
        in_flight.update(status.in_flight)
    return GatewayStatus(
        base_url=statuses[0].base_url,
        open_runs=sum(status.open_runs for status in statuses),
        calls_in_flight=sum(status.calls_in_flight for status in statuses),
        calls_waiting=sum(status.calls_waiting for status in statuses),
        in_flight=dict(in_flight),
        calls=sum(status.calls for status in statuses),
        sampled_tokens=sum(status.sampled_tokens for status in statuses),
        max_silence_s=max(status.max_silence_s for status in statuses),
        prefix_tokens_recomputed=sum(status.prefix_tokens_recomputed for status in statuses),
        failed_runs={run: why for status in statuses for run, why in status.failed_runs.items()},
    )
