"""The token ids of a run's calls as the JSON text that engines are sent, each id written once.

A call's prompt is its base's prompt and output and a suffix: so its text is that of the base, and only what is new is
written anew. Of a run of 700,000 tokens this is the dearest part of a call, and 3 to 5 MB. Kept are the texts of the
calls that may be gone on from next; of another it is made again from the tree.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from gyre.engine.records import IdText
from gyre.ids import CallId
from gyre.trajectory.tree import Tree

_KEPT = 4
"""Texts of ended calls: a main thread's and its sub-agents'."""


class IdTexts:
    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._ended: OrderedDict[CallId, IdText] = OrderedDict()

    def prompt(self, base: CallId | None, suffix: array[int]) -> IdText:
        """The ids of a prompt that is `base`'s prompt and output and the suffix."""
        if base is None:
            return IdText().grown(suffix)
        text = self._ended.get(base) or IdText().grown(self._tree.history_ids(base))
        return text.grown(suffix)

    def ended(self, call: CallId, base: CallId | None, prompt: IdText, output: array[int]) -> None:
        """The call has its output, and its thread goes on from there and not from `base`."""
        if base is not None:
            self._ended.pop(base, None)
        self._ended[call] = prompt.grown(output)
        if len(self._ended) > _KEPT:
            self._ended.popitem(last=False)
