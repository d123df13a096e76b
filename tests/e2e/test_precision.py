"""Mixed precision through `oobleck up`, with a node killed on the way."""

from __future__ import annotations

import pytest

from .harness import Runner
from .test_losses import KILL_STEP, assert_nothing_lost, largest_gap


def test_float16_skips_what_overflows_and_a_killed_node_changes_nothing(runner: Runner) -> None:
    """The loss scale starts far too high, and is still falling when the node is killed."""
    options = ("--job", str(runner.job_file()), "--dtype", "float16", "--set", "initial_loss_scale=1.7179869184e10")
    undisturbed = runner.run(*options)
    records = [entry["record"] for entry in runner.journal() if entry["@type"] == "StepDone"]
    skipped = [record["step"] for record in records if record["is_skipped"]]
    assert_nothing_lost(undisturbed, 24)
    assert skipped == list(range(1, len(skipped) + 1)), "it falls until nothing overflows"
    assert 2 <= len(skipped) < 20
    assert [record["loss_scale"] for record in records[: len(skipped) + 1]] == [
        2.0**34 / 2**index for index in range(len(skipped) + 1)
    ]
    assert undisturbed.losses[-1] < undisturbed.losses[0] - 0.1, "it learns"
    for step in (1, KILL_STEP):
        killed = runner.run(*options, "--kill", f"node2@{step}")
        assert_nothing_lost(killed, 24)
        assert largest_gap(killed.losses, undisturbed.losses) < 2e-3


@pytest.mark.slow
def test_bfloat16_with_activations_computed_again_survives_a_kill(runner: Runner) -> None:
    options = ("--job", str(runner.job_file()), "--dtype", "bfloat16", "--set", "activation_checkpointing=true")
    undisturbed = runner.run(*options)
    killed = runner.run(*options, "--kill", f"node1@{KILL_STEP}")
    assert_nothing_lost(killed, 24)
    assert undisturbed.losses[-1] < undisturbed.losses[0] - 0.5, "it learns"
    assert largest_gap(killed.losses, undisturbed.losses) < 1e-2
