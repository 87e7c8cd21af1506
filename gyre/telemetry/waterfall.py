"""Spans as lines of text: what took how long, under what, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gyre.actors.messages_gyrectl import SpanRecord

_NAME_COLUMNS = 40
_BAR_COLUMNS = 40


def waterfall(spans: Sequence[SpanRecord]) -> list[str]:
    """One line a span, children under their parent in the order of their starts; a line before each trace.

        trace 4bf92f3577b34da6a3ce929d0e0e4736
        switch c0 rollout to train                 0.000 s |████████████████████████████████████████| 1.214 s
          drain                                    0.002 s |████                                    | 0.120 s requests=3

    A span whose parent is not among them stands at the root.
    """
    lines: list[str] = []
    for trace_id in dict.fromkeys(span.trace_id for span in spans):
        lines.append(f"trace {trace_id}")
        members = [span for span in spans if span.trace_id == trace_id]
        start_ns = min(span.start_unix_ns for span in members)
        total_ns = max(1, max(span.end_unix_ns for span in members) - start_ns)
        lines += [_line(span, depth, start_ns, total_ns) for span, depth in _in_order(members)]
    return lines


def _in_order(spans: Sequence[SpanRecord]) -> Iterator[tuple[SpanRecord, int]]:
    """Each span once, with its depth."""
    known = {span.span_id for span in spans}
    children: dict[str, list[SpanRecord]] = {}
    for span in sorted(spans, key=lambda span: (span.start_unix_ns, -span.end_unix_ns)):
        parent = span.parent_id if span.parent_id in known and span.parent_id != span.span_id else ""
        children.setdefault(parent, []).append(span)
    waiting = [(span, 0) for span in reversed(children.get("", []))]
    while waiting:
        span, depth = waiting.pop()
        yield span, depth
        waiting += [(child, depth + 1) for child in reversed(children.pop(span.span_id, []))]


def _line(span: SpanRecord, depth: int, start_ns: int, total_ns: int) -> str:
    begin = (span.start_unix_ns - start_ns) * _BAR_COLUMNS // total_ns
    end = max(begin + 1, -((span.end_unix_ns - start_ns) * -_BAR_COLUMNS // total_ns))
    begin, end = min(begin, _BAR_COLUMNS - 1), min(end, _BAR_COLUMNS)
    bar = " " * begin + "█" * (end - begin) + " " * (_BAR_COLUMNS - end)
    name = "  " * depth + span.name
    if len(name) > _NAME_COLUMNS:
        name = name[: _NAME_COLUMNS - 1] + "…"
    started_s, took_s = (span.start_unix_ns - start_ns) / 1e9, (span.end_unix_ns - span.start_unix_ns) / 1e9
    notes = "".join(f" {key}={value}" for key, value in span.attributes.items())
    failed = f" FAILED: {span.error}" if span.error else ""
    return f"{name:<{_NAME_COLUMNS}} {started_s:8.3f} s |{bar}| {took_s:.3f} s{notes}{failed}"
