"""A worker's lines name it and the generation that it follows, and say what it did, or why it did not."""

from __future__ import annotations

import logging

import pytest

from oobleck.control.steps import Apply, Interrupted, ReportResumed, TakeSums
from oobleck.planner import WorkerId
from oobleck.training.step.effect_log import logged
from oobleck.training.worker_log import WorkerLog
from tests.control.steps.test_judgement import record

WORKER = WorkerId(node="node1", device=0)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> WorkerLog:
    caplog.set_level(logging.DEBUG, logger="oobleck.test")
    return WorkerLog("oobleck.test", WORKER, lambda: 3)


def test_a_line_begins_with_the_worker_and_its_generation(log: WorkerLog, caplog: pytest.LogCaptureFixture):
    log.info("has %d layers", 4)
    WorkerLog("oobleck.test", WORKER).info("begins")
    assert caplog.messages == ["[node1:0 generation 3] has 4 layers", "[node1:0] begins"]


@pytest.mark.parametrize(
    ("effect", "level", "words"),
    [(ReportResumed(4), logging.INFO, "generation 4"), (Apply(record(7)), logging.DEBUG, "step 7")],
)
def test_what_a_plan_changes_is_information_and_what_every_step_does_is_not(
    log: WorkerLog, caplog: pytest.LogCaptureFixture, effect, level, words
):
    with logged(log, effect, WORKER):
        pass
    (line,) = caplog.records
    assert line.levelno == level
    assert words in line.getMessage()


def test_what_a_fence_ended_is_told_with_the_fence(log: WorkerLog, caplog: pytest.LogCaptureFixture):
    with pytest.raises(Interrupted), logged(log, Apply(record(7)), WORKER):
        raise Interrupted
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert "step 7" in line.getMessage()
    assert "Interrupted" in line.getMessage()


def test_what_is_only_looked_at_says_nothing_and_a_level_leaves_lines_out(
    log: WorkerLog, caplog: pytest.LogCaptureFixture
):
    with logged(log, TakeSums(1), WORKER):
        pass
    caplog.set_level(logging.INFO, logger="oobleck.test")
    with logged(log, Apply(record(7)), WORKER):
        pass
    assert not caplog.messages
    with logged(log, ReportResumed(4), WORKER):
        pass
    assert len(caplog.messages) == 1
