"""Mixed precision through `oobleck up`, with a node killed on the way."""

from __future__ import annotations

import itertools

import pytest

from .elastic import ENDLESS, assert_nothing_lost, run_with_a_kill, run_without_a_kill, stopped
from .harness import TAG, Runner, oobleck
from .test_losses import KILL_STEP, largest_gap


@pytest.mark.slow
def test_float16_skips_what_overflows_whoever_is_killed_or_joins(runner: Runner) -> None:
    """The loss scale starts far too high, and is still falling when the node is killed."""
    job = ("--job", str(runner.job_file()), "--dtype", "float16", "--set", "initial_loss_scale=67108864.0")
    with runner.up(*job, "--steps", str(ENDLESS), "--kill", "node2@2") as up:
        up.wait_for_loss("node2")
        added = oobleck("add", "node2", "--tag", TAG, "--base-dir", str(runner.base_dir))
        assert added.returncode == 0, added.stderr
        up.wait_for("node2 taken in")
        up.wait_for_steps(6)
        killed = stopped(runner, up)
    assert_nothing_lost(killed, len(killed.losses))
    scales = _loss_scales(runner)
    undisturbed = run_without_a_kill(runner, *job, steps=max(36, len(killed.losses)))
    skipped = list(itertools.takewhile(lambda step: step[1], scales))
    assert 3 <= len(skipped) < 20
    assert [scale for scale, _ in scales[: len(skipped) + 1]] == [
        2.0**26 / 2**index for index in range(len(skipped) + 1)
    ], "it falls until nothing overflows"
    assert undisturbed.losses[-1] < undisturbed.losses[0] - 0.5, "it learns"
    num_alike = _num_alike(scales, _loss_scales(runner))
    assert num_alike > len(skipped)
    assert largest_gap(killed.losses[:num_alike], undisturbed.losses[:num_alike]) < 2e-3


def _num_alike(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> int:
    """Steps before one that overflows in one run alone: other sums round otherwise, at the edge of the range."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


def _loss_scales(runner: Runner) -> list[tuple[float, bool]]:
    """The loss scale of each step, and whether that step overflowed and was skipped."""
    records = [entry["record"] for entry in runner.journal() if entry["@type"] == "StepDone"]
    return [(record["loss_scale"], record["is_skipped"]) for record in records]


@pytest.mark.slow
def test_bfloat16_with_activations_computed_again_survives_a_kill(runner: Runner) -> None:
    options = ("--job", str(runner.job_file()), "--dtype", "bfloat16", "--set", "activation_checkpointing=true")
    killed = run_with_a_kill(runner, *options, kill=f"node1@{KILL_STEP}")
    undisturbed = run_without_a_kill(runner, *options, steps=max(24, len(killed.losses)))
    assert undisturbed.losses[-1] < undisturbed.losses[0] - 0.5, "it learns"
    assert largest_gap(killed.losses, undisturbed.losses[: len(killed.losses)]) < 1e-2
