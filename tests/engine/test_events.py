"""Server-sent events out of bytes, in whatever pieces these come."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.engine import events
from gyre.engine.events import EventReader
from gyre.engine.records import EngineGone

lines = (
    st.binary(max_size=12).map(lambda data: data.replace(b"\n", b".").strip()).filter(lambda data: data != b"[DONE]")
)
payloads = st.lists(lines, max_size=8)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


@given(payloads, st.lists(st.integers(0, 200), max_size=12))
def test_the_events_are_the_same_however_the_stream_is_cut(sent: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(b"data: " + payload + b"\n\n" for payload in sent)
    reader = EventReader()
    assert [event for piece in pieces(stream, cuts) for event in reader.read(piece)] == sent


def test_comments_are_passed_over_and_so_is_what_follows_the_end() -> None:
    reader = EventReader()
    assert reader.read(b": held\n\ndata: {}\n\ndata: [DO") == [b"{}"]
    assert reader.read(b"NE]\n\ndata: more\n\n") == []
    assert reader.read(b"data: more\n\n") == []


def test_an_event_without_an_end_is_not_gathered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST_EVENT_BYTES", 100)
    reader = EventReader()
    reader.read(b"data: " + b"x" * 90)
    with pytest.raises(EngineGone, match="longer than 100 bytes"):
        reader.read(b"x" * 90)
