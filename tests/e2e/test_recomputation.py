"""Blocks that recompute: what is computed is what one process computes that keeps everything, whoever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from .elastic import ENDLESS, Reference, assert_all_is_right, each_loss, stopped
from .harness import GPT2, Runner
from .test_losses import KILL_STEP

SCARCE = ("--set", "recompute=auto", "--set", "device_memory_bytes=3800000")
"""There is room for half of the model with all its activations, and for all of the model with few."""


@pytest.fixture(name="path", scope="module")
def _path(runner: Runner) -> Path:
    return runner.job_file(GPT2)


@pytest.fixture(scope="module")
def reference(runner: Runner, path: Path) -> Reference:
    return each_loss(path, runner.directory / "cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--set", "recompute=selective"), ("--set", "gradient_checkpointing=true"), SCARCE]
)
def test_stages_that_recompute_compute_what_one_process_computes(
    runner: Runner, path: Path, reference: Reference, options: tuple[str, ...]
) -> None:
    """With dropout, which draws the same numbers again, and a killed node."""
    given = ("--job", str(path), "--steps", str(ENDLESS), *options)
    with runner.up(*given, "--kill", f"node3@{KILL_STEP}") as up:
        up.wait_for_loss("node3")
        up.wait_for_steps(6)
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, reference)
    assert [recovery["nodes"] for recovery in outcome.recoveries] == [["node3"]]
    if options is SCARCE:
        plans = [entry["plan"]["pipelines"] for entry in runner.journal() if entry["@type"] == "PlanAdopted"]
        counts = [
            [stage["num_recomputed"] + stage["num_selective"] for each in plan for stage in each["template"]["stages"]]
            for plan in plans
        ]
        assert any(counts[-1]), "a node that has all layers must recompute"
        assert counts[0] != counts[-1]
