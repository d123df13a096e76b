"""Samples that come one after the other, without a length, are each trained on once an epoch whatever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, GPT2Config

from .finetuning_job import LENGTH, NUM_STREAMED, VOCAB_SIZE, samples
from .finetuning_reference import Samples, as_tensors, saved_model, step_losses
from .harness import TAG, Runner, oobleck

SCRIPT = str(Path(__file__).with_name("finetuning_job.py"))
BATCH = 16


def batches() -> Iterator[Samples]:
    """All samples in their own order, twice; the last step has fewer."""
    everything = as_tensors(samples("streamed")) * 2
    for first in range(0, len(everything), BATCH):
        yield everything[first : first + BATCH]


@pytest.mark.slow
def test_each_sample_is_trained_on_once_an_epoch_whatever_is_killed(runner: Runner, tmp_path: Path) -> None:
    # Not Llama, whose norms are in float32 whatever the type: rounding would grow over so many steps.
    config = GPT2Config(
        n_embd=32, n_layer=4, n_head=2, n_positions=LENGTH, vocab_size=VOCAB_SIZE, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    words = ("--", "streamed", str(tmp_path / "model"))
    with runner.up("--tag", TAG, "--resume", "never", *words, nodes=("--local", "4", SCRIPT)) as first:
        first.wait_for_step(3)
        killed = oobleck("kill", "node1", "--base-dir", str(runner.base_dir))
        assert killed.returncode == 0, killed.stderr
        first.wait_for_loss("node1")
        first.wait_for_steps(2)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        with runner.up("--tag", TAG, *words, nodes=("--local", "4", SCRIPT)) as second:
            second.wait_for("a new master takes over")
            outcome = second.finish()
    assert outcome.exit_code == 0, outcome.output
    assert "all data is read" in outcome.output
    losses = [entry["record"]["loss"] for entry in runner.journal() if entry["@type"] == "StepDone"]
    expected = list(step_losses(saved_model("streamed", tmp_path / "model"), "streamed", batches()))
    assert len(expected) == -(-2 * NUM_STREAMED // BATCH)
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)
