"""Records on the wire and on disk: frozen dataclasses as msgpack, validated when read.

A record class is declared with `@record("name")`. Its fields may be numbers, strings, bytes, bools, enums, None,
tuples, mappings with string keys, and other dataclasses. Unknown keys, missing keys and wrong types are errors.
`pack` / `unpack` carry one record of a known class; `pack_any` / `unpack_any` carry the name beside it, for places
where any message may arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar, cast

import cattrs
import msgpack
from cattrs.preconf.msgpack import make_converter

from gyre.errors import BadInput

T = TypeVar("T")

_converter = make_converter(forbid_extra_keys=True, detailed_validation=False)
_by_name: dict[str, type[Any]] = {}
_names: dict[type[Any], str] = {}


_MISSHAPEN = (
    cattrs.BaseValidationError,
    cattrs.errors.ForbiddenExtraKeysError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
)


def _strict(allowed: type[Any], *also: type[Any]) -> Callable[[Any, Any], Any]:
    def structure(value: Any, target: type[Any]) -> Any:
        if issubclass(target, Enum):  # an enum of strings is a str too, and must become the enum
            return target(value)
        if type(value) is allowed:
            return value
        if type(value) in also:
            return allowed(value)
        raise BadInput("value", value, f"a {allowed.__name__} is expected")

    return structure


for _primitive, _also in ((int, ()), (str, ()), (bool, ()), (bytes, ()), (float, (int,))):
    _converter.register_structure_hook(_primitive, _strict(_primitive, *_also))


def record(name: str) -> Callable[[type[T]], type[T]]:
    """Declare a frozen dataclass as a record that may travel under `name` (unique in the program)."""

    def declare(cls: type[T]) -> type[T]:
        if name in _by_name:
            raise ValueError(f"record name {name!r} is taken by {_by_name[name].__qualname__}")
        _by_name[name] = cls
        _names[cls] = name
        return cls

    return declare


def pack(value: Any) -> bytes:
    """The msgpack bytes of one record."""
    return cast(bytes, msgpack.packb(_converter.unstructure(value), use_bin_type=True))


def unpack(data: bytes, cls: type[T]) -> T:
    """The record of class `cls` in `data`.

    Raises BadInput when the bytes are not msgpack, or a key is unknown, missing or of a wrong type.
    """
    return _structured(_plain(data, f"{cls.__name__} record"), cls, f"{cls.__name__} record")


def to_plain(value: Any) -> Any:
    """The record as plain dicts, lists, strings and numbers (for JSON)."""
    return _converter.unstructure(value)


def pack_any(value: Any) -> bytes:
    """The msgpack bytes of a declared record and its name; None is carried as nothing."""
    if value is None:
        return cast(bytes, msgpack.packb(None))
    name = _names.get(type(value))
    if name is None:
        raise TypeError(f"{type(value).__qualname__} is not declared with @record")
    return cast(bytes, msgpack.packb([name, _converter.unstructure(value)], use_bin_type=True))


def unpack_any(data: bytes) -> Any:
    """The record that `pack_any` packed. Raises BadInput for an undeclared name or a wrong shape."""
    plain = _plain(data, "message")
    if plain is None:
        return None
    if not (isinstance(plain, list) and len(cast(list[Any], plain)) == 2 and isinstance(plain[0], str)):
        raise BadInput("message", str(cast(Any, plain))[:60], "it must be [name, record]")
    cls = _by_name.get(plain[0])
    if cls is None:
        raise BadInput("message", plain[0], "the name must be that of a declared record")
    return _structured(cast(Any, plain[1]), cls, f"{cls.__name__} message")


def _plain(data: bytes, field: str) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadInput(field, data[:60], "it must be msgpack") from error


def _structured(plain: Any, cls: type[T], field: str) -> T:
    try:
        return _converter.structure(plain, cls)
    except BadInput as error:
        raise BadInput(field, error.value, error.allowed) from error
    except _MISSHAPEN as error:
        raise BadInput(field, str(plain)[:60], f"it does not have that shape ({error})") from error
