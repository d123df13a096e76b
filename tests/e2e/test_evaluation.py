"""Evaluation between two steps: right, and of no consequence to training, whoever dies in it."""

from __future__ import annotations

from typing import Any

import pytest

from oobleck.cli.inputs.job_file import apply_overrides, load_job

from .elastic import TOLERANCE, assert_nothing_lost
from .harness import Runner
from .reference import each_reference_loss
from .test_interleaved import shapes
from .test_losses import job_file_with, largest_gap

STEPS = 12
SETTINGS = ("eval_steps=3", "data.validation_split=0.4", "max_eval_samples=150", f"max_steps={STEPS}")
OPTIONS = tuple(word for setting in SETTINGS for word in ("--set", setting))


def _evaluations(runner: Runner) -> dict[int, dict[str, Any]]:
    return {entry["step"]: entry for entry in runner.journal() if entry["@type"] == "Evaluated"}


def assert_beside_steps(runner: Runner, *steps: int) -> None:
    """Steps do not have the evaluations in them that were made after these steps."""
    evaluated = _evaluations(runner)
    records = [entry["record"] for entry in runner.journal() if entry["@type"] == "StepDone"]
    durations = {record["step"]: record["duration_s"] for record in records}
    assert any(durations[step + 1] < evaluated[step]["duration_s"] for step in steps), "steps have evaluations in them"


@pytest.fixture(scope="module")
def reference(runner: Runner) -> tuple[list[float], list[float]]:
    """Losses and evaluations of the job in one process."""
    path = runner.job_file()
    job = apply_overrides(load_job(path.read_text(), source=str(path)), SETTINGS)
    evaluations: list[float] = []
    losses = list(each_reference_loss(job, runner.directory / "cache", evaluations=evaluations))
    return losses, evaluations


@pytest.mark.slow
def test_it_is_what_one_process_computes_and_costs_no_step(
    runner: Runner, reference: tuple[list[float], list[float]]
) -> None:
    outcome = runner.run("--job", str(runner.job_file()), *OPTIONS)
    assert_nothing_lost(outcome, STEPS)
    assert largest_gap(outcome.losses, reference[0]) < TOLERANCE
    evaluated = _evaluations(runner)
    assert sorted(evaluated) == [3, 6, 9, 12]
    assert largest_gap([evaluated[step]["loss"] for step in sorted(evaluated)], reference[1]) < TOLERANCE
    assert {entry["num_samples"] for entry in evaluated.values()} == {150}
    assert_beside_steps(runner, 3, 6, 9)


@pytest.mark.slow  # test_tensor_parallel.py has one that dies in an evaluation
@pytest.mark.parametrize("node", ["node0", "node3"])
def test_a_node_that_dies_in_an_evaluation_changes_nothing(
    runner: Runner, reference: tuple[list[float], list[float]], node: str
) -> None:
    """It is what one process computes, and costs no step.

    The node is killed when the step is committed; evaluating takes many times as long as the news.
    """
    outcome = runner.run("--job", str(runner.job_file()), *OPTIONS, "--kill", f"{node}@6")
    assert_nothing_lost(outcome, STEPS)
    assert largest_gap(outcome.losses, reference[0]) < TOLERANCE
    evaluated = _evaluations(runner)
    expected = dict(zip((3, 6, 9, 12), reference[1], strict=True))
    assert evaluated.keys() == expected.keys(), "whoever is left makes it again"
    assert max(abs(entry["loss"] - expected[step]) for step, entry in evaluated.items()) < TOLERANCE
    assert {entry["num_samples"] for entry in evaluated.values()} == {150}
    assert_beside_steps(runner, 3, 9)
    recovery = outcome.recoveries[0]
    assert recovery["nodes"] == [node]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--kill", "node3@6")])
def test_chunks_are_evaluated_in_turn_and_nobody_who_dies_there_changes_anything(
    runner: Runner, reference: tuple[list[float], list[float]], options: tuple[str, ...]
) -> None:
    """Two interleaved pipelines of two stages with two chunks each, whole or broken in an evaluation."""
    path = job_file_with(runner, "interleaved")
    outcome = runner.run("--job", str(path), *OPTIONS, *options)
    assert_nothing_lost(outcome, STEPS)
    assert largest_gap(outcome.losses, reference[0]) < TOLERANCE
    evaluated = _evaluations(runner)
    expected = dict(zip((3, 6, 9, 12), reference[1], strict=True))
    assert evaluated.keys() == expected.keys()
    assert max(abs(entry["loss"] - expected[step]) for step, entry in evaluated.items()) < TOLERANCE
    assert {entry["num_samples"] for entry in evaluated.values()} == {150}
    assert shapes(runner) == [[(2, 2), (2, 2)], *([[(1, 1), (2, 2)]] if options else [])]
