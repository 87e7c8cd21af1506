"""Durations as people give them: `90s`, `10m`, `1.5h`."""

from __future__ import annotations

import re

from gyre.errors import BadInput

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SHAPE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])")


def seconds(option: str, text: str) -> float:
    """Raises BadInput, which names the option."""
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise BadInput(option, text, "a number and s, m or h, as in 90s, 10m or 1.5h")
    return float(found[1]) * _SECONDS[found[2]]
