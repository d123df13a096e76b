"""Nodes that a deadline does not need are set aside, and take the place of one that is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .elastic import nodes_of, recoveries
from .harness import Runner


@pytest.mark.slow
def test_nodes_that_a_deadline_does_not_need_rest_and_stand_in_for_a_lost_one(
    start: Callable[..., Any], runner: Runner
) -> None:
    with start("--scaling", "deadline=20h", "--set", "scaling.hysteresis_s=1") as run:
        run.up.wait_until_said("set aside or taken back; ")
        run.up.wait_for_steps(10)
        plans = [entry for entry in runner.journal() if entry["@type"] == "PlanAdopted"]
        resting = plans[-1]["plan"]["spares"]
        assert len(resting) == 2
        trains = next(node for node in ("node0", "node1", "node2", "node3") if node not in resting)
        run.command("kill", trains)
        run.up.wait_for_loss(trains)
        run.up.wait_for_steps(10)
        outcome = run.stop()
    assert [each[0] for each in recoveries(outcome)] == ["scaled", "connection_lost"]
    assert len(nodes_of(outcome)) == 2
    assert trains not in nodes_of(outcome)
    assert set(nodes_of(outcome)) & set(resting)
    decided = [entry for entry in runner.journal() if entry["@type"] == "ScalingDecided"]
    assert [entry["num_nodes"] for entry in decided] == [4, 2]
    assert "steps take" in decided[1]["reason"]
