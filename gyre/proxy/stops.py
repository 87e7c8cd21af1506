"""Stop sequences, found token by token while an answer is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopSearch:
    """Watches an output for the first of some strings.

    `decode` turns token ids to text. Text is decoded in a window that starts at a token boundary, so that each token
    costs the window and not the whole output; a character that is still incomplete waits for its next token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._window: list[int] = []
        self._context = ""

    def push(self, token: int) -> str | None:
        """Take one more token; returns the stop sequence that it completes, if any."""
        if not self._stops:
            return None
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return None
        tail = self._context + text
        for stop in self._stops:
            if stop in tail:
                return stop
        if len(self._window) > _WINDOW_TOKENS:
            # Keep as many tokens as decode context as settle how the next one reads.
            kept = self._window[-_KEPT_TOKENS:]
            kept_text = self._decode(kept)
            if text.endswith(kept_text):
                cut = len(tail) - len(kept_text)
                self._context = tail[max(0, cut - self._longest) : cut]
                self._window = kept
        return None


_WINDOW_TOKENS = 24
_KEPT_TOKENS = 4


def before_stop(text: str, stop: str) -> str:
    """The text up to the stop sequence that ended it."""
    return text.partition(stop)[0] if stop else text
