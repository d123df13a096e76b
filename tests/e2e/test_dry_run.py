"""A dry run says what the run does."""

from __future__ import annotations

import json

import pytest

from .harness import Outcome, Runner, oobleck


@pytest.mark.slow  # tests/cli/test_dry_run.py
def test_a_dry_run_after_a_run_shows_the_plan_that_it_began_with(runner: Runner, undisturbed: Outcome) -> None:
    arguments = ("up", "--local", "4", "--job", str(runner.job_file()), "--base-dir", str(runner.base_dir))
    done = oobleck(*arguments, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert not answer["estimated"], "the profile that the run measured is used"
    shown = [
        [
            (node, stage["first_layer"], stage["stop_layer"])
            for node, stage in zip(each["nodes"], each["stages"], strict=True)
        ]
        for each in answer["plan"]["pipelines"]
    ]
    ran = [
        [(stage["node"], stage["first_layer"], stage["stop_layer"]) for stage in each["stages"]]
        for each in undisturbed.summary["plan"]["pipelines"]
    ]
    assert shown == ran
