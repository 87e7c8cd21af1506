"""A request's body: read from a client that is not trusted, and made JSON without harm to the other runs.

What it costs to read a body is bounded before it is done: its bytes, the bytes that it unpacks to, the values that it is
made of, and how deep they lie. Each refusal is a Fault with one line.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gyre.proxy.faults import Fault, FaultKind, bad_request, too_long
from gyre.proxy.json_text import load

_DEEPEST = 200
"""Levels that a body may be nested: more than any schema has, and far from where Python's recursion ends."""
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Encodings of a body that are read, with zlib's name for each."""
_ENCODINGS = 2
"""A body may be packed this many times, one in the other. Each is unpacked whole before the next."""
READ_S = 300.0
"""The longest a request's body may take to arrive. The server says nothing when a body breaks off in a broken chunk."""
_VALUES = 200_000
_VALUES_A_TOKEN = 2
"""A body may hold this many commas, brackets and braces for each token of the context, and some more: a text that has
so many does not fit, and a body that is made of them holds the gateway up while it is parsed."""


def body_encodings(request: web.Request) -> tuple[str, ...]:
    """How the body is packed, the first encoding first; empty for a plain one."""
    listed = ",".join(request.headers.getall("Content-Encoding", []))
    encodings = tuple(name for part in listed.split(",") if (name := part.strip().lower()) not in ("", "identity"))
    if len(encodings) > _ENCODINGS:
        raise bad_request(f"Content-Encoding: {len(encodings)} encodings are not allowed; at most {_ENCODINGS}")
    return encodings


async def read_body(request: web.Request, most_bytes: int) -> bytes:
    """The body as it was sent."""
    try:
        async with asyncio.timeout(None if request.content.is_eof() else READ_S):
            return await request.read()
    except TimeoutError as error:
        raise bad_request(f"the body did not arrive whole in {READ_S:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(most_bytes) from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise bad_request(f"the body cannot be read: {_line(error)}") from error


def unpacked(data: bytes, encodings: Sequence[str], most_bytes: int) -> bytes:
    """The body without its encodings."""
    for encoding in reversed(encodings):
        data = _unpacked(data, encoding, most_bytes)
    return data


def json_body(data: bytes, context_tokens: int) -> dict[str, Any]:
    """The body as JSON's object."""
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > _VALUES + _VALUES_A_TOKEN * context_tokens:
        raise too_long(len(data) // 4, context_tokens)
    try:
        body = load(data)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {_line(error)}") from error
    if not isinstance(body, dict):
        raise bad_request("the body is not a JSON object")
    if is_deeper(body, _DEEPEST):
        raise bad_request(f"the body is nested too deeply; at most {_DEEPEST} levels")
    return cast("dict[str, Any]", body)


def _unpacked(data: bytes, encoding: str, most_bytes: int) -> bytes:
    """The body without one encoding. Never more than `most_bytes`, however well it was packed."""
    window = _WINDOWS.get(encoding)
    if window is None:
        raise bad_request(f"Content-Encoding: {encoding[:40]!r} is not allowed; one of gzip, deflate, identity")
    if encoding == "deflate" and data and data[0] & 0xF != 8:
        window = -zlib.MAX_WBITS  # without zlib's header, as many clients have it
    stream = zlib.decompressobj(window)
    try:
        plain = stream.decompress(data, most_bytes + 1)
    except zlib.error as error:
        raise bad_request(f"the body is not {encoding}: {_line(error)}") from error
    if len(plain) > most_bytes:
        raise _too_large(most_bytes)
    if not stream.eof or stream.unused_data:
        raise bad_request(f"the body is not {encoding}: it does not end where it should")
    return plain


def is_deeper(value: object, levels: int) -> bool:
    """Whether a value of JSON has more levels than that."""
    level: list[Any] = [value]
    for _ in range(levels):
        inner: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                inner += cast("dict[str, Any]", value).values()
            elif kind is list:
                inner += cast("list[Any]", value)
        if not inner:
            return False
        level = inner
    return True


def _too_large(most_bytes: int) -> Fault:
    return Fault(FaultKind.TOO_LARGE, f"the request is too large: at most {most_bytes} bytes are taken")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
