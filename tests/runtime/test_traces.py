"""Recoveries as traces: what the SDK makes of them, and what a receiver of OTLP gets over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event
from typing import Any

import pytest
import trio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from oobleck.control.journal import JournalEntry, RecoveryDone
from oobleck.runtime.traces import RecoveryTraces, open_traces
from tests.control.journals import committed, recovered, run_with_a_loss
from tests.serving import serving

WALL_NS = 1_800_000_000 * 10**9
PHASES = ["detect", "fence and plan", "copy layers", "form groups", "first step"]


def spans_of(*entries: JournalEntry) -> list[Any]:
    exporter = InMemorySpanExporter()
    traces = RecoveryTraces("mine", SimpleSpanProcessor(exporter), wall_ns=lambda: WALL_NS)
    for entry in entries:
        traces.tell(entry)
    return list(exporter.get_finished_spans())


def test_each_phase_of_a_recovery_is_a_span_and_they_follow_each_other():
    entries = list(run_with_a_loss())
    (done,) = [entry for entry in entries if isinstance(entry, RecoveryDone)]
    step = next(entry for entry in entries[entries.index(done) :] if entry.t_s > done.t_s)
    *phases, whole = spans_of(*entries)
    times = {span.name: ((span.start_time - WALL_NS) / 1e9, (span.end_time - WALL_NS) / 1e9) for span in phases}
    assert list(times) == PHASES
    assert times["detect"] == pytest.approx((done.began_s - 0.01 - step.t_s, done.began_s - step.t_s))
    assert times["first step"] == pytest.approx((done.t_s - step.t_s, 0.0))
    assert whole.name == "recovery"
    assert (whole.start_time, whole.end_time) == (phases[0].start_time, phases[-1].end_time)
    assert {span.parent.span_id for span in phases} == {whole.context.span_id}
    assert whole.attributes["oobleck.nodes"] == ("node3",)
    assert whole.attributes["oobleck.cause"] == "connection_lost"
    assert [event.name for event in whole.events] == ["planned"]
    assert whole.resource.attributes["service.name"] == "oobleck"
    assert whole.resource.attributes["oobleck.run"] == "mine"


def test_copies_and_groups_have_spans_of_their_own():
    spans = spans_of(recovered(10.0, 2, "node3", began_s=9.0), committed(11.0, 5))
    seconds = {span.name: (span.end_time - span.start_time) / 1e9 for span in spans}
    want = {"detect": 0.01, "fence and plan": 0.003, "copy layers": 0.21, "form groups": 0.787, "first step": 1.0}
    assert seconds == pytest.approx({**want, "recovery": 2.01})


def test_a_recovery_that_another_one_overtakes_ends_with_it_and_is_an_error():
    first = replace(recovered(10.0, 2, "node3", began_s=9.0), unfinished="node2 was lost")
    spans = spans_of(first, recovered(12.0, 3, "node2", began_s=11.0), committed(13.0, 5))
    one, other = [span for span in spans if span.name == "recovery"]
    assert one.status.status_code is StatusCode.ERROR
    assert one.status.description == "node2 was lost"
    assert other.status.status_code is StatusCode.UNSET
    assert one.context.trace_id != other.context.trace_id


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A receiver of OTLP; yields its endpoint, and the spans that it has taken."""
    taken: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            taken.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}", taken


async def test_a_collector_that_the_environment_names_gets_what_is_left_at_the_end(monkeypatch):
    with collector() as (endpoint, taken):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        traces = open_traces("mine")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traces.run)
            for entry in run_with_a_loss():
                traces.tell(entry)
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert [span.name for span in taken] == [*PHASES, "recovery"]


def test_nothing_is_traced_without_a_collector(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert open_traces("mine") is None


def nobody() -> str:
    """Return the endpoint of a collector that is gone."""
    with collector() as (endpoint, _):
        return endpoint


@pytest.mark.parametrize("endpoint", [nobody(), "not-a-url"])
async def test_a_collector_that_cannot_be_reached_costs_one_warning_that_names_the_variable(
    endpoint, monkeypatch, caplog, capfd
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    traces = open_traces("mine")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(traces.run)
        for entry in (*run_with_a_loss(), *run_with_a_loss()):
            traces.tell(entry)
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    (said,) = caplog.records
    assert said.name == "oobleck.up"
    assert said.message.startswith("OTEL_EXPORTER_OTLP_ENDPOINT: recoveries may not be traced: ")
    assert "opentelemetry" not in capfd.readouterr().err


class Stuck(SpanProcessor):
    """A processor whose collector never answers."""

    def __init__(self) -> None:
        self.released = Event()

    def shutdown(self) -> None:
        self.released.wait(60)


async def test_a_collector_that_never_answers_ends_with_a_warning(monkeypatch, caplog, autojump_clock):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    stuck = Stuck()
    traces = RecoveryTraces("mine", stuck)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(traces.run)
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    stuck.released.set()
    assert [record.message for record in caplog.records] == [
        "OTEL_EXPORTER_OTLP_ENDPOINT: recoveries may not be traced: the collector has not answered within 10 s"
    ]
