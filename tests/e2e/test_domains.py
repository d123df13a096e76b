"""A whole failure domain is lost at once: training goes on, and no loss changes."""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest

from .elastic import ENDLESS, PACED, Reference, assert_all_is_right, nodes_of, recoveries_in, stopped
from .harness import Runner, Up
from .node_processes import Nodes
from .test_dial_in import file_for_nodes

LEFT, RIGHT = ("alpha", "gamma"), ("beta", "delta")


@pytest.mark.slow  # tests/sim/test_domains.py loses domains in the simulator
@pytest.mark.timeout(900)
def test_one_of_two_racks_is_lost_and_comes_back(runner: Runner, endless_reference: Reference, nodes: Nodes) -> None:
    given = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--no-check", "--set", "num_pipelines=2")
    with runner.up(*given, nodes=("--dial-in", "127.0.0.1:0", "--nodes", "4", PACED)) as up:
        file = file_for_nodes(up)
        # By the order of their names, each pipeline would have a node of either rack.
        nodes.start("alpha", file, "alpha domain=left")
        nodes.start("beta", file, "beta", OOBLECK_DOMAIN="right")
        nodes.start("gamma", file, "gamma domain=left", OOBLECK_DOMAIN="right")
        nodes.start(
            "delta", file, "delta", SLURM_TOPOLOGY_ADDR="right.delta", SLURM_TOPOLOGY_ADDR_PATTERN="switch.node"
        )
        up.wait_for_step(5)
        (plan,) = [entry for entry in runner.journal() if entry["@type"] == "PlanAdopted"]
        assert {frozenset(pipeline["nodes"]) for pipeline in plan["plan"]["pipelines"]} == {
            frozenset(LEFT),
            frozenset(RIGHT),
        }
        assert "the copies of each layer lie in 2 failure domains or more" in plan["reason"]
        nodes.power_off(*LEFT)
        up.wait_for("redundancy is below f = 1: losing 1 failure domain may cost the model's state")
        up.wait_for_steps(5)
        for name in LEFT:
            nodes.start(name, file, f"{name} domain=left")
        wait_until_taken_in(up, LEFT)
        up.wait_for_steps(3)
        newest = [entry for entry in runner.journal() if entry["@type"] == "PlanAdopted"][-1]
        assert newest["redundant"]
        nodes.power_off(*RIGHT)
        up.wait_for("redundancy is below f = 1")
        up.wait_for_steps(3)
        # What is left of a dead machine in this one's memory goes once it is back.
        for name in RIGHT:
            nodes.start(name, file, f"{name} domain=right")
        wait_until_taken_in(up, RIGHT)
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, endless_reference)
    assert outcome.summary["steps_lost"] == 0
    assert {node for _, _, lost in recoveries_in(runner.journal()) for node in lost} >= {*LEFT, *RIGHT}
    assert nodes_of(outcome) == sorted((*LEFT, *RIGHT))
    nodes.close()
    assert runner.left_over() == []


def wait_until_taken_in(up: Up, names: Collection[str]) -> None:
    """They may be taken in one by one, or together."""
    missing = set(names)
    while missing:
        missing -= set(re.findall(r"\w+", up.wait_for(" taken in")))
