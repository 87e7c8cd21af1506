"""Spans: parents across processes, the ring, failures, OTLP when it is asked for, and the waterfall."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from gyre.actors.messages_gyrectl import SpanRecord
from gyre.errors import BadInput
from gyre.telemetry.tracing import Tracing, waterfall


def test_spans_nest_by_context_and_are_kept_with_what_they_say() -> None:
    tracing = Tracing("gyred")
    with tracing.span("switch", cell="c0", epoch=3) as switch, tracing.span("drain") as drain:
        drain.set(requests=2)
    drained, switched = sorted(tracing.spans(switch.trace_id), key=lambda span: span.name)
    assert (drained.name, drained.parent_id, drained.attributes) == ("drain", switched.span_id, {"requests": "2"})
    assert (switched.parent_id, switched.attributes, switched.error) == ("", {"cell": "c0", "epoch": "3"}, "")
    assert switched.start_unix_ns <= drained.start_unix_ns <= drained.end_unix_ns <= switched.end_unix_ns


def test_a_traceparent_joins_spans_of_two_processes_into_one_trace() -> None:
    here, there = Tracing("gyred"), Tracing("gateway")
    with here.span("switch") as switch:
        with there.span("drain engine", switch.traceparent):
            pass
        with there.span("not under the context", "00-" + "1" * 32 + "-" + "2" * 16 + "-01") as other:
            pass
    (drained,) = there.spans(switch.trace_id)
    assert switch.traceparent.startswith(f"00-{drained.trace_id}-{drained.parent_id}-")
    assert other.trace_id == "1" * 32


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-00"])
def test_what_is_no_traceparent_begins_a_trace(parent: str) -> None:
    tracing = Tracing("gyred")
    with tracing.span("a", parent) as a, tracing.span("b", parent or "also none") as b:
        pass
    assert [span.parent_id for span in tracing.spans()] == ["", ""]
    assert a.trace_id != b.trace_id


def test_a_span_that_is_started_is_there_when_it_has_ended_and_ends_once() -> None:
    tracing = Tracing("gyred")
    switch = tracing.start("switch", cell="c0")
    stage = tracing.start("drain", switch.traceparent)
    assert tracing.spans() == ()
    stage.end("timed out")
    stage.end()
    switch.end()
    assert [(span.name, span.error) for span in tracing.spans()] == [("switch", ""), ("drain", "timed out")]


async def test_tasks_have_contexts_of_their_own() -> None:
    tracing = Tracing("gyred")

    async def switch(name: str) -> str:
        with tracing.span(name) as span:
            await asyncio.sleep(0)
            with tracing.span(f"stage of {name}"):
                await asyncio.sleep(0)
        return span.trace_id

    for name, trace_id in zip("ab", await asyncio.gather(switch("a"), switch("b")), strict=True):
        assert [span.name for span in tracing.spans(trace_id)] == [name, f"stage of {name}"]


async def test_an_exception_and_a_cancellation_make_a_failed_span_and_go_on() -> None:
    tracing = Tracing("gyred")
    with pytest.raises(ValueError, match="no room"), tracing.span("load"):
        raise ValueError("no room")

    async def wait() -> None:
        with tracing.span("wait"):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [(span.name, span.error) for span in tracing.spans()] == [
        ("load", "ValueError: no room"),
        ("wait", "CancelledError"),
    ]


def test_the_ring_keeps_the_newest() -> None:
    tracing = Tracing("gyred", ring=10)
    for n in range(25):
        with tracing.span(str(n)):
            pass
    assert [span.name for span in tracing.spans()] == [str(n) for n in range(15, 25)]


def test_spans_are_sent_to_the_collector_that_is_configured() -> None:
    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        tracing = Tracing("gyred", f"http://127.0.0.1:{server.server_port}")
        with tracing.span("a switch worth sending"):
            pass
        tracing.close(30)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert [path for path, _ in bodies] == ["/v1/traces"]
    assert b"a switch worth sending" in bodies[0][1]


def test_without_a_collector_spans_are_kept_and_closing_does_not_wait_for_it() -> None:
    tracing = Tracing("gyred", "http://127.0.0.1:9")  # discard: nobody listens
    with tracing.span("a"):
        pass
    tracing.close(0.2)
    assert [span.name for span in tracing.spans()] == ["a"]


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(BadInput, match="otlp_endpoint"):
        Tracing("gyred", endpoint)


def test_no_exporter_is_loaded_unless_it_is_configured() -> None:
    code = "import sys; from gyre.telemetry.tracing import Tracing; Tracing('gyred'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"requests", "google.protobuf", "grpc", "opentelemetry.exporter", "numpy", "torch", "prometheus_client"}
    assert heavy & set(loaded) == set()


# ---------------------------------------------------------------------------------------------- the waterfall


def record(name: str, parent: str, start_s: float, end_s: float, trace: str = "t", **more: str) -> SpanRecord:
    error = more.pop("error", "")
    return SpanRecord(trace, name, parent, name, int(start_s * 1e9), int(end_s * 1e9), more, error)


def test_a_waterfall_shows_the_tree_in_order_of_time() -> None:
    spans = [
        record("load", "switch", 103, 104, error="no room"),
        record("drain", "switch", 100, 101, requests="2"),
        record("switch", "a span that is elsewhere", 100, 104),
        record("stop", "drain", 100, 100.5),
    ]
    assert waterfall(spans) == [
        "trace t",
        f"{'switch':<40}    0.000 s |{'█' * 40}| 4.000 s",
        f"{'  drain':<40}    0.000 s |{'█' * 10}{' ' * 30}| 1.000 s requests=2",
        f"{'    stop':<40}    0.000 s |{'█' * 5}{' ' * 35}| 0.500 s",
        f"{'  load':<40}    3.000 s |{' ' * 30}{'█' * 10}| 1.000 s FAILED: no room",
    ]


def test_every_span_has_its_line_even_where_clocks_differ_and_times_are_nothing() -> None:
    spans = [
        record("a", "", 10, 10),
        record("b", "a", 9.5, 9.6),
        record("c", "c", 10.5, 12),
        record("d" * 60, "a", 10, 10),
        record("e", "", 5, 5, trace="u"),
    ]
    lines = waterfall(spans)
    assert [line.split()[0] for line in lines] == ["trace", "a", "b", "d" * 37 + "…", "c", "trace", "e"]
    assert {len(line.split("|")[1]) for line in lines if "|" in line} == {40}
    assert waterfall([]) == []
