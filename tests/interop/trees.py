"""A closed run's tree, built anew from its journal: what it is sound of, and what it holds."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

from gyre.ids import CallId, RunId
from gyre.proxy.journal_writer import read_journal
from gyre.trajectory.journal import CallDelivered, CallEnded, CallSampled, CallStarted, RunOpened
from gyre.trajectory.tree import Tree


def tree_report(journal: Path) -> dict[str, Any]:
    records = read_journal(journal)
    opened = records[0]
    assert isinstance(opened, RunOpened)
    tree = Tree(RunId(opened.run), opened.attempt)
    started: dict[CallId, CallStarted] = {}
    stretches: dict[CallId, tuple[array[int], array[float], array[int]]] = {}
    forks: list[dict[str, Any]] = []
    for entry in records[1:]:
        match entry:
            case CallStarted():
                started[entry.call] = entry
                stretches[entry.call] = array("i"), array("f"), array("i")
            case CallSampled():
                parts = (entry.token_ids, entry.logprobs, entry.versions)
                for target, data in zip(stretches[entry.call], parts, strict=True):
                    target.frombytes(data)
            case CallEnded():
                call = started[entry.call]
                suffix = array("i")
                suffix.frombytes(call.suffix)
                fork = tree.add_call(call.call, call.base, suffix, *stretches[call.call], call.role, delivered=False)
                if fork is not None:
                    forks.append({"call": fork.call, "cause": fork.cause.value, "shared_tokens": fork.shared_tokens})
            case CallDelivered():
                tree.deliver(entry.call)
            case _:
                pass
    return {
        "faults": tree.check(),
        "forks": forks,
        "lineages": dict(Counter(view.role.value for view in tree.lineages())),
        "calls": [
            {
                "call": call,
                "role": tree.role(call).value,
                "base": started[call].base,
                "delivered": tree.delivered(call),
                "prompt_tokens": tree.prompt_tokens(call),
                "tokens": tree.output_tokens(call),
                "ids": hashlib.sha256(tree.output_ids(call)).hexdigest(),
            }
            for call in tree.calls
        ],
        "unfinished": [call for call in started if call not in tree],
    }
