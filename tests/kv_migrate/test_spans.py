"""What of a transfer has yet to come: every byte is fetched once, whatever breaks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.kv_migrate.spans import STREAMS, Span, Spans, batches

COUNTS = st.integers(0, 24)
SIZES = st.one_of(st.integers(1, 5000), st.integers(1 << 20, 96 << 20))


@settings(deadline=None)
@given(COUNTS, SIZES, st.data())
def test_streams_that_break_anywhere_fetch_every_byte_exactly_once(count: int, size: int, data: st.DataObject) -> None:
    spans = Spans(count, size)
    fetched: list[tuple[int, int]] = []
    whole: list[int] = []
    fetching: list[Span] = []
    breaks = 0
    while True:
        if len(fetching) < spans.streams and (span := spans.take()) is not None:
            assert span.begin < span.end
            fetching.append(span)
            continue
        if not fetching:
            break
        span = data.draw(st.sampled_from(fetching))
        # Most arrivals are all that is left, so that the example ends.
        some = data.draw(st.integers(1, span.end - span.begin)) if breaks < 10 else span.end - span.begin
        fetched.append((span.begin, span.begin + some))
        whole += spans.arrived(span, some)
        if span.begin == span.end:
            fetching.remove(span)
        elif data.draw(st.booleans()):
            breaks += 1
            fetching.remove(span)
            spans.put_back(span)
    edge = 0
    for begin, end in sorted(fetched):
        assert begin == edge
        edge = end
    assert edge == count * size
    assert sorted(whole) == list(range(count)), "every block is told to be whole, once"


@settings(deadline=None)
@given(COUNTS, SIZES)
def test_spans_are_of_whole_blocks_and_a_small_transfer_takes_one_stream(count: int, size: int) -> None:
    spans = Spans(count, size)
    assert 1 <= spans.streams <= STREAMS
    if count * size < 128 << 20:
        assert spans.streams == 1
    while (span := spans.take()) is not None:
        assert span.begin % size == 0
        assert span.end % size == 0


def test_what_is_left_of_a_broken_span_comes_before_others() -> None:
    spans = Spans(100, 1 << 20)
    span = spans.take()
    assert span is not None
    assert spans.arrived(span, (3 << 20) + 5) == range(3)
    spans.put_back(span)
    again = spans.take()
    assert again is not None
    assert again.begin == (3 << 20) + 5
    assert spans.arrived(again, 1 << 20) == range(3, 4)


@settings(deadline=None)
@given(st.integers(0, 20_000), st.integers(1, 5000), st.integers(1, 50), st.integers(1, 10**4))
def test_batches_keep_to_both_limits_and_leave_nothing_out(total: int, read: int, requests: int, most: int) -> None:
    edge = 0
    for batch in batches(total, read, requests, most):
        assert 1 <= len(batch) <= requests
        assert len(batch) == 1 or sum(each.length for each in batch) <= most
        for each in batch:
            assert each.offset == edge
            assert 1 <= each.length <= read
            edge += each.length
    assert edge == total
