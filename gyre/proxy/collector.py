"""The garbage collector in a process that is all a gateway's."""

from __future__ import annotations

import gc

_YOUNG, _MIDDLE, _OLD = 20_000, 20, 50
"""Objects, and collections, between two collections of each age. Runs are trees of what is not garbage and is let go of
whole, without a cycle: to walk them over and over is a tenth of what a call costs, and the longest of its pauses."""


def calm_collector() -> None:
    """Once what stays for the process's life is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
