"""Sections of a report: each step's numbers, checkpoints, and the job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

import pytest

from oobleck.control.journal import CheckpointSaved, History, JournalEntry
from oobleck.control.journal.history import MAX_CHECKPOINTS
from oobleck.ui.pictures.report_sections import checkpoint_section, job_section, smoothed, step_sections
from tests.control.journals import history_of, run_with_a_loss, script_with_a_failure


def with_checkpoints(count: int) -> Iterable[JournalEntry]:
    yield from run_with_a_loss(steps=30, lost_at=5)
    for step in range(1, count + 1):
        yield CheckpointSaved(
            t_s=100.0 + step, name="x", step=step, saved_at="", size_bytes=2_500_000, pause_s=0.25, duration_s=1.5
        )


@pytest.fixture(scope="module")
def history() -> History:
    return history_of(tuple(with_checkpoints(3)))


def test_the_pointer_shows_each_steps_loss_rate_and_norm(history: History) -> None:
    page = step_sections(history)
    for name, points in (
        ("loss", history.losses),
        ("learning rate", history.learning_rates),
        ("norm", history.grad_norms),
    ):
        titles = re.findall(rf"<title>step (\d+): {name} ([^<]+)</title>", page)
        assert [(int(step), float(value)) for step, value in titles] == [
            (step, float(f"{value:.5g}")) for step, value in points
        ]
    assert len(history.losses) == 30
    assert "<h2>Learning rate and gradients</h2>" in page


def test_columns_under_the_pointer_cover_the_chart_without_gaps(history: History) -> None:
    loss = step_sections(history).split("</section>")[0]
    found = re.findall(r'<rect class="value" x="([\d.]+)" y="0" width="([\d.]+)"', loss)
    columns = [(float(x), float(width)) for x, width in found]
    assert columns[0][0] == 0
    assert sum(columns[-1]) == 1000
    for (x, width), (next_x, _) in pairwise(columns):
        assert x + width == pytest.approx(next_x, abs=0.11)


def test_a_smooth_line_follows_the_mean_and_not_the_noise() -> None:
    noisy = [(float(step), 5.0 + (-1) ** step) for step in range(400)]
    assert [y for _, y in smoothed(noisy)[50:]] == pytest.approx([5.0] * 350, abs=0.06)
    assert smoothed(noisy)[0] == noisy[0]
    falling = smoothed([(float(step), 400.0 - step) for step in range(400)])
    assert falling[-1][1] == pytest.approx(20.0, abs=1.0), "it lags by a twentieth"


def test_few_points_are_drawn_as_they_are() -> None:
    page = step_sections(history_of(tuple(run_with_a_loss(steps=10, lost_at=5))))
    assert "smoothed" not in page
    assert "loss raw" not in page


def test_checkpoints_are_listed_and_the_older_ones_counted(history: History) -> None:
    page = checkpoint_section(history)
    for text in ('<td class="num">3</td>', "0:01:43", "2.5 MB", "0.250 s", "1.50 s"):
        assert text in page
    many = checkpoint_section(history_of(tuple(with_checkpoints(MAX_CHECKPOINTS + 5))))
    assert f"the newest {MAX_CHECKPOINTS} of {MAX_CHECKPOINTS + 5}" in many
    assert many.count("<tr>") == MAX_CHECKPOINTS + 1
    assert checkpoint_section(history_of(tuple(run_with_a_loss()))) == ""


def test_the_job_is_what_differs_from_the_default_with_nodes_version_and_logs(history: History) -> None:
    page = job_section(history)
    assert history.started is not None
    job = history.started.job
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]*)</dd>", page))
    assert facts["model.type"] == job.model.type
    assert facts["Oobleck"] == history.started.version
    assert facts["logs"] == f"oobleck logs --tag {job.tag}"
    assert "node0" in facts["nodes"]
    assert "optimizer.adam_epsilon" not in facts
    script = job_section(history_of(script_with_a_failure()))
    assert "oobleck logs --tag my-script" in script
    assert "model.type" not in script
