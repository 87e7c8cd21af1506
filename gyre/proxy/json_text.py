"""JSON to bytes and back, at orjson's speed.

What orjson does not take as it stands the standard library does: half of a surrogate pair, which JavaScript's clients
write where they cut a text, other encodings than UTF-8, and whole numbers of more than 64 bits.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any, NoReturn, cast

import orjson

_WIDE = 2.0**63


def load(data: bytes) -> Any:
    """The value. Raises ValueError or RecursionError where it is no JSON: NaN and infinity are none."""
    with suppress(ValueError):
        value = orjson.loads(data)
        if not _has_wide_number(value):
            return value
    return json.loads(data, parse_constant=_no_constant, parse_float=_finite)


def exact(value: Any, *, sort_keys: bool = False) -> bytes:
    """JSON that `load` reads as the same value again."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else 0)
    except TypeError:
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":")).encode()


def clean(value: Any) -> bytes:
    """JSON that every client reads: half of a surrogate pair is a question mark in it."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _has_wide_number(value: Any) -> bool:
    """Whether a number in the value may have been a whole one of more than 64 bits, which orjson reads as a float."""
    level: list[Any] = [value]
    while level:
        inner: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                inner += cast("dict[str, Any]", value).values()
            elif kind is list:
                inner += cast("list[Any]", value)
            elif kind is float and abs(value) >= _WIDE:
                return True
        level = inner
    return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no value of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value
