"""Pipelines whose workers hold several chunks of layers each: the same losses, whatever happens to their nodes."""

from __future__ import annotations

from oobleck.control.journal import PlanAdopted
from oobleck.runtime.files.journal_reading import follow_journal
from oobleck.schedule import ScheduleKind

from .elastic import Reference, assert_losses, run_with_a_kill
from .harness import TAG, Runner
from .test_losses import KILL_STEP, job_file_with


def test_stages_of_several_chunks_change_no_loss(runner: Runner, endless_reference: Reference) -> None:
    """Two pipelines of two workers with two chunks each; of the one that loses a node, a single stage is left."""
    path = job_file_with(runner, "interleaved")
    assert_losses(run_with_a_kill(runner, "--job", str(path), kill=f"node3@{KILL_STEP}").losses, endless_reference)
    assert shapes(runner) == [[(2, 2), (2, 2)], [(1, 1), (2, 2)]]


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
