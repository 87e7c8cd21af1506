"""The weights of DESIGN §7: L = 1/|R| · Σ_i 1/T_i · Σ_{t in T_i} ℓ_t.

Denominators are those of the run (T_i, over all its lineages) and of the batch (|R|, its scored runs), never of a
micro-batch, a rank or a cell. So a part of a run's tokens has a share that does not depend on how the batch was split:
micro-steps add shares, and the one division by |R| comes at the step.
"""

from __future__ import annotations

from gyre.errors import BadInput


def run_weight(run_counted_tokens: int) -> float:
    """1/T_i: what each token loss of the run is multiplied by."""
    if run_counted_tokens < 1:
        raise BadInput("run_counted_tokens", run_counted_tokens, "at least 1: a run without counted tokens has no loss")
    return 1.0 / run_counted_tokens


def batch_weight(scored_runs: int) -> float:
    """1/|R|: what the gradient sums of the whole batch are multiplied by, once."""
    if scored_runs < 1:
        raise BadInput("scored_runs", scored_runs, "at least 1: a batch without scored runs makes no step")
    return 1.0 / scored_runs
