"""Spans across all processes of a job, kept in a ring in each and, if an endpoint is configured, sent over OTLP/HTTP.

    tracing = Tracing("gyred")
    with tracing.span("switch", cell=cell) as switch:
        with tracing.span("drain"):                       # a child: spans nest by context
            ...
        await peer.ask(Work(..., traceparent=switch.traceparent))
    # in the other process
    with tracing.span("its part of it", message.traceparent):
        ...

What begins in one message and ends in another is a span from `start`, ended by `Span.end`. The ring needs no collector,
so `gyrectl trace` works with the collector down; neither starting nor ending a span ever waits for one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gyre.actors.messages_gyrectl import SpanRecord
from gyre.errors import BadInput
from gyre.telemetry.waterfall import waterfall

__all__ = ["Span", "Tracing", "waterfall"]

Attribute = str | int | float | bool
RING_SPANS = 4096
_EXPORT_S = 2.0


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work that has begun."""

    span: otel.Span

    @property
    def trace_id(self) -> str:
        return f"{self.span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """The span's W3C traceparent, for whoever does a part of its work elsewhere."""
        context = self.span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def set(self, **attributes: Attribute) -> None:
        self.span.set_attributes(attributes)

    def fail(self, error: str) -> None:
        """Mark it as failed; it still has to end."""
        self.span.set_status(StatusCode.ERROR, error)

    def end(self, error: str = "") -> None:
        """It is over, failed when `error` says something. Ending it again changes nothing."""
        if error:
            self.fail(error)
        self.span.end()


class Tracing:
    """One process's spans. `ring` of them are kept; the oldest go first."""

    def __init__(self, service: str, otlp_endpoint: str = "", ring: int = RING_SPANS) -> None:
        self._ring = _Ring(ring)
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource({SERVICE_NAME: service}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(self._ring)
        if otlp_endpoint:
            self._provider.add_span_processor(_otlp(otlp_endpoint))
        self._tracer = self._provider.get_tracer("gyre")

    def start(self, name: str, parent_traceparent: str = "", **attributes: Attribute) -> Span:
        """A span that the caller ends, under the given parent; without one, under the span of the context, if any."""
        parent = _context(parent_traceparent) if parent_traceparent else None
        return Span(self._tracer.start_span(name, parent, attributes=attributes))

    @contextmanager
    def span(self, name: str, parent_traceparent: str = "", **attributes: Attribute) -> Generator[Span]:
        """As `start`, for a block: spans begun in the block are its children, and an exception marks it as failed."""
        span = self.start(name, parent_traceparent, **attributes)
        try:
            with otel.use_span(span.span, record_exception=False, set_status_on_exception=False):
                yield span
        except BaseException as error:
            span.fail(f"{type(error).__name__}: {error}".removesuffix(": "))
            raise
        finally:
            span.end()

    def spans(self, trace_id: str = "") -> tuple[SpanRecord, ...]:
        """The ended spans of a trace that are still in the ring, by start; of every trace when empty."""
        found = (span for span in self._ring.records() if not trace_id or span.trace_id == trace_id)
        return tuple(sorted(found, key=lambda span: span.start_unix_ns))

    def close(self, deadline_s: float = 2.0) -> None:
        """Send what is left, for at most `deadline_s`; with a dead collector it is lost."""
        ending = threading.Thread(target=self._provider.shutdown, name="gyre-tracing-close", daemon=True)
        ending.start()
        ending.join(deadline_s)


class _Ring(SpanProcessor):
    def __init__(self, size: int) -> None:
        self._spans: deque[SpanRecord] = deque(maxlen=size)
        self._lock = threading.Lock()

    def on_end(self, span: ReadableSpan) -> None:
        record = _record(span)
        with self._lock:
            self._spans.append(record)

    def records(self) -> list[SpanRecord]:
        with self._lock:
            return list(self._spans)


def _record(span: ReadableSpan) -> SpanRecord:
    context = span.get_span_context()
    assert context is not None
    return SpanRecord(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent else "",
        name=span.name,
        start_unix_ns=span.start_time or 0,
        end_unix_ns=span.end_time or 0,
        attributes={key: str(value) for key, value in (span.attributes or {}).items()},
        error=(span.status.description or "failed") if span.status.status_code is StatusCode.ERROR else "",
    )


def _context(traceparent: str) -> Context:
    """The remote parent. What is no traceparent makes a trace of its own."""
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


def _otlp(endpoint: str) -> SpanProcessor:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadInput("telemetry.otlp_endpoint", endpoint, "give http://host:4318 or https://…")
    # The exporter and what it brings are loaded only where it is wanted.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = endpoint if parts.path not in ("", "/") else f"{parts.scheme}://{parts.netloc}/v1/traces"
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_S))
