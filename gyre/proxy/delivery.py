"""How an answer is held back from a stream until nothing can break it any more.

What the research on harnesses found: a stream that is cut after text kills some of them, one that is cut before its
headers kills none; a long wait before the headers is borne, or ends in an equal request, which joins its call here. So
a stream's headers are held too, and only when that takes long are they sent, with a heartbeat after them; then the
whole answer goes out at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hold:
    headers_s: float
    """How long the headers are held back at most."""
    heartbeat_s: float
    """Between heartbeats after that."""


_DEFAULT = Hold(headers_s=60.0, heartbeat_s=10.0)
_OF_PROFILE = {
    # It takes a stream that ends without content for success, but sends its request again after 120 s without headers.
    "qwen-code": Hold(headers_s=600.0, heartbeat_s=10.0),
}


def hold_of(profile: str) -> Hold:
    return _OF_PROFILE.get(profile, _DEFAULT)
