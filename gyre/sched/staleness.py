"""The staleness rule (DESIGN §7): how far launched groups may run ahead, and which tokens are too old to train on."""

from __future__ import annotations


def capacity(launched: int, consumed: int, batch_groups: int, staleness: int) -> int:
    """Groups that may be launched now, so that `launched - consumed <= (staleness + 1) * batch_groups` holds.

    `launched` and `consumed` count since the job began and are the store's, so that a restart changes nothing. Should
    a restart have lost launches (`launched < consumed`), they are not made up for: the bound is never exceeded.
    """
    bound = (staleness + 1) * batch_groups
    outstanding = max(0, launched - consumed)
    return max(0, bound - outstanding)


def lag(snapshot_version: int, lowest_version: int) -> int:
    """Versions between the snapshot that is trained and the lowest that sampled a run's tokens; 0 for none (-1)."""
    return 0 if lowest_version < 0 else max(0, snapshot_version - lowest_version)


def withheld(snapshot_version: int, lowest_version: int, staleness: int) -> bool:
    """Whether tokens sampled at `lowest_version` are left out of training (the run's reward still counts)."""
    return lag(snapshot_version, lowest_version) > staleness
