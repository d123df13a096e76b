"""Storms of faults on `oobleck run`: no saved step is lost, the result is right, and nothing is left behind.

`python -m tests.e2e.run_storm SEED …` runs as many as one wants.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import seeds

from .run_storm import RunStorm


@pytest.mark.slow  # test_run_checkpoints.py has both
def test_a_killed_fork_server_and_then_a_killed_rank_cost_no_saved_step(tmp_path: Path) -> None:
    storm = RunStorm(tmp_path, 31, steps=40, faults=[("kill", "server"), ("kill", "rank")])
    assert storm.ride() == [], (storm.done, storm.said.read_text())


@pytest.mark.slow  # test_run_scripts.py has an agent that is killed
def test_a_rank_whose_supervisor_is_killed_or_stopped_ends_as_any_other(tmp_path: Path) -> None:
    storm = RunStorm(tmp_path, 31, steps=40, faults=[("kill", "waits"), ("stop", "waits")])
    assert storm.ride() == [], (storm.done, storm.said.read_text())
    assert storm.said.read_text().count("] generation ") == 3, "it begins, runs and ends, once"


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(5))
def test_a_storm_costs_no_saved_step(tmp_path: Path, seed: int) -> None:
    storm = RunStorm(tmp_path, seed)
    assert storm.ride() == [], (storm.done, storm.said.read_text())
