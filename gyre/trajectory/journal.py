"""The journal's format: what a gateway writes down of a run so that its tree survives any death of the process.

A run's journal is a sequence of segments. A segment is `SEGMENT_HEADER`, then frames; a frame is the payload's length
(u32), its xxh3-64 (u64), and the payload, one record packed with its name; integers are little-endian. The gateway
appends `encode(record)`; after a crash it calls `read` on each segment, keeps the records, and truncates the last
segment to `good_bytes`, which cuts off a torn last frame. Nothing before a damaged byte is lost, and nothing damaged
is ever returned.

A call's life, in order: `CallStarted` (before the engine is asked), one `CallSampled` a stretch of tokens (a call that
was stopped on one engine and continued on another has several), `CallEnded` (before the answer is complete at the
client), `CallDelivered` (once the client has it whole). Token arrays are little-endian bytes, as in `Lineage`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from gyre.errors import BadInput
from gyre.ids import CallId, GroupId, RunId
from gyre.trajectory.records import LineageRole
from gyre.wire import pack_any, record, unpack_any

SEGMENT_HEADER = b"GYREJRN1"
MAX_PAYLOAD_BYTES = 256 * 1024 * 1024

_FRAME = struct.Struct("<IQ")


@record("run_opened")
@dataclass(frozen=True)
class RunOpened:
    """The first record of a journal: what the gateway must know to let the run's requests in again."""

    run: RunId
    group: GroupId
    attempt: int
    key: str
    profile: str
    temperature: float
    max_tokens: int


@record("call_started")
@dataclass(frozen=True)
class CallStarted:
    """A request was taken in and rendered. Its prompt is `base`'s prompt + `base`'s output + `suffix`."""

    call: CallId
    seq: int
    """Place among the run's calls, from 0."""
    started_unix_s: float
    dialect: str
    digest: bytes
    """Of the parsed body without `stream` and `max_tokens`: by it a retry is recognised."""
    role: LineageRole
    base: CallId | None
    suffix: bytes
    """int32 token ids; the whole prompt when there is no base."""
    max_tokens: int
    request: bytes
    """What the dialect wants to read back of the request (JSON): its fields, and the messages that were new."""


@record("call_sampled")
@dataclass(frozen=True)
class CallSampled:
    """Tokens the policy sampled for `call`, following those of its earlier stretches."""

    call: CallId
    token_ids: bytes
    """int32."""
    logprobs: bytes
    """float32."""
    versions: bytes
    """int32: the weight version that sampled each token."""


@record("call_ended")
@dataclass(frozen=True)
class CallEnded:
    """The call has all its tokens. `answer` is what the dialect needs to give the same answer again (JSON)."""

    call: CallId
    finish: str
    minted: tuple[str, ...]
    """The message and tool-call ids that the proxy made for this answer, by which its return is recognised."""
    answer: bytes


@record("call_delivered")
@dataclass(frozen=True)
class CallDelivered:
    """The answer reached the harness whole. A call without this record is out of training."""

    call: CallId


@record("run_closed")
@dataclass(frozen=True)
class RunClosed:
    """The run takes no more calls. `failure` says why the gateway stopped it, or is empty."""

    run: RunId
    attempt: int
    failure: str


JournalRecord = RunOpened | CallStarted | CallSampled | CallEnded | CallDelivered | RunClosed
_KINDS = (RunOpened, CallStarted, CallSampled, CallEnded, CallDelivered, RunClosed)


class Reading(NamedTuple):
    """The records of one segment, and how many of its bytes hold them; what follows those is to be cut off."""

    records: tuple[JournalRecord, ...]
    good_bytes: int


def encode(entry: JournalRecord) -> bytes:
    """The frame of one record, to be appended to a segment."""
    payload = pack_any(entry)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BadInput("journal record", f"{len(payload)} bytes", f"at most {MAX_PAYLOAD_BYTES} bytes")
    return _FRAME.pack(len(payload), _checksum(payload)) + payload


def read(data: bytes | bytearray | memoryview) -> Reading:
    """The records at the start of a segment, up to the first byte that is torn or damaged.

    A segment that does not begin with the header has no records and 0 good bytes.
    """
    view = memoryview(data)
    if bytes(view[: len(SEGMENT_HEADER)]) != SEGMENT_HEADER:
        return Reading((), 0)
    records: list[JournalRecord] = []
    good = len(SEGMENT_HEADER)
    while (payload := _payload_at(view, good)) is not None:
        try:
            entry = unpack_any(bytes(payload))
        except BadInput:
            break
        if not isinstance(entry, _KINDS):
            break
        records.append(entry)
        good += _FRAME.size + len(payload)
    return Reading(tuple(records), good)


def _payload_at(view: memoryview, offset: int) -> memoryview | None:
    if len(view) - offset < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack_from(view, offset)
    start = offset + _FRAME.size
    if len(view) - start < length:
        return None
    payload = view[start : start + length]
    return payload if _checksum(payload) == checksum else None


def _checksum(payload: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload)
