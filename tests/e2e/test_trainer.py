"""A script of transformers' Trainer with one changed import: it trains on pipelines, a node is killed on the way, and
it has the losses and the weights that transformers' own Trainer has in one process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .elastic import assert_nothing_lost, lost_nodes
from .harness import Runner

SCRIPT = Path(__file__).with_name("trainer_script.py")
OURS, THEIRS = "from oobleck.transformers import Trainer", "from transformers import Trainer"
TOLERANCE = 1e-6
KILL_STEP = 6


def plain_losses(directory: Path, *arguments: str) -> dict[str, Any]:
    """What transformers' own Trainer comes to, by plain `python`."""
    text = SCRIPT.read_text()
    assert text.count(OURS) == 1
    script = directory / SCRIPT.name
    script.write_text(text.replace(OURS, THEIRS))
    output = directory / "theirs.json"
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *arguments[:2], str(output), *arguments[2:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(output.read_text()))


@pytest.mark.slow  # test_whole.py has a Trainer that survives a kill
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("case", ["padded", "packed", "lora", "labels"])
def test_losses_and_weights_are_those_of_transformers_trainer(
    runner: Runner, tmp_path: Path, case: str, family: str
) -> None:
    output = tmp_path / "ours.json"
    settings = ("num_pipelines=2", "torch_threads=1", "control.lease_s=10", "reductions_per_step=2")
    options = [word for setting in settings for word in ("--set", setting)]
    arguments = ("--resume", "never", "--kill", f"node2@{KILL_STEP}", "--", case, family, str(output))
    outcome = runner.run(*options, *arguments, nodes=("--local", "4", str(SCRIPT)))
    assert outcome.exit_code == 0, outcome.output
    assert lost_nodes(outcome) == ["node2"]
    assert_nothing_lost(outcome, 24)
    (ours,) = map(json.loads, output.read_text().splitlines())  # the lines after train() have run once
    theirs = plain_losses(tmp_path, case, family)
    assert theirs["global_step"] == ours["global_step"] == 24
    for name in ("losses", "rates", "training_loss", "after"):
        assert ours[name] == pytest.approx(theirs[name], rel=0, abs=TOLERANCE), name
    assert ours["losses"] == outcome.losses
    assert (ours["tokens"], ours["counted"]) == (theirs["tokens"], 24)
    assert ours["steps"] == theirs["steps"]
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
    assert ours["evaluations"] == pytest.approx(theirs["evaluations"], rel=0, abs=TOLERANCE)
    assert len(ours["recoveries"]) >= 1


@pytest.mark.slow
def test_devices_that_share_samples_train_and_evaluate_as_transformers_trainer_does(
    runner: Runner, tmp_path: Path
) -> None:
    output = tmp_path / "ours.json"
    settings = ("sharding=all", "sharding_devices=2", "context_parallel=2", "torch_threads=1", "control.lease_s=10")
    options = [word for setting in settings for word in ("--set", setting)]
    arguments = ("--resume", "never", "--kill", f"node2@{KILL_STEP}", "--", "plain", "llama", str(output))
    outcome = runner.run(*options, *arguments, nodes=("--local", "3", str(SCRIPT)))
    assert outcome.exit_code == 0, outcome.output
    assert lost_nodes(outcome) == ["node2"]
    assert_nothing_lost(outcome, 24)
    (ours,) = map(json.loads, output.read_text().splitlines())
    theirs = plain_losses(tmp_path, "plain", "llama")
    for name in ("losses", "evaluations", "training_loss", "after"):
        assert ours[name] == pytest.approx(theirs[name], rel=0, abs=TOLERANCE), name


@pytest.mark.slow
def test_plain_python_trains_on_this_machine_and_continues(runner: Runner, tmp_path: Path) -> None:
    output = tmp_path / "ours.json"
    environment = {**runner.environment, "OOBLECK_LOCAL": "2", "OOBLECK_BASE_DIR": str(runner.base_dir)}
    command = [sys.executable, str(SCRIPT), "padded", "gpt2", str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (ours,) = map(json.loads, output.read_text().splitlines())
    theirs = plain_losses(tmp_path, "padded", "gpt2")
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=0, abs=TOLERANCE)
    assert ours["after"] == pytest.approx(theirs["after"], abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["padded", "lora"])
def test_a_trainers_own_checkpoint_is_continued_with_its_optimizer(runner: Runner, tmp_path: Path, case: str) -> None:
    """What transformers saved after 9 steps is continued to the losses that transformers itself comes to."""
    theirs = plain_losses(tmp_path, case, "gpt2", "--save-steps", "9")
    output = tmp_path / "ours.json"
    words = ("--set", "torch_threads=1", "--resume", "auto", "--", case, "gpt2", str(output))
    resumed = ("--resume", str(tmp_path / "theirs" / "checkpoint-9"))
    outcome = runner.run(*words, *resumed, nodes=("--local", "2", str(SCRIPT)))
    assert outcome.exit_code == 0, outcome.output
    (ours,) = map(json.loads, output.read_text().splitlines())
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=0, abs=TOLERANCE)
    assert ours["rates"] == pytest.approx(theirs["rates"])
    assert (ours["tokens"], ours["counted"]) == (theirs["tokens"], 24), "those before the checkpoint, too"
    assert ours["after"] == pytest.approx(theirs["after"], abs=TOLERANCE)


@pytest.mark.slow
def test_the_newest_checkpoint_in_output_dir_is_continued_as_by_transformers(runner: Runner, tmp_path: Path) -> None:
    theirs = plain_losses(tmp_path, "padded", "gpt2", "--save-steps", "9")
    output = tmp_path / "ours.json"
    environment = {**runner.environment, "OOBLECK_BASE_DIR": str(runner.base_dir)}
    command = [sys.executable, str(SCRIPT), "padded", "gpt2", str(output), "--resume", "newest"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    refused = run()
    assert refused.returncode != 0
    assert f"No valid checkpoint found in output directory ({tmp_path / 'ours'})" in refused.stderr
    assert "Traceback" not in refused.stderr
    shutil.copytree(tmp_path / "theirs" / "checkpoint-9", tmp_path / "ours" / "checkpoint-9")
    done = run()
    assert done.returncode == 0, done.stderr
    (ours,) = map(json.loads, output.read_text().splitlines())
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=0, abs=TOLERANCE)
    assert ours["after"] == pytest.approx(theirs["after"], abs=TOLERANCE)


@pytest.mark.slow
def test_each_checkpoint_that_a_script_asks_for_is_written(runner: Runner, tmp_path: Path) -> None:
    """However fast its steps follow each other: of all but the last three, the run has removed its own by the end."""
    output = tmp_path / "ours.json"
    words = ("--set", "torch_threads=1", "--resume", "never", "--", "plain", "gpt2", str(output), "--save-steps", "1")
    outcome = runner.run(*words, nodes=("--local", "1", str(SCRIPT)))
    assert outcome.exit_code == 0, outcome.output
    for step in range(1, 25):
        written = {path.name for path in (tmp_path / "ours" / f"checkpoint-{step}").iterdir()}
        assert written >= {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"}, step
    assert sum(entry["@type"] == "CheckpointSaved" for entry in runner.journal()) == 24


@pytest.mark.slow
def test_a_run_that_resumes_goes_on_with_the_state_of_its_checkpoint(runner: Runner, tmp_path: Path) -> None:
    output = tmp_path / "ours.json"
    words = ("--set", "torch_threads=1", "--set", "control.lease_s=10")
    case, nodes = ("--", "padded", "gpt2", str(output)), ("--local", "2", str(SCRIPT))
    first = runner.run(*words, "--resume", "never", "--set", "max_steps=10", *case, nodes=nodes)
    assert first.exit_code == 0, first.output
    second = runner.run(*words, "--resume", "auto", "--kill", "node1@14", *case, nodes=nodes)
    assert second.exit_code == 0, second.output
    assert lost_nodes(second) == ["node1"]
    _, ours = map(json.loads, output.read_text().splitlines())
    theirs = plain_losses(tmp_path, "padded", "gpt2")
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=0, abs=TOLERANCE)
    assert (ours["tokens"], ours["counted"]) == (theirs["tokens"], 24)


UNLIKE = """
import os, torch
from torch.utils.data import Sampler
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, default_data_collator
from oobleck.transformers import Trainer

class ByProcess(Sampler):
    def __len__(self):
        return 64

    def __iter__(self):
        return iter(torch.randperm(64, generator=torch.Generator().manual_seed(os.getpid())).tolist())

class Own(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return ByProcess()

Own(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1)),
    args=TrainingArguments(output_dir="out", max_steps=4, per_device_train_batch_size=8, report_to=[], use_cpu=True),
    train_dataset=[{"input_ids": [n] * 16, "labels": [n] * 16} for n in range(64)],
    data_collator=default_data_collator,
).train()
"""


@pytest.mark.slow
def test_workers_that_would_take_other_samples_are_named_and_take_no_step(runner: Runner, tmp_path: Path) -> None:
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE)
    outcome = runner.run("--resume", "never", nodes=("--local", "2", str(script)))
    assert outcome.exit_code == 78, outcome.output
    assert re.search(r"node[01]:0 and node[01]:0 differ in the order of samples \(\w+ and \w+\); ", outcome.output)
    assert not outcome.losses
