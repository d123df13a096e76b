"""Pipelines whose workers hold several chunks of layers each: the same losses, whatever happens to their nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleck.control.journal import PlanAdopted
from oobleck.runtime.journals import follow_journal
from oobleck.schedule import ScheduleKind

from . import test_sections as sections
from .elastic import (
    ENDLESS,
    TOLERANCE,
    Reference,
    assert_losses,
    assert_nothing_lost,
    lost_nodes,
    run_with_a_kill,
    stopped,
)
from .harness import TAG, Runner
from .test_losses import KILL_STEP, job_file_with

INTERLEAVED = ("--set", "schedule=interleaved")


@pytest.mark.slow
def test_stages_of_several_chunks_change_no_loss(runner: Runner, endless_reference: Reference) -> None:
    """Two pipelines of two workers with two chunks each; of the one that loses a node, a single stage is left."""
    path = job_file_with(runner, "interleaved")
    assert_losses(run_with_a_kill(runner, "--job", str(path), kill=f"node3@{KILL_STEP}").losses, endless_reference)
    assert shapes(runner) == [[(2, 2), (2, 2)], [(1, 1), (2, 2)]]


@pytest.mark.slow
def test_sections_of_interleaved_pipelines_change_no_loss(runner: Runner) -> None:
    """Each pipeline loses a node in the middle of a step: what is committed of it is not run again."""
    for _ in range(sections.TRIES):
        with runner.up(*sections.options(runner), *INTERLEAVED) as up:
            sections.wait_for_middle_of_step(runner, up, 3)
            sections.kill(runner, ("node1", "node2"))
            outcome = up.finish()
        sections.assert_right(runner, outcome, sections.reference(runner))
        assert lost_nodes(outcome) == ["node1", "node2"]
        assert shapes(runner)[0] == [(2, 2), (2, 2)]
        if sections.plans_within_steps(runner):
            break
    assert sections.plans_within_steps(runner)


@pytest.mark.slow
def test_an_interleaved_run_goes_on_from_a_checkpoint_of_another_schedule_and_back(
    runner: Runner, endless_reference: Reference, tmp_path: Path
) -> None:
    checkpoint = f"checkpoint={{enabled: true, save_steps: 4, directory: {tmp_path / 'checkpoints'}}}"
    losses: list[float] = []
    for schedule in ("interleaved", "1f1b", "interleaved"):
        settings = (checkpoint, f"schedule={schedule}")
        sets = [word for setting in settings for word in ("--set", setting)]
        with runner.up("--job", str(runner.job_file()), "--steps", str(ENDLESS), *sets) as up:
            up.wait_for("] step ")
            up.wait_for_steps(4)
            outcome = stopped(runner, up)
        assert_nothing_lost(outcome, len(outcome.losses))
        assert {chunks for _, chunks in shapes(runner)[-1]} == {2 if schedule == "interleaved" else 1}
        losses += outcome.losses
    assert_losses(losses, endless_reference, tolerance=TOLERANCE)


def shapes(runner: Runner) -> list[list[tuple[int, int]]]:
    """For each plan of a run, the stages and the chunks of its pipelines; those of several chunks are interleaved."""
    found = []
    for entry in filter(None, follow_journal(runner.base_dir / TAG / "journal.jsonl")):
        if isinstance(entry, PlanAdopted):
            templates = [pipeline.template for pipeline in entry.plan.pipelines]
            for template, kind in zip(templates, entry.schedules, strict=True):
                assert (kind is ScheduleKind.INTERLEAVED) == (template.num_chunks > 1)
            found.append(sorted((template.num_stages, template.num_chunks) for template in templates))
    return found
