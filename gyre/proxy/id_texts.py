"""The token ids of a run's calls as the JSON text that engines are sent, each id written once.

A call's prompt is its base's prompt and output and a suffix: so its text is that of the base, and only what is new is
written anew. Of a run of 700,000 tokens this is the dearest part of a call, and 3 to 5 MB.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass

from gyre.ids import CallId
from gyre.trajectory.tree import Tree


@dataclass
class _Piece:
    """What a call added to its base's text."""

    base: CallId | None
    text: bytes


class IdTexts:
    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._pieces: dict[CallId, _Piece] = {}

    def prompt(self, call: CallId, base: CallId | None, suffix: array[int]) -> bytes:
        """The ids of a new call's prompt, between commas."""
        if base is not None and base not in self._pieces:  # of a gateway that died
            self._pieces[base] = _Piece(None, text_of(self._tree.history_ids(base)))
        piece = self._pieces[call] = _Piece(base, text_of(suffix))
        texts = [piece.text]
        while piece.base is not None:
            piece = self._pieces[piece.base]
            texts.append(piece.text)
        return joined(*reversed(texts))

    def ended(self, call: CallId, output: array[int]) -> None:
        """The call has its output."""
        piece = self._pieces[call]
        piece.text = joined(piece.text, text_of(output))


def text_of(ids: array[int]) -> bytes:
    return json.dumps(ids.tolist(), separators=(",", ":"))[1:-1].encode()


def joined(*texts: bytes) -> bytes:
    return b",".join(text for text in texts if text)
