"""What training computes does not depend on the nodes that do it, nor on those that die meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oobleck.cli.inputs.job_file import load_job
from oobleck.control.journal import PlanAdopted, ProfileKnown
from oobleck.control.training.planning import schedules_for
from oobleck.job import JobSpec
from oobleck.planner import Profile, SplitBackward, profile_from_json, profile_to_json
from oobleck.runtime.journals import follow_journal
from oobleck.schedule import ScheduleKind

from .elastic import (
    LLAMA_TOLERANCE,
    TOLERANCE,
    Reference,
    assert_losses,
    assert_nothing_lost,
    lost_nodes,
    run_with_a_kill,
    run_without_a_kill,
)
from .harness import LLAMA, TAG, Outcome, Runner, oobleck, started_at, worker_pids
from .reference import reference_losses

KILL_STEP = 8


def largest_gap(losses: list[float], others: list[float]) -> float:
    assert len(losses) == len(others)
    return max(abs(one - other) for one, other in zip(losses, others, strict=True))


def gap_after_a_kill(runner: Runner, *options: str, kill: str) -> float:
    """How far the losses of a run that loses a node are from those of one that does not."""
    killed = run_with_a_kill(runner, *options, kill=kill)
    undisturbed = run_without_a_kill(runner, *options, steps=len(killed.losses))
    return largest_gap(killed.losses, undisturbed.losses[: len(killed.losses)])


@pytest.fixture(scope="module")
def job(runner: Runner) -> JobSpec:
    path = runner.job_file()
    return load_job(path.read_text(), source=str(path))


@pytest.fixture(scope="module")
def reference(runner: Runner, job: JobSpec) -> list[float]:
    return reference_losses(job, runner.directory / "cache")


def test_four_nodes_compute_what_one_process_computes(undisturbed: Outcome, reference: list[float]) -> None:
    assert_nothing_lost(undisturbed, len(reference))
    assert largest_gap(undisturbed.losses, reference) < TOLERANCE
    assert undisturbed.losses[-1] < undisturbed.losses[0] - 0.5, "it learns"


@pytest.mark.slow
def test_the_comparison_would_catch_one_microbatch_dropped_or_counted_twice(
    runner: Runner, job: JobSpec, reference: list[float]
) -> None:
    mishap = {(KILL_STEP + 1, 5)}
    dropped = reference_losses(job, runner.directory / "cache", dropped=mishap)
    doubled = reference_losses(job, runner.directory / "cache", doubled=mishap)
    # Later steps show it too, so that one wrong gradient is seen even if its own loss was reported right.
    for wrong in (dropped, doubled):
        assert largest_gap(wrong[:KILL_STEP], reference[:KILL_STEP]) == 0
        assert largest_gap(wrong[KILL_STEP + 1 :], reference[KILL_STEP + 1 :]) > 10 * LLAMA_TOLERANCE


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(("node0",), marks=pytest.mark.slow),
        pytest.param(("node1",), marks=pytest.mark.slow),
        pytest.param(("node2",), marks=pytest.mark.slow),
        pytest.param(("node3",), marks=pytest.mark.slow),
        pytest.param(("node0", "node1"), marks=pytest.mark.slow),
        pytest.param(("node1", "node2"), marks=pytest.mark.slow),  # test_sections.py has it, within a step
    ],
    ids="+".join,
)
def test_killed_nodes_cost_no_step_and_change_no_loss(start: Callable[..., Any], nodes: tuple[str, ...]) -> None:
    """Two at once: both of one pipeline, and one of each, so that no pipeline is whole.

    The run goes on until it has recovered: one of few steps may be over before a busy master hears of the step to kill
    at, and then nobody is lost.
    """
    kills = [option for node in nodes for option in ("--kill", f"{node}@{KILL_STEP}")]
    with start(*kills) as run:
        run.wait_for_recovery(*nodes)
        run.up.wait_for_steps(6)
        outcome = run.stop()
    assert lost_nodes(outcome) == sorted(nodes)


@pytest.mark.slow  # with others in test_commands.py
def test_surviving_workers_keep_their_processes(runner: Runner) -> None:
    with runner.up("--job", str(runner.job_file()), "--steps", "200") as up:
        up.wait_for_step(5)
        before = {node: (pid, started_at(pid)) for node, pid in worker_pids(runner).items()}
        assert sorted(before) == ["node0", "node1", "node2", "node3"]
        killed = oobleck("kill", "node2", "--tag", TAG, "--base-dir", str(runner.base_dir))
        assert killed.returncode == 0, killed.stderr
        up.wait_for_loss("node2")
        up.wait_for_step(6)
        survivors = {node: process for node, process in before.items() if node != "node2"}
        assert worker_pids(runner) == {node: pid for node, (pid, _) in before.items()}, "none was started again"
        assert all(started_at(pid) == start for pid, start in survivors.values()), "the same processes live on"
        assert started_at(before["node2"][0]) is None
        stopped = oobleck("stop", TAG, "--base-dir", str(runner.base_dir))
        assert stopped.returncode == 0, stopped.stderr
        outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    assert outcome.summary["samples_missing"] == 0
    assert runner.left_over() == []


@pytest.mark.slow
def test_a_llama_survives_a_kill_by_another_job_file_alone(runner: Runner) -> None:
    assert gap_after_a_kill(runner, "--job", str(runner.job_file(LLAMA)), kill=f"node2@{KILL_STEP}") < LLAMA_TOLERANCE


@pytest.mark.slow
def test_float32_agrees_within_its_own_tolerance(runner: Runner) -> None:
    options = ("--job", str(runner.job_file()), "--dtype", "float32")
    assert gap_after_a_kill(runner, *options, kill=f"node1@{KILL_STEP}") < 1e-4


@pytest.mark.slow  # the schedule that its timeline chooses has both, and plain passes
def test_backward_passes_in_two_parts_change_no_loss(runner: Runner, endless_reference: Reference) -> None:
    """Weights' gradients come later than inputs'; a node is killed meanwhile."""
    path = job_file_with(runner, "zero-bubble")
    assert_losses(run_with_a_kill(runner, "--job", str(path), kill=f"node3@{KILL_STEP}").losses, endless_reference)


@pytest.mark.slow  # tests/schedule and tests/training compare each schedule
def test_each_pipeline_runs_the_schedule_that_its_timeline_chooses(
    runner: Runner, undisturbed: Outcome, endless_reference: Reference
) -> None:
    """Of two stages, the zero-bubble one; once a node is killed, 1F1B where a single stage is left. No loss changes.

    The cache of tokens is made once, by the run before.
    """

    def when_made() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (runner.base_dir / "cache").glob("*/*")}

    assert undisturbed.exit_code == 0
    tokens = when_made()
    assert tokens
    path = job_file_with(runner, "auto")
    profile = let_splits_pay(runner, path)
    assert_losses(run_with_a_kill(runner, "--job", str(path), kill=f"node3@{KILL_STEP}").losses, endless_reference)
    assert when_made() == tokens
    job = load_job(path.read_text(), source=str(path))
    journal = tuple(filter(None, follow_journal(runner.base_dir / TAG / "journal.jsonl")))
    (entry,) = (entry for entry in journal if isinstance(entry, ProfileKnown))
    known = profile_from_json(entry.profile_json)
    assert known.layers == profile.layers
    assert known.network.assumed == ("intra_node",), "links between nodes are timed, and a node has one device"
    plans = [entry for entry in journal if isinstance(entry, PlanAdopted)]
    for entry in plans:
        assert entry.schedules == schedules_for(job, known, entry.plan)
    stages_and_kinds = [
        sorted(
            (pipeline.template.num_stages, kind)
            for pipeline, kind in zip(entry.plan.pipelines, entry.schedules, strict=True)
        )
        for entry in plans
    ]
    split, plain = (2, ScheduleKind.ZERO_BUBBLE), (1, ScheduleKind.ONE_F_ONE_B)
    assert stages_and_kinds == [[split, split], [plain, split]]


def job_file_with(runner: Runner, schedule: str) -> Path:
    path = runner.job_file()
    path.write_text(path.read_text(encoding="utf-8") + f"schedule: {schedule}\n", encoding="utf-8")
    return path


def let_splits_pay(runner: Runner, path: Path) -> Profile:
    """Have the runs of a job file take a profile in which blocks alone take time, and splitting them costs nothing."""
    directory = runner.base_dir / TAG / "profile"

    def split_ones() -> list[tuple[Path, Profile]]:
        read = [(file, profile_from_json(file.read_text(), source=str(file))) for file in directory.glob("gpt2-*.json")]
        return [(file, profile) for file, profile in read if profile.layers[1].split is not None]

    if not split_ones():
        assert_nothing_lost(runner.run("--job", str(path), "--set", "max_steps=1"), 1)
    ((file, measured),) = split_ones()
    layers = tuple(
        replace(
            layer,
            forward_s={1: seconds},
            backward_s={1: 2 * seconds},
            split=SplitBackward(
                forward_s=seconds,
                backward_input_s=seconds,
                backward_weight_s=seconds,
                kept_bytes=layer.activation_bytes,
            ),
        )
        for layer, seconds in zip(measured.layers, (1e-6, 4e-3, 4e-3, 4e-3, 4e-3, 1e-6), strict=True)
    )
    profile = replace(measured, layers=layers)
    file.write_text(profile_to_json(profile), encoding="utf-8")
    return profile
