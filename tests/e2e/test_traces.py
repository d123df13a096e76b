"""A run whose environment names a collector of traces sends it what a killed node has cost."""

from __future__ import annotations

import pytest

from tests.runtime.test_traces import collector

from .harness import Runner


@pytest.mark.slow
def test_a_killed_node_is_a_trace(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (endpoint, taken):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        job = str(runner.job_file())
        outcome = runner.run("--job", job, "--tag", "traced", "--steps", "12", "--kill", "node3@5")
        assert outcome.exit_code == 0, outcome.output
        (recovery,) = outcome.recoveries
    whole = taken[-1]
    assert whole.name == "recovery"
    parts = {span.name: span for span in taken[:-1]}
    assert {"detect", "fence and plan", "first step"} <= parts.keys()
    assert all(span.parent_span_id == whole.span_id for span in parts.values())
    seconds = (parts["fence and plan"].end_time_unix_nano - parts["fence and plan"].start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(recovery["decide_s"], abs=1e-3)
