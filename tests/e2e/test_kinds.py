"""Nodes of several kinds in one run: what is computed does not depend on which of them compute it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .elastic import ENDLESS, PACED, Reference, assert_all_is_right, assert_losses, lost_nodes, nodes_of, stopped
from .harness import Runner
from .node_processes import Nodes
from .test_checkpoints import first_step_of
from .test_dial_in import file_for_nodes

MIXED = ("--local", "fast:2,slow:1,wide:1x2")
"""Two nodes of one device, one of another kind, and one of two devices of a third."""


def known_kinds(runner: Runner) -> list[tuple[str, int]]:
    """Each kind once, although a profile is corrected where passes take longer than when they were measured."""
    known = [entry for entry in runner.journal() if entry["@type"] == "ProfileKnown"]
    return list(dict.fromkeys((entry["kind"], entry["num_devices"]) for entry in known))


@pytest.mark.slow
def test_a_mixed_run_that_loses_a_node_computes_what_one_process_does(
    start: Callable[..., Any], runner: Runner
) -> None:
    """Another node of the lost one's kind joins, and one of each other: its profile is known by then."""
    with start("--kill", "node3@8", nodes=MIXED) as run:
        run.wait_for_recovery("node3")
        run.up.wait_for_steps(3)
        run.command("add", "node6")
        while "node6" not in _training(runner):
            run.up.wait_for("] step ")
        run.up.wait_for_steps(3)
        outcome = run.stop()
    assert lost_nodes(outcome) == ["node3"]
    assert sorted(known_kinds(runner)) == [("fast", 1), ("slow", 1), ("wide×2", 2)]
    (first, *_) = (entry for entry in runner.journal() if entry["@type"] == "PlanAdopted")
    devices = {
        (pipeline["nodes"][stage["node_index"]], stage["first_device"])
        for pipeline in first["plan"]["pipelines"]
        for stage in pipeline["template"]["stages"]
    }
    assert {("node3", 0), ("node3", 1)} <= devices, "both devices of the wide node had a part"
    assert "node6" in nodes_of(outcome)


@pytest.mark.slow
def test_a_node_of_a_kind_that_nothing_is_known_of_is_measured_and_joins(
    runner: Runner, endless_reference: Reference, nodes: Nodes
) -> None:
    given = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--no-check")
    with runner.up(*given, nodes=("--dial-in", "127.0.0.1:0", "--nodes", "2", PACED)) as up:
        file = file_for_nodes(up)
        for name in ("alpha", "beta"):
            nodes.start(name, file, f"{name} device=fast")
        up.wait_for_step(3)
        nodes.start("gamma", file, SLURMD_NODENAME="gamma", SLURM_GPUS_ON_NODE="2", OOBLECK_DEVICE="slow")
        up.wait_for("gamma is the first node of kind slow×2: the model's layers are measured there before it trains")
        while "gamma" not in _training(runner):
            up.wait_for("] step ")
        up.wait_for_steps(3)
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, endless_reference)
    assert known_kinds(runner) == [("fast", 1), ("slow×2", 2)]


@pytest.mark.slow
def test_what_a_mixed_run_has_saved_is_gone_on_from_by_other_kinds(
    runner: Runner, tmp_path: Path, endless_reference: Reference
) -> None:
    checkpoint = f"checkpoint={{enabled: true, save_steps: 4, directory: {tmp_path / 'checkpoints'}}}"
    given = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--set", checkpoint)
    losses: list[float] = []
    for local in ("fast:2,slow:1,wide:1x2", "3", "slow:2x2,fast:1"):
        with runner.up(*given, nodes=("--local", local, PACED)) as up:
            up.wait_for_step(len(losses) + 5)
            outcome = stopped(runner, up)
        assert outcome.exit_code == 0, outcome.output
        assert first_step_of(runner) == len(losses) + 1
        losses += outcome.losses
    assert_losses(losses, endless_reference)


def _training(runner: Runner) -> set[str]:
    """The nodes that train under the newest plan."""
    *_, newest = (entry for entry in runner.journal() if entry["@type"] == "PlanAdopted")
    return {node for pipeline in newest["plan"]["pipelines"] for node in pipeline["nodes"]}
