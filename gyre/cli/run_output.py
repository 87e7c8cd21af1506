"""How what a run holds goes out: as text that cannot steer a terminal, at a width that loses nothing, and as strict JSON.

Sampled text and what tools printed are anybody's: they may hold escape sequences, and numbers that JSON does not have.
"""

from __future__ import annotations

import json
import math
import sys
import unicodedata
from typing import Any, cast

from rich.console import Console, RenderableType
from rich.measure import Measurement

_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of what a terminal may act on: controls, bidirectional and other format marks, separators."""
_ANY_WIDTH = 1_000_000


def visible(text: str) -> str:
    r"""The text with `\x1b` and its like for every character that steers a terminal. Lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(_escaped(char) if unicodedata.category(char) in _STEERING else char for char in text)


def show(view: RenderableType, *, wrapped: bool) -> None:
    """Print the view: `wrapped` at the terminal's width, or with the lines it has, which the terminal wraps.

    What cannot be made that narrow is printed wider. Into a pipe a line is a line.
    """
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, soft_wrap=not wrapped)
    needed = Measurement.get(console, console.options.update(width=_ANY_WIDTH), view)
    console.width = max(console.width, needed.minimum if wrapped and terminal else needed.maximum)
    console.print(view)


def strict_json(value: Any) -> str:
    """The value as JSON; null for a number that is not finite."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _escaped(char: str) -> str:
    return char if char in "\n\t" else char.encode("unicode_escape").decode("ascii")


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(each) for key, each in cast("dict[str, Any]", value).items()}
        case list() | tuple():
            return [_finite(each) for each in cast("list[Any]", value)]
        case _:
            return value
