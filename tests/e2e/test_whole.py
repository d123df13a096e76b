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
CUT = [
    *(
        "t5",
        "bart",
        "whisper",
        "vit",
        "wav2vec2",
        "llava",
        "regression",
        "multilabel",
        "qa",
        "choice",
        "reward",
        "llama",
    ),
    *("module", "weighted", "contrastive"),
]


def plain(directory: Path, case: str) -> dict[str, Any]:
    script, output = directory / SCRIPT.name, directory / "theirs.json"
    script.write_text(SCRIPT.read_text().replace(OURS, THEIRS))
    command = [sys.executable, str(script), case, str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(output.read_text()))


def test_a_whole_model_survives_the_loss_of_a_node(runner: Runner, tmp_path: Path) -> None:
    outcome = run(runner, tmp_path, "single", "2")
    assert " is kept whole on each node" in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("case", CUT)
def test_a_model_cut_as_it_was_traced_survives_the_loss_of_a_node(runner: Runner, tmp_path: Path, case: str) -> None:
    outcome = run(runner, tmp_path, case, "4", "--set", "num_stages=2")
    assert " is kept whole " not in outcome.output


def run(runner: Runner, tmp_path: Path, case: str, nodes: str, *others: str) -> Outcome:
    """Train on virtual nodes of which one is killed, and compare all with transformers' own Trainer."""
    output = tmp_path / "ours.json"
    options = ("--set", "torch_threads=1", "--set", "control.lease_s=10", "--resume", "never", "--kill", "node1@3")
    arguments = (*options, *others, "--", case, str(output), "--pause", "0.4")
    outcome = runner.run(*arguments, nodes=("--local", nodes, str(SCRIPT)))
    assert outcome.exit_code == 0, outcome.output
    assert lost_nodes(outcome) == ["node1"]
    assert_nothing_lost(outcome, 8)
    (ours,) = map(json.loads, output.read_text().splitlines())
    theirs = plain(tmp_path, case)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
    assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-6)
    assert len(ours["evaluations"]) == len(theirs["evaluations"])
    return outcome
