"""Reading untrusted JSON: each function gives a field's value in the type it must have, or a Fault that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gyre.proxy.faults import bad_request


def as_mapping(value: object, field: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{field}: an object is expected, not {_kind(value)}")
    return cast("Mapping[str, Any]", value)


def as_list(value: object, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad_request(f"{field}: an array is expected, not {_kind(value)}")
    return cast("list[Any]", value)


def as_text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{field}: a string is expected, not {_kind(value)}")
    return value


def text_of(body: Mapping[str, Any], key: str, field: str, default: str | None = None) -> str:
    """A string field; null and absence are `default`, or a fault without one."""
    value = body.get(key)
    if value is None:
        if default is None:
            raise bad_request(f"{field}: this field is required")
        return default
    return as_text(value, field)


def flag_of(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad_request(f"{key}: true or false is expected, not {_kind(value)}")
    return value


def count_of(body: Mapping[str, Any], key: str, least: int, most: int | None = None) -> int | None:
    """A whole-number field from `least` to `most`, or None where it is absent."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_request(f"{key}: a whole number is expected, not {_kind(value)}")
    if value < least:
        raise bad_request(f"{key}: {value} is not allowed; at least {least}")
    if most is not None and value > most:
        raise bad_request(f"{key}: {value} is not allowed; at most {most}")
    return value


def seed_of(body: Mapping[str, Any], key: str) -> int | None:
    """A seed of 64 bits with a sign, as the dialects take it, brought into what engines take: 63 bits without one."""
    value = count_of(body, key, -(2**63), _MOST_SEED)
    return None if value is None else value & _MOST_SEED


def check_number(body: Mapping[str, Any], key: str, least: float, most: float) -> None:
    """Of a number that the run's own setting stands in for: nobody reads it, and a wrong one is still a fault."""
    value = body.get(key)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_request(f"{key}: a number is expected, not {_kind(value)}")
    if not least <= value <= most:
        raise bad_request(f"{key}: {value} is not allowed; a number from {least:g} to {most:g}")


def texts_of(body: Mapping[str, Any], key: str, most: int) -> tuple[str, ...]:
    """A field that is a string or an array of strings; empty strings and absence give nothing."""
    value = body.get(key)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else as_list(value, key)
    if len(values) > most:
        raise bad_request(f"{key}: {len(values)} strings are not allowed; at most {most}")
    return tuple(text for place, item in enumerate(values) if (text := as_text(item, f"{key}[{place}]")))


def offers_tools(choice: object, field: str) -> bool:
    """Whether a tool choice lets the model have its tools: it may be told of none, and cannot be made to call one."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto"):
        return True
    if kind == "none":
        return False
    name = quoted(kind) if isinstance(kind, str) else _kind(kind)
    raise bad_request(f"{field}: {name} is not supported, no call can be forced; auto or none")


def quoted(text: str) -> str:
    """What a client said, as it may be said again in a fault: its beginning."""
    return repr(text[:_QUOTED_LETTERS])


def _kind(value: object) -> str:
    for kind, name in _NAMES:
        if isinstance(value, kind):
            return name
    return "null"


_MOST_SEED = 2**63 - 1
_QUOTED_LETTERS = 40
_NAMES = ((dict, "an object"), (list, "an array"), (str, "a string"), (bool, "a boolean"), (int | float, "a number"))
