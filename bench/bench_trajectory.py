"""What a long run costs in the gateway's tree: 1,000 calls that grow to 700,000 tokens (DESIGN §9)."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Iterable
from statistics import median
from time import perf_counter

from row import Row

from gyre.ids import CallId, RunId
from gyre.trajectory.records import LineageRole
from gyre.trajectory.tree import Tree

NAMES = ("tree_call_1000_over_call_10", "tree_700k_run_mb")

CALLS = 1000
PROMPT_TOKENS, OUTPUT_TOKENS = 600, 100
"""New in each call: a tool's result, and the answer."""
REPEATS = 5


def rows() -> Iterable[Row]:
    early, late = zip(*(call_costs() for _ in range(REPEATS)), strict=True)
    ratio = median(late) / median(early)
    yield Row("tree_call_1000_over_call_10", ratio, "ratio", "<= 2", ratio <= 2)
    megabytes = tree_bytes() / 1e6
    yield Row("tree_700k_run_mb", megabytes, "MB", "<= 16", megabytes <= 16)


def call_costs() -> tuple[float, float]:
    """Seconds that call 10 and call 1,000 of one run take, each as the median of the ten calls up to it."""
    seconds: list[float] = []
    tree = Tree(RunId("run"), 1)
    for number in range(CALLS):
        suffix, output, logprobs, versions = new_tokens(number)
        base = CallId(str(number - 1)) if number else None
        began = perf_counter()
        tree.add_call(CallId(str(number)), base, suffix, output, logprobs, versions, LineageRole.MAIN, True)
        seconds.append(perf_counter() - began)
    return median(seconds[:10]), median(seconds[-10:])


def tree_bytes() -> int:
    """Bytes that the whole run takes in memory, as Python's own allocator counts them."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tree = Tree(RunId("run"), 1)
        for number in range(CALLS):
            base = CallId(str(number - 1)) if number else None
            tree.add_call(CallId(str(number)), base, *new_tokens(number), LineageRole.MAIN, True)
        after, _ = tracemalloc.get_traced_memory()
        assert tree.tokens == CALLS * (PROMPT_TOKENS + OUTPUT_TOKENS)
        return after - before
    finally:
        tracemalloc.stop()


def new_tokens(number: int) -> tuple[array[int], array[int], array[float], array[int]]:
    """(suffix, output, log-probs, versions) of one call; no two calls have equal tokens."""
    first = number * (PROMPT_TOKENS + OUTPUT_TOKENS)
    return (
        array("i", range(first, first + PROMPT_TOKENS)),
        array("i", range(first + PROMPT_TOKENS, first + PROMPT_TOKENS + OUTPUT_TOKENS)),
        array("f", [-0.5]) * OUTPUT_TOKENS,
        array("i", [number // 100]) * OUTPUT_TOKENS,
    )
