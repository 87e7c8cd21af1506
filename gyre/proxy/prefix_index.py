"""Which engine has computed which beginnings of prompts: a group's runs begin with one prompt, all runs with one harness's.

Pure, and bounded: of a prompt's beginning a digest every `MARK_TOKENS` tokens, and of a cell's digests the last used.
It is a guess about the engine's own cache, good enough to choose by; nothing rests on it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from gyre.ids import CellId
from gyre.kv_migrate.blocks import block_hashes

MARK_TOKENS = 64
MARKED_TOKENS = 32_768
"""Of a prompt, from its start: what runs share is a system prompt, tools and a task."""
MARKS_PER_CELL = 8192


def marks_of(prompt: array[int]) -> tuple[bytes, ...]:
    """The digests of a prompt's beginnings, each over all tokens up to it. Of weights they say nothing."""
    return tuple(block_hashes(prompt[:MARKED_TOKENS], 0, MARK_TOKENS))


class PrefixIndex:
    """What each cell holds, under the weights that it has now: `forget` a cell when they change."""

    def __init__(self) -> None:
        self._cells: dict[CellId, OrderedDict[bytes, None]] = {}

    def add(self, cell: CellId, marks: Iterable[bytes]) -> None:
        known = self._cells.setdefault(cell, OrderedDict())
        for mark in marks:
            known[mark] = None
            known.move_to_end(mark)
        while len(known) > MARKS_PER_CELL:
            known.popitem(last=False)

    def forget(self, cell: CellId) -> None:
        self._cells.pop(cell, None)

    def held(self, marks: Sequence[bytes], cells: Iterable[CellId]) -> dict[CellId, int]:
        """Tokens of the prompt's beginning that each of `cells` has, where it has any."""
        found: dict[CellId, int] = {}
        for cell in cells:
            known = self._cells.get(cell)
            if not known or not marks or marks[0] not in known:
                continue
            count = next((place for place, mark in enumerate(marks) if mark not in known), len(marks))
            found[cell] = count * MARK_TOKENS
        return found
