"""Recoveries as OpenTelemetry traces, where the environment names a collector as the SDK's own variables do.

One trace is one recovery, or one planned change of nodes. Its spans are what it waited for, one after the other.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import trio

from oobleck.control import journal

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_log = logging.getLogger("oobleck.up")

_SDK = "opentelemetry"  # the root of its loggers
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_LAST_SPANS_S = 10.0


class _Complaints(logging.Handler):
    """Says once, as a warning of the run, what the SDK would say about each try."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

    def say(self, problem: str) -> None:
        if not self._said:
            self._said = True
            names = " or ".join(name for name in _ENDPOINTS if os.environ.get(name))
            _log.warning("%s: recoveries may not be traced: %s", names, problem)


class RecoveryTraces:
    """Makes the spans of each recovery once the first step after it is committed; `run` must be running."""

    def __init__(self, tag: str, processor: SpanProcessor, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        """`processor` gets the spans; `wall_ns` is the time since the epoch in nanoseconds."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        # Ours is only a default: the SDK's variables may name the service otherwise.
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "oobleck"}
        self._provider = TracerProvider(resource=Resource.create({**named, "oobleck.run": tag}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("oobleck")
        self._wall_ns = wall_ns
        self._complaints = _Complaints()
        sdk = logging.getLogger(_SDK)
        sdk.handlers = [self._complaints]
        sdk.propagate = False
        self._plan: journal.PlanAdopted | None = None
        self._done: journal.RecoveryDone | None = None

    def tell(self, entry: journal.JournalEntry) -> None:
        """Take an entry at the time at which it is written."""
        match entry:
            case journal.PlanAdopted():
                self._plan = entry
            case journal.RecoveryDone():
                self._end(entry.t_s)  # the recovery before, if another one has overtaken its first step
                self._done = entry
            case journal.StepDone() | journal.JobEnded():
                self._end(entry.t_s)
            case _:
                pass

    async def run(self) -> None:
        """Export until cancelled, and then what is left, for some seconds."""
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(deadline=trio.current_time() + _LAST_SPANS_S, shield=True) as last:
                await trio.to_thread.run_sync(self._provider.shutdown, abandon_on_cancel=True)
            if last.cancelled_caught:
                self._complaints.say(f"the collector has not answered within {_LAST_SPANS_S:.0f} s")

    def _end(self, until_s: float) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        from opentelemetry.trace import StatusCode, set_span_in_context

        origin_ns = self._wall_ns() - round(until_s * 1e9)  # entries count from the start of the run

        def at(t_s: float) -> int:
            return origin_ns + round(t_s * 1e9)

        ordered_s = min(done.t_s, done.began_s + done.decide_s)
        copied_s = min(done.t_s, ordered_s + done.transfer_s)
        # Planning has no span: it is part of the moment in which the last survivor has answered.
        times_s = [done.began_s - done.detect_s, done.began_s, ordered_s, copied_s, done.t_s, until_s]
        whole = self._tracer.start_span("recovery", start_time=at(times_s[0]), attributes=_attributes(done))
        if self._plan is not None and self._plan.generation == done.generation:
            plan = self._plan
            about: dict[str, str | float] = {"reason": plan.reason, "predicted_step_s": plan.predicted_step_s}
            whole.add_event("planned", about, timestamp=at(plan.t_s))
        if done.unfinished:
            whole.set_status(StatusCode.ERROR, done.unfinished)
        context = set_span_in_context(whole)
        names = ("detect", "fence and plan", "copy layers", "form groups", "first step")
        for name, (since_s, to_s) in zip(names, pairwise(times_s), strict=True):
            if to_s > since_s:
                self._tracer.start_span(name, context=context, start_time=at(since_s)).end(at(to_s))
        whole.end(at(until_s))


def _attributes(done: journal.RecoveryDone) -> dict[str, str | float | list[str]]:
    return {
        "oobleck.generation": done.generation,
        "oobleck.nodes": list(done.nodes),
        "oobleck.cause": done.why.value,
        "oobleck.action": done.action.value,
        "oobleck.stall_s": done.stall_s,
        "oobleck.bytes_moved": done.bytes_moved,
        "oobleck.layers_moved": done.layers_moved,
        "oobleck.microbatches_redone": done.microbatches_redone,
        "oobleck.steps_lost": done.steps_lost,
    }


def open_traces(tag: str) -> RecoveryTraces | None:
    """Return a run's traces; None if the environment names no collector, or the SDK is not installed."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning("recoveries are not traced: %s; pip install 'oobleck-train[otel]'", error)
        return None
    return RecoveryTraces(tag, BatchSpanProcessor(OTLPSpanExporter()))
