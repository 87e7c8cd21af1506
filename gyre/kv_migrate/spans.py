"""What of a transfer has yet to come, and who fetches it: pure bookkeeping over byte ranges.

The blocks that the source has lie one behind the other; spans of them are fetched, by one stream or by several, each
from its front to its end. A span that breaks off goes back with what is left of it, so no byte is fetched twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

STREAMS = 4
_STREAM_BYTES = 128 << 20
"""A further stream pays from so many bytes on: each costs a connection, and one fills a link that is near."""
_SPAN_BYTES = 32 << 20


@dataclass
class Span:
    """The bytes from `begin` to `end`; `begin` moves on as they arrive."""

    begin: int
    end: int


class Spans:
    """Divides `count` blocks of `block_bytes` each into spans of whole blocks, where several streams fetch them."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        total = count * block_bytes
        self.streams = max(1, min(STREAMS, total // _STREAM_BYTES, count))
        """How many may usefully fetch at once."""
        # One stream fetches all at once: between two spans the link lies idle.
        whole = max(1, _SPAN_BYTES // block_bytes) * block_bytes if self.streams > 1 else max(1, total)
        self._waiting = deque(Span(begin, min(begin + whole, total)) for begin in range(0, total, whole))

    def take(self) -> Span | None:
        """The next span that nobody fetches; None when there is none."""
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, span: Span) -> None:
        """It broke off: what is left of it is the next to be taken."""
        if span.begin < span.end:
            self._waiting.appendleft(span)

    def arrived(self, span: Span, count: int) -> range:
        """`count` more bytes of `span` are here: the numbers of the blocks that are whole by them."""
        before = span.begin // self._block_bytes
        span.begin += count
        return range(before, span.begin // self._block_bytes)


@dataclass(frozen=True)
class Read:
    """One request to an engine that reads remote memory."""

    offset: int
    length: int


def batches(total: int, read_bytes: int, batch_requests: int, batch_bytes: int) -> Sequence[tuple[Read, ...]]:
    """The bytes 0 … `total` as reads of at most `read_bytes`, in batches within both limits."""
    found: list[tuple[Read, ...]] = []
    batch: list[Read] = []
    length = 0
    for offset in range(0, total, read_bytes):
        read = Read(offset, min(read_bytes, total - offset))
        if batch and (len(batch) == batch_requests or length + read.length > batch_bytes):
            found.append(tuple(batch))
            batch, length = [], 0
        batch.append(read)
        length += read.length
    return [*found, tuple(batch)] if batch else found
