"""Blocks that torch compiles, where several devices compute them: what they exchange is left as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .elastic import ENDLESS, LLAMA_TOLERANCE, assert_losses, each_loss, stopped
from .harness import LLAMA, Runner
from .test_losses import KILL_STEP

MIXTRAL = LLAMA.replace("type: llama", "type: mixtral, num_local_experts: 4")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles with g++")
@pytest.mark.parametrize(
    ("head", "settings"),
    [
        (LLAMA.replace("num_key_value_heads: 1", "num_key_value_heads: 2"), ("tensor_parallel=2",)),
        (LLAMA, ("sharding=optimizer", "sharding_devices=2")),
        (LLAMA, ("sharding=gradients", "sharding_devices=2", "recompute=all")),
        (LLAMA, ("sharding=all", "sharding_devices=2")),
        (LLAMA, ("sharding=gradients", "sharding_devices=2", "context_parallel=2", "dropout=false")),
        (MIXTRAL, ("sharding=all", "sharding_devices=2", "expert_parallel=true")),
    ],
    ids=["tensor_parallel", "optimizer", "gradients", "all", "contexts", "experts"],
)
def test_devices_that_share_compiled_blocks_compute_what_one_process_computes(
    runner: Runner, tmp_path: Path, head: str, settings: tuple[str, ...]
) -> None:
    """A node of three is killed."""
    path = runner.job_file(head)
    path.write_text(path.read_text(encoding="utf-8").replace("max_steps: 24", f"max_steps: {ENDLESS}"), "utf-8")
    options = [word for setting in ("compile=true", *settings) for word in ("--set", setting)]
    with runner.up("--job", str(path), *options, "--kill", f"node2@{KILL_STEP}", nodes=("--local", "3")) as up:
        up.wait_for_loss("node2")
        up.wait_for_steps(4)
        outcome = stopped(runner, up)
    assert outcome.exit_code == 0, outcome.output
    assert (outcome.summary["samples_repeated"], outcome.summary["samples_missing"]) == (0, 0)
    assert_losses(outcome.losses, each_loss(path, tmp_path / "alone"), tolerance=LLAMA_TOLERANCE)
