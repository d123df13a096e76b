"""When a run is finished, by its journal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.journal import CheckpointSaved, JobEnded, JobStarted, JournalEntry
from oobleck.control.replay import FinishedRun
from oobleck.job import CheckpointSpec, JobSpec, ModelSpec
from tests.control.journals import books_of, committed

JOB = JobSpec(tag="t", max_steps=3)


def journal(*, saved: int = 3, exit_code: int | None = 0, steps: int = 3) -> list[JournalEntry]:
    entries: list[JournalEntry] = [
        JobStarted(t_s=0.0, version="1", job=JOB, nodes=(), started_at="2026-01-01T00:00:00Z"),
        *(committed(float(step), step) for step in range(1, steps + 1)),
        CheckpointSaved(
            t_s=4.0, name=f"step-{saved}", step=saved, saved_at="", size_bytes=1, pause_s=0.0, duration_s=0.0
        ),
    ]
    return entries if exit_code is None else [*entries, JobEnded(t_s=5.0, exit_code=exit_code, reason="")]


def read_finished(entries: list[JournalEntry]) -> FinishedRun | None:
    return books_of(entries).finished


@pytest.mark.parametrize(
    "job",
    [JOB, replace(JOB, max_steps=2), replace(JOB, seed=7), replace(JOB, checkpoint=CheckpointSpec(save_steps=1))],
)
def test_a_run_that_did_all_that_is_asked_for_is_finished(job: JobSpec) -> None:
    finished = read_finished(journal())
    assert finished is not None
    assert (finished.name, finished.step) == ("step-3", 3)
    assert finished.is_all_of(job)


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, max_steps=4),
        replace(JOB, model=ModelSpec(type="llama")),
        replace(JOB, checkpoint=CheckpointSpec(directory="/elsewhere")),
        replace(JOB, checkpoint=CheckpointSpec(enabled=False)),
    ],
)
def test_what_asks_for_something_else_is_not(job: JobSpec) -> None:
    finished = read_finished(journal())
    assert finished is not None
    assert not finished.is_all_of(job)


@pytest.mark.parametrize("changes", [{"saved": 2}, {"exit_code": None}, {"exit_code": 74}, {"saved": 2, "steps": 2}])
def test_a_run_whose_last_step_is_not_saved_or_that_ended_otherwise_is_not(changes: dict[str, int]) -> None:
    assert read_finished(journal(**changes)) is None
    assert read_finished([]) is None
