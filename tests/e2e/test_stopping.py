"""A callback that stops training stops it at the step where it asks for that, with the plain Trainer's state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .elastic import lost_nodes
from .harness import Runner
from .test_whole import plain

SCRIPT = Path(__file__).with_name("stopping_script.py")
STEPS = {"step": 7, "log": 6, "begin": 1, "early": 4, "epoch": 6}


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert (ours["global_step"], ours["epoch"]) == (theirs["global_step"], theirs["epoch"])
    assert [entry.keys() for entry in ours["logs"]] == [entry.keys() for entry in theirs["logs"]]
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        assert mine == pytest.approx(other, rel=1e-6)
    assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-6)


@pytest.mark.parametrize(
    "case", ["step", *(pytest.param(each, marks=pytest.mark.slow) for each in STEPS if each != "step")]
)
def test_training_ends_at_the_step_where_a_callback_stops_it(runner: Runner, tmp_path: Path, case: str) -> None:
    output, is_killed = tmp_path / "ours.json", STEPS[case] > 5
    kill = ("--kill", "node1@3") if is_killed else ()
    given = ("--set", "torch_threads=1", "--set", "num_pipelines=2", "--resume", "never", *kill)
    outcome = runner.run(*given, "--", case, str(output), nodes=("--local", "4", str(SCRIPT)))
    assert outcome.exit_code == 0, outcome.output
    assert lost_nodes(outcome) == (["node1"] if is_killed else [])
    (ours,) = map(json.loads, output.read_text().splitlines())
    assert ours["global_step"] == STEPS[case]
    theirs = plain(tmp_path, SCRIPT, case)
    assert_alike(ours, theirs)


@pytest.mark.slow
def test_so_it_does_by_plain_python(runner: Runner, tmp_path: Path) -> None:
    output = tmp_path / "ours.json"
    environment = {**runner.environment, "OOBLECK_LOCAL": "2", "OOBLECK_BASE_DIR": str(runner.base_dir)}
    command = [sys.executable, str(SCRIPT), "step", str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (ours,) = map(json.loads, output.read_text().splitlines())
    assert_alike(ours, plain(tmp_path, SCRIPT, "step"))
