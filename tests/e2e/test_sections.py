"""Long steps that commit what they have done in sections: losses in the middle of one, and what comes of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from oobleck.cli.inputs.job_file import load_job

from .elastic import LLAMA_TOLERANCE, TOLERANCE, lost_nodes
from .harness import GPT2, LLAMA, Outcome, Runner, Up, oobleck
from .reference import reference_losses

WIDE = LLAMA.replace("num_attention_heads: 2", "num_attention_heads: 4").replace("heads: 1", "heads: 2")
"""Heads enough for two devices."""
STEPS = 6
MICROBATCHES = 96
SECTIONS = 8
INTO = 0.6
"""How far a step has come when something happens to it."""
TRIES = 4
"""On a busy machine steps differ, and what is to happen within one may happen between two."""


def options(runner: Runner, head: str = GPT2, *, steps: int = STEPS) -> tuple[str, ...]:
    """Steps of half a second and more, in sections."""
    settings = (f"global_batch_size={MICROBATCHES}", "microbatch_size=1", f"reductions_per_step={SECTIONS}")
    sets = [word for setting in settings for word in ("--set", setting)]
    return ("--job", str(runner.job_file(head)), "--steps", str(steps), *sets)


_known: dict[tuple[str, int], list[float]] = {}


def reference(runner: Runner, head: str = GPT2, *, steps: int = STEPS) -> list[float]:
    """The losses of one process that knows of no sections."""
    if (head, steps) not in _known:
        path = runner.job_file(head)
        job = load_job(path.read_text(), source=str(path))
        job = replace(job, max_steps=steps, global_batch_size=MICROBATCHES, microbatch_size=1)
        _known[head, steps] = reference_losses(job, runner.directory / "cache")
    return _known[head, steps]


def entries(runner: Runner, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in runner.journal() if entry["@type"] == kind]


def wait_for_middle_of_step(runner: Runner, up: Up, step: int) -> None:
    """Return when a step has come some way, going by how long the one before it took."""
    if not up.output:
        up.wait_for_step(1)  # from then on the journal is this run's
    deadline_s = time.monotonic() + 60
    while not (done := [entry["record"] for entry in entries(runner, "StepDone")]) or done[-1]["step"] < step - 1:
        assert time.monotonic() < deadline_s, "no step is committed"
        time.sleep(0.02)
    time.sleep(INTO * done[-1]["duration_s"])


def kill(runner: Runner, nodes: Sequence[str], processes: str = "*") -> None:
    """Kill agents and workers of nodes at once, or those whose names match the pattern."""
    for node in nodes:
        runner.signal(node, processes)


def plans_within_steps(runner: Runner) -> list[dict[str, Any]]:
    """The plans that came into force in the middle of a step, what was committed of it with them."""
    return [entry for entry in entries(runner, "PlanAdopted") if entry["partial"]["microbatches"]]


def assert_right(runner: Runner, outcome: Outcome, expected: list[float], *, tolerance: float = TOLERANCE) -> None:
    assert outcome.exit_code == 0, outcome.output
    summary = outcome.summary
    assert summary["steps_committed"] == len(expected), outcome.output
    assert (summary["steps_lost"], summary["samples_repeated"], summary["samples_missing"]) == (0, 0, 0)
    gaps = [abs(one - other) for one, other in zip(outcome.losses, expected, strict=True)]
    assert max(gaps) < tolerance, gaps
    assert runner.left_over() == []


@pytest.mark.slow
def test_what_is_committed_is_not_run_again_by_a_plan_within_the_step(runner: Runner) -> None:
    """Each pipeline loses a node in the middle of a step, so that none could finish it."""
    for _ in range(TRIES):
        with runner.up(*options(runner)) as up:
            wait_for_middle_of_step(runner, up, 3)
            kill(runner, ("node1", "node2"))
            outcome = up.finish()
        assert_right(runner, outcome, reference(runner))
        if plans_within_steps(runner):
            break
    (plan,) = plans_within_steps(runner)
    assert plan["boundary"] >= 2  # later, where a busy machine shows us the step late
    partial = plan["partial"]["microbatches"]
    assert partial == sorted(set(partial))
    assert MICROBATCHES / SECTIONS <= len(partial) < MICROBATCHES


@pytest.mark.slow
@pytest.mark.parametrize("head", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    "nodes", [("node0",), ("node1",), ("node2",), ("node3",), ("node0", "node1"), ("node0", "node3")], ids="+".join
)
def test_nodes_that_die_in_the_middle_of_a_step_change_no_loss(
    runner: Runner, nodes: tuple[str, ...], head: str
) -> None:
    with runner.up(*options(runner, head)) as up:
        wait_for_middle_of_step(runner, up, 3)
        kill(runner, nodes)
        outcome = up.finish()
    assert_right(runner, outcome, reference(runner, head), tolerance=TOLERANCE if head == GPT2 else LLAMA_TOLERANCE)
    assert lost_nodes(outcome) == sorted(nodes)


@pytest.mark.slow
def test_loss_upon_loss_within_one_step_changes_no_loss(runner: Runner) -> None:
    """Of six nodes four die, two by two; sums that were committed before the first loss have moved by the second."""
    with runner.up(*options(runner), nodes=("--local", "6")) as up:
        wait_for_middle_of_step(runner, up, 3)
        kill(runner, one_of_each_pipeline(runner))
        wait_for_plan(runner, 2)
        time.sleep(0.5)
        kill(runner, one_of_each_pipeline(runner))
        outcome = up.finish()
    assert_right(runner, outcome, reference(runner))
    assert plans_within_steps(runner)


@pytest.mark.slow
def test_workers_that_come_back_and_nodes_that_join_within_a_step_change_no_loss(runner: Runner) -> None:
    with runner.up(*options(runner, steps=30)) as up:
        wait_for_middle_of_step(runner, up, 3)
        kill(runner, ("node1", "node2"), "worker*")
        wait_for_middle_of_step(runner, up, 5)
        kill(runner, ("node3",))
        wait_for_middle_of_step(runner, up, 6)
        added = oobleck("add", "node3", "--tag", "e2e", "--base-dir", str(runner.base_dir))
        assert added.returncode == 0, added.stderr
        outcome = up.finish()
    assert_right(runner, outcome, reference(runner, steps=30))
    assert plans_within_steps(runner), "the survivors went on before the workers were back"
    assert "node3 taken in" in outcome.output


@pytest.mark.slow
def test_a_master_that_dies_in_the_middle_of_a_step_is_succeeded_and_learns_what_is_committed(runner: Runner) -> None:
    with runner.up(*options(runner)) as first:
        wait_for_middle_of_step(runner, first, 3)
        first.process.kill()
        first.process.wait()
        kill(runner, ("node1", "node2"))
        with runner.up(*options(runner)) as second:
            outcome = second.finish()
    assert_right(runner, outcome, reference(runner))
    assert len(entries(runner, "MasterResumed")) == 1
    assert plans_within_steps(runner)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharing",
    [
        ("tensor_parallel=2",),
        *((f"sharding={level}", "sharding_devices=2") for level in ("optimizer", "gradients", "all")),
    ],
)
def test_devices_that_share_stages_commit_their_shares(runner: Runner, sharing: tuple[str, ...]) -> None:
    sets = [word for setting in sharing for word in ("--set", setting)]
    with runner.up(*options(runner, WIDE), *sets) as up:
        wait_for_middle_of_step(runner, up, 3)
        kill(runner, ("node0", "node3"))
        outcome = up.finish()
    assert_right(runner, outcome, reference(runner, WIDE), tolerance=LLAMA_TOLERANCE)
    assert plans_within_steps(runner)


@pytest.mark.slow
def test_sums_that_are_committed_in_float16_have_the_scale_of_the_others(runner: Runner) -> None:
    """The loss scale starts far too high, and steps are skipped before and after the kill."""
    half = (*options(runner, steps=12), "--dtype", "float16", "--set", "initial_loss_scale=268435456.0")
    undisturbed = runner.run(*half)
    with runner.up(*half) as up:
        wait_for_middle_of_step(runner, up, 3)
        kill(runner, ("node1", "node2"))
        outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    assert plans_within_steps(runner)
    records = [entry["record"] for entry in entries(runner, "StepDone")]
    assert 3 <= sum(record["is_skipped"] for record in records) < 12
    gaps = [abs(one - other) for one, other in zip(outcome.losses, undisturbed.losses, strict=True)]
    assert max(gaps) < 2e-3, gaps


def one_of_each_pipeline(runner: Runner) -> list[str]:
    """A node of each pipeline of the newest plan, such that every layer has a holder left."""
    pipelines = entries(runner, "PlanAdopted")[-1]["plan"]["pipelines"]
    return [pipeline["nodes"][index % len(pipeline["nodes"])] for index, pipeline in enumerate(pipelines)]


def wait_for_plan(runner: Runner, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while len(entries(runner, "PlanAdopted")) < count:
        assert time.monotonic() < deadline_s, "no other plan is adopted"
        time.sleep(0.02)
