"""Models that compute their own loss: in pipelines of two stages, or kept whole on each node, one of which is killed on
the way, they have the losses and the weights that transformers' own Trainer has in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .elastic import assert_nothing_lost, lost_nodes
from .harness import Outcome, Runner
from .test_trainer import OURS, THEIRS

SCRIPT = Path(__file__).with_name("whole_script.py")
CUT = (
    *("t5", "bart", "whisper", "vit", "wav2vec2", "llava", "qwen2_vl", "gemma3", "regression", "multilabel", "qa"),
    *("choice", "reward", "llama", "module", "weighted", "contrastive", "tied_head", "pads_left", "flattens"),
)


def plain(directory: Path, script: Path, *words: str) -> dict[str, Any]:
    """What the libraries' own trainers come to, by plain `python`."""
    text, output = script.read_text(), directory / "theirs.json"
    for ours, theirs in ((OURS, THEIRS), ("from oobleck.trl import", "from trl import")):
        text = text.replace(ours, theirs)
    assert "oobleck" not in text
    copy = directory / script.name
    copy.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(copy), words[0], str(output), *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(output.read_text()))


@pytest.mark.slow
def test_a_whole_model_survives_the_loss_of_a_node(runner: Runner, tmp_path: Path) -> None:
    """Its process evaluates what nodes have trained, by a function of its own."""
    outcome = run(runner, tmp_path, SCRIPT, "2", "single", "--metrics")
    assert " is kept whole on each node" in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("case", CUT)
def test_a_model_cut_as_it_was_traced_survives_the_loss_of_a_node(runner: Runner, tmp_path: Path, case: str) -> None:
    outcome = run(runner, tmp_path, SCRIPT, "4", case, settings=("num_stages=2",))
    assert " is kept whole " not in outcome.output


@pytest.mark.slow
def test_a_loader_of_the_scripts_own_gives_its_batches(runner: Runner, tmp_path: Path) -> None:
    run(runner, tmp_path, SCRIPT, "4", "loads", settings=("num_stages=2",))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sft", "dpo", "reward"])
def test_a_trainer_of_trl_survives_the_loss_of_a_node(runner: Runner, tmp_path: Path, case: str) -> None:
    run(runner, tmp_path, SCRIPT.with_name("trl_script.py"), "2", case)


def run(
    runner: Runner, tmp_path: Path, script: Path, nodes: str, *words: str, settings: tuple[str, ...] = ()
) -> Outcome:
    """Train on virtual nodes of which one is killed, and compare all with the library's own trainer."""
    output = tmp_path / "ours.json"
    given = [word for each in ("torch_threads=1", "control.lease_s=10", *settings) for word in ("--set", each)]
    arguments = (*given, "--resume", "never", "--kill", "node1@3", "--", words[0], str(output), *words[1:])
    outcome = runner.run(*arguments, "--pause", "0.4", nodes=("--local", nodes, str(script)))
    assert outcome.exit_code == 0, outcome.output
    assert lost_nodes(outcome) == ["node1"]
    assert_nothing_lost(outcome, 8)
    (ours,) = map(json.loads, output.read_text().splitlines())
    theirs = plain(tmp_path, script, *words)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
    assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-6)
    assert ours["evaluations"] == pytest.approx(theirs["evaluations"], rel=1e-4)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4)
    assert len(ours["metrics"]) == (2 if "--metrics" in words else 0)
    return outcome
