"""What leaves a run's tree for training and for the books: lineages, and the summary of a closed run.

Built by the gateway from the trajectory tree when a run is closed; consumed by the core (the summary) and by the
replicas (the lineages). Token arrays travel as little-endian bytes, so that a long lineage costs its size and no more.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from gyre.ids import RunId
from gyre.wire import record


class LineageRole(StrEnum):
    """What a lineage was for, in the order in which selection prefers them; `auxiliary` is never trained."""

    MAIN = "main"
    MAIN_SUMMARY = "main-summary"
    SUB_AGENT = "sub-agent"
    SUB_AGENT_SUMMARY = "sub-agent-summary"
    AUXILIARY = "auxiliary"


class Outcome(StrEnum):
    """How a run ended. Only `finished` and `timed_out` have a reward; the others are in no baseline, loss or count."""

    FINISHED = "finished"
    TIMED_OUT = "timed_out"
    EVALUATOR_FAILED = "evaluator_failed"
    INFRA_FAILED = "infra_failed"


@record("lineage")
@dataclass(frozen=True)
class Lineage:
    """One selected root-to-leaf path of a run's tree, whole.

    All arrays have one entry a token of the path, `n` in all:
    token_ids int32 [n]; counted uint8 [n], 1 where the token was sampled and is counted in this lineage (a token is
    counted in one lineage only); logprobs float32 [n], the behaviour log-prob where the token was sampled, else 0;
    versions int32 [n], the weight version that sampled the token, else -1.
    """

    run: RunId
    attempt: int
    index: int
    role: LineageRole
    token_ids: bytes
    counted: bytes
    logprobs: bytes
    versions: bytes

    def arrays(self) -> tuple[array[int], array[int], array[float], array[int]]:
        """(token_ids, counted, logprobs, versions) as typed arrays."""
        out = array("i"), array("B"), array("f"), array("i")
        for target, data in zip(out, (self.token_ids, self.counted, self.logprobs, self.versions), strict=True):
            target.frombytes(data)
        return out


@record("lineage_info")
@dataclass(frozen=True)
class LineageInfo:
    """The size of one selected lineage: what a packer needs to know without its tokens."""

    index: int
    role: LineageRole
    tokens: int
    counted_tokens: int
    lowest_version: int
    """The lowest version that sampled one of its counted tokens; -1 when it has none."""


@record("run_trace")
@dataclass(frozen=True)
class RunTrace:
    """What the gateway knows of a closed run. Figures are of this attempt."""

    run: RunId
    attempt: int
    calls: int
    """Model calls of the harness that were answered."""
    sampled_tokens: int
    """Tokens the policy sampled in answers that reached the harness."""
    counted_tokens: int
    """T_i: tokens that training counts, over all selected lineages."""
    tree_tokens: int
    lineages: tuple[LineageInfo, ...]
    continued_calls: int
    """Calls that were stopped on one engine and continued on another (or on new weights)."""
    interrupted_calls: int
    """Calls for which the harness saw an error that was ours."""
    prefix_tokens_recomputed: int
    """Whole-block prefix tokens that an engine computed again after a re-route at an equal version."""
    max_silence_s: float
    """The longest extra silence that a re-route put into one of its answers, in seconds."""
    failure: str
    """Why the gateway stopped the run (a full disk), or an empty string."""
    forks: dict[str, int] = field(default_factory=dict[str, int])
    """Branches of the tree by why they began (gyre.trajectory.forks.ForkReason)."""
    faults: tuple[str, ...] = ()
    """What is wrong with the tree, one line a fault (a lineage that does not grow by extension); empty where it is sound."""
