"""The journal's format: what was written comes back, whatever tore or flipped, and a run is rebuilt from it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import BadInput
from gyre.ids import CallId, GroupId, RunId
from gyre.trajectory import journal
from gyre.trajectory.journal import (
    SEGMENT_HEADER,
    CallDelivered,
    CallEnded,
    CallSampled,
    CallStarted,
    JournalRecord,
    RunClosed,
    RunOpened,
    encode,
    read,
)
from gyre.trajectory.records import LineageRole
from gyre.trajectory.tree import Tree
from gyre.wire import pack_any

OPENED = RunOpened(RunId("run"), GroupId("group"), 1, "key", "scripted", 1.0, 64)


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def started(call: str, base: str | None, *suffix: int, seq: int = 0) -> CallStarted:
    return CallStarted(
        call=CallId(call),
        seq=seq,
        started_unix_s=1.5,
        dialect="openai-chat",
        digest=b"digest of " + call.encode(),
        role=LineageRole.MAIN,
        base=None if base is None else CallId(base),
        suffix=ids(*suffix),
        max_tokens=64,
        request=b"{}",
    )


def sampled(call: str, *tokens: int, version: int = 0) -> CallSampled:
    return CallSampled(
        CallId(call), ids(*tokens), array("f", [-0.5] * len(tokens)).tobytes(), ids(*[version] * len(tokens))
    )


def ended(call: str) -> CallEnded:
    return CallEnded(CallId(call), "stop", (f"chatcmpl-{call}",), b"answer")


LIFE: tuple[JournalRecord, ...] = (
    OPENED,
    started("a", None, 1, 2, 3),
    sampled("a", 10, 11),
    ended("a"),
    CallDelivered(CallId("a")),
    started("b", "a", 4, seq=1),
    sampled("b", 12),
    sampled("b", 13, 14, version=1),
    ended("b"),
    CallDelivered(CallId("b")),
    RunClosed(RunId("run"), 1, ""),
)


def segment(records: tuple[JournalRecord, ...]) -> bytes:
    return SEGMENT_HEADER + b"".join(map(encode, records))


# ------------------------------------------------------------------------------------------------ frames


def test_records_come_back_as_they_were_written() -> None:
    data = segment(LIFE)
    assert read(data) == (LIFE, len(data))
    assert read(memoryview(data)) == (LIFE, len(data))


def test_an_empty_segment_has_no_records() -> None:
    assert read(SEGMENT_HEADER) == ((), len(SEGMENT_HEADER))


def test_a_segment_torn_at_any_byte_keeps_every_record_before_the_tear() -> None:
    data = segment(LIFE)
    ends = [len(segment(LIFE[:count])) for count in range(len(LIFE) + 1)]
    for cut in range(len(data) + 1):
        whole = sum(end <= cut for end in ends) - 1
        assert read(data[:cut]) == ((LIFE[:whole], ends[whole]) if whole >= 0 else ((), 0)), cut


def test_writing_goes_on_after_a_torn_record_was_cut_off() -> None:
    torn = segment(LIFE)[:-3]
    kept = torn[: read(torn).good_bytes]
    assert read(kept + encode(LIFE[-1])).records == LIFE


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(segment(LIFE)) * 8 - 1))
def test_a_flipped_bit_never_changes_a_record_that_is_returned(bit: int) -> None:
    data = bytearray(segment(LIFE))
    data[bit // 8] ^= 1 << bit % 8
    records, good_bytes = read(data)
    assert records == LIFE[: len(records)]
    assert good_bytes <= bit // 8
    assert len(segment(records)) == good_bytes or not good_bytes


@pytest.mark.parametrize("tail", [b"\0" * 64, b"\xff" * 64, b"GYREJRN1"])
def test_a_tail_that_was_never_written_is_cut(tail: bytes) -> None:
    data = segment(LIFE)
    assert read(data + tail) == (LIFE, len(data))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_read_without_an_error(data: bytes) -> None:
    for start in (b"", SEGMENT_HEADER):
        assert read(start + data).records == ()


def test_a_whole_frame_that_is_no_journal_record_ends_the_reading() -> None:
    payload = pack_any(None)
    frame = journal._FRAME.pack(len(payload), journal._checksum(payload)) + payload
    assert read(segment(LIFE[:2]) + frame).records == LIFE[:2]


def test_a_record_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.trajectory.journal.MAX_PAYLOAD_BYTES", 100)
    with pytest.raises(BadInput, match=r"journal record: .* is not allowed; at most 100 bytes"):
        encode(started("a", None, *range(100)))


# ------------------------------------------------------------------------------------------------ the tree again


def rebuild(records: tuple[JournalRecord, ...]) -> Tree:
    """The tree of the calls that ended, from nothing but the records."""
    opened, *rest = records
    assert isinstance(opened, RunOpened)
    tree = Tree(opened.run, opened.attempt)
    starts: dict[CallId, CallStarted] = {}
    stretches: dict[CallId, tuple[array[int], array[float], array[int]]] = {}
    for entry in rest:
        match entry:
            case CallStarted(call=call):
                starts[call] = entry
                stretches[call] = array("i"), array("f"), array("i")
            case CallSampled(call=call):
                for values, data in zip(
                    stretches[call], (entry.token_ids, entry.logprobs, entry.versions), strict=True
                ):
                    values.frombytes(data)
            case CallEnded(call=call):
                start = starts[call]
                tree.add_call(call, start.base, array("i", start.suffix), *stretches[call], start.role, delivered=False)
            case CallDelivered(call=call):
                tree.deliver(call)
            case _:
                pass
    return tree


def test_the_records_of_a_run_hold_all_that_its_tree_needs() -> None:
    tree = rebuild(LIFE)
    assert list(tree.prompt_ids(CallId("b"))) == [1, 2, 3, 10, 11, 4]
    assert list(tree.output_ids(CallId("b"))) == [12, 13, 14]
    assert list(tree.output_versions(CallId("b"))) == [0, 1, 1]
    assert [sum(lineage.counted) for lineage in tree.select(5)] == [5]


@pytest.mark.parametrize("count", range(1, len(LIFE) + 1))
def test_a_journal_cut_after_any_record_rebuilds_a_sound_tree(count: int) -> None:
    assert rebuild(LIFE[:count]).check() == ()


def test_an_answer_without_its_delivery_on_record_is_out_of_training() -> None:
    assert rebuild(LIFE[:4]).select(5) == ()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), max_size=3), st.booleans()), max_size=8))
def test_the_rebuilt_tree_is_the_live_one(script: list[tuple[bool, list[int], bool]]) -> None:
    tree = Tree(RunId("run"), 1)
    records: list[JournalRecord] = [OPENED]
    for seq, (extends, tokens, delivered) in enumerate(script):
        call, base = CallId(str(seq)), CallId(str(seq - 1)) if extends and seq else None
        tree.add_call(call, base, tokens, tokens, [-0.5] * len(tokens), [0] * len(tokens), LineageRole.MAIN, delivered)
        records += [started(call, base, *tokens, seq=seq), sampled(call, *tokens), ended(call)]
        records += [CallDelivered(call)] if delivered else []
    rebuilt = rebuild(read(segment(tuple(records))).records)
    assert rebuilt.select(5) == tree.select(5)
    assert rebuilt.lineages() == tree.lineages()
    assert rebuilt.forks == tree.forks
