"""Runs that are started, watched and ended from Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

import oobleck
from oobleck.control.journal import RunState
from oobleck.errors import UsageError

from .harness import TAG, Outcome, Runner
from .paced_job import optimizer

Launch = Callable[..., oobleck.Run]


@pytest.fixture
def launch(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """`oobleck.launch` with the harness's directories; no run is left."""
    monkeypatch.setenv("TMPDIR", str(runner.temporary))
    runs: list[oobleck.Run] = []

    def start(job: object, **options: Any) -> oobleck.Run:
        runs.append(oobleck.launch(job, **{"base_dir": runner.base_dir, "local": 4, **options}))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for run in runs:
        run.stop(now=True)
        run.__exit__(None, None, None)
    assert runner.left_over() == []


@pytest.fixture
def settings(runner: Runner) -> dict[str, Any]:
    """The GPT-2 job's, without its optimizer's own."""
    read: dict[str, Any] = yaml.safe_load(runner.job_file().read_text())
    own = read.pop("optimizer")
    return {**read, **own}


def test_a_node_killed_from_python_costs_no_step(
    launch: Launch, runner: Runner, settings: dict[str, Any], undisturbed: Outcome
) -> None:
    path = runner.directory / "launched.json"
    run = launch(oobleck.Job(optimizer=optimizer, **settings), summary=path)
    events = []
    for event in run:
        events.append(event)
        if event.kind == "StepDone" and event.entry.record.step == 6:
            assert run.status().state == RunState.TRAINING
            with pytest.raises(UsageError, match="there is no node 'node9'"):
                run.kill("node9")
            run.kill("node3")
    summary = run.wait()
    assert (summary.steps_committed, summary.steps_lost) == (24, 0)
    assert [recovery.nodes for recovery in summary.recoveries] == [("node3",)]
    assert list(summary.losses) == pytest.approx(undisturbed.losses, rel=1e-9)
    assert json.loads(path.read_text()) == json.loads(summary.to_json())
    assert [str(event) for event in events[:1]] == [f"job {TAG} starts on 4 nodes"]
    assert str(events[-1]) == "all 24 steps are committed"
    assert list(run) == events
    assert (run.status().state, run.status().step, run.is_active) == (RunState.DONE, 24, False)
    with pytest.raises(UsageError, match="has ended"):
        run.kill("node2")
