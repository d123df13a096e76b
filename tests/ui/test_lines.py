from __future__ import annotations

import pytest

from oobleck.control.journal import (
    JobEnded,
    Measured,
    MeasurementBegun,
    NodeConnected,
    Notice,
    PipelinesFormed,
    WorkerUp,
)
from oobleck.planner import WorkerId
from oobleck.ui.live import LineFormatter
from tests.control.journals import adopted, committed, job_started, plan, run_with_a_loss

NODES = ("node0", "node1")


def lines_of(*entries, **options) -> list[str]:
    formatter = LineFormatter(**options)
    return [line for entry in entries for line in formatter.apply(entry)]


def test_a_step_is_told_with_loss_and_speed():
    assert lines_of(job_started(NODES), committed(75.0, 3, loss=4.25))[2] == (
        "[0:01:15] step 3/120: loss 4.2500, 4,096 tokens/s, 0.500 s"
    )


def test_every_step_of_a_slow_run_is_told():
    steps = [committed(float(step), step) for step in range(1, 121)]
    assert len(lines_of(job_started(NODES), *steps)) == 122


def test_fast_steps_are_thinned_to_the_rate():
    steps = [committed(step / 100, step) for step in range(1, 1001)]
    told = lines_of(job_started(NODES, max_steps=2000), *steps, steps_per_s=4)[2:]
    assert 40 <= len(told) <= 42
    assert told[0].startswith("[0:00:00] step 1/")


def test_the_last_step_is_always_told():
    steps = [committed(1 + step / 1000, step) for step in range(1, 51)]
    assert "step 50/50" in lines_of(job_started(NODES, max_steps=50), *steps)[-1]


def test_a_run_that_is_stopped_tells_its_last_step_before_its_end():
    entries = [
        job_started(NODES),
        committed(1.0, 1),
        committed(1.1, 2),
        JobEnded(t_s=1.2, exit_code=130, reason="stop"),
    ]
    assert [line.split("] ")[1][:12] for line in lines_of(*entries)[2:]] == [
        "step 1/120: ",
        "step 2/120: ",
        "error: stop",
    ]


def test_the_first_step_after_an_event_is_told():
    entries = [
        committed(1.0, 1),
        committed(1.01, 2),
        NodeConnected(t_s=1.02, node="n", agent_pid=1),
        committed(1.03, 3),
    ]
    told = lines_of(job_started(NODES), *entries)
    assert [("step" in line, "connected" in line) for line in told[2:]] == [(True, False), (False, True), (True, False)]


@pytest.mark.parametrize("text", ["two\nlines", "tab\tand\r\nreturn", "\x1b[2Jescape"])
def test_an_entry_is_one_line_of_printable_characters(text):
    (line,) = lines_of(Notice(t_s=1.0, level="warning", text=text))
    assert line.startswith("[0:00:01] warning: ")
    assert line.isprintable()


def test_a_whole_run_tells_its_loss_in_order():
    told = "\n".join(lines_of(*run_with_a_loss()))
    assert (
        told.index("node3 lost")
        < told.index("recovering from the loss")
        < told.index("generation 2")
        < told.index("step 41/120")
        < told.index("no step lost")
        < told.index("all steps committed")
    )


def test_the_end_of_a_run_is_one_line_without_the_traceback_that_the_command_prints():
    end = JobEnded(t_s=1.0, exit_code=1, reason="rank 0 failed\nTraceback:\n  x\nno restart is allowed")
    assert lines_of(job_started(NODES), end)[-1] == "[0:00:01] error: rank 0 failed"


def test_each_phase_before_the_first_step_is_told_once():
    worker_ids = [WorkerId(node=node, device=0) for node in NODES]
    up = [WorkerUp(t_s=4.0 + device, node=node, device=0, pid=2, data_digest="d") for device, node in enumerate(NODES)]
    entries = [
        job_started(NODES),
        *(NodeConnected(t_s=1.0, node=node, agent_pid=1) for node in NODES),
        up[0],
        MeasurementBegun(t_s=4.5, what=Measured.LAYERS, workers=(worker_ids[0],)),
        up[1],
        MeasurementBegun(t_s=7.0, what=Measured.LINKS, workers=tuple(worker_ids)),
        adopted(8.0, 1, plan(NODES)),
        PipelinesFormed(t_s=9.0, generation=1),
        committed(12.0, 1),
        adopted(13.0, 2, plan(NODES)),
    ]
    assert [line for line in lines_of(*entries) if line.endswith("…")] == [
        "[0:00:00] connecting to 2 nodes …",
        "[0:00:01] importing torch and the model on 2 nodes …",
        "[0:00:08] forming pipelines on 2 nodes …",
        "[0:00:09] computing the first step of 120 …",
    ]
    assert "[0:00:04] node0:0 measures what the model's layers cost" in lines_of(*entries)
    assert "[0:00:07] timing links: node0:0 and node1:0" in lines_of(*entries)
