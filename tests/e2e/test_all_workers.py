"""All workers end at once, and what forks them: as long as the agents live, the run goes on, and no node is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from .elastic import Elastic, nodes_of, recoveries
from .harness import Runner, incidents, send_signal, worker_pids

NODES = ["node0", "node1", "node2", "node3"]
SAVED = ("--resume", "never", "--set", "checkpoint.enabled=true", "--set", "checkpoint.save_steps=4")
"""Over the fixture's job, which saves nothing; a run before has saved under the same tag."""


def kill_workers(runner: Runner, *nodes: str, apart_s: float = 0.0) -> None:
    for pid in [worker_pids(runner)[node] for node in nodes]:
        send_signal(pid, signal.SIGKILL)
        time.sleep(apart_s)


def lost_nodes(runner: Runner) -> list[str]:
    return [entry["node"] for entry in runner.journal() if entry["@type"] == "NodeLost"]


def restored_steps(runner: Runner) -> list[int]:
    plans = [entry for entry in runner.journal() if entry["@type"] == "PlanAdopted"]
    return [entry["restored_step"] for entry in plans if entry.get("restored_step") is not None]


def go_on(run: Elastic) -> None:
    """Wait until everybody trains again, for some steps."""
    run.up.wait_for("back to the checkpoint of step")
    run.up.wait_for_steps(6)


@pytest.mark.slow
def test_all_workers_are_killed_then_the_fork_server_with_one_of_them_then_all_that_hold_a_layer(
    start: Callable[..., Any], runner: Runner
) -> None:
    """What nobody holds any more costs the steps since the checkpoint: once all workers, once f + 1 nodes are gone."""
    with start(*SAVED, "--set", "control.rejoin_after_s=0", loses_steps=None) as run:
        run.up.wait_for_step(10)
        kill_workers(runner, *NODES)
        go_on(run)
        # Nobody stops for the fork server; a worker that ends while there is none waits for the next one.
        runner.kill_fork_server()
        kill_workers(runner, "node1")
        run.up.wait_for("'s fork server ended: ")
        run.up.wait_for("node1 taken in; worker restarted")
        run.up.wait_for_steps(6)
        assert lost_nodes(runner) == []
        assert len(restored_steps(runner)) == 1, "the single worker took its layers from its peers"
        # Both holders of the first layers die at once.
        *_, newest = (entry["plan"] for entry in runner.journal() if entry["@type"] == "PlanAdopted")
        victims = {pipeline["nodes"][0] for pipeline in newest["pipelines"]}
        for pid in [pid for node in victims for pid in runner.pids(node)]:  # all found beforehand, which takes a while
            send_signal(pid, signal.SIGKILL)
        go_on(run)
        outcome = run.stop()
    assert set(lost_nodes(runner)) == victims
    assert nodes_of(outcome) == sorted(set(NODES) - victims)
    assert all(restored_steps(runner))
    assert [action for _, action, _ in recoveries(outcome)].count("checkpoint") == 2
    found = [finding for each in incidents(runner) for finding in (each["root"], *each["consequences"])]
    assert {"killed", "fork_server"} <= {finding["failure"] for finding in found}


@pytest.mark.slow
def test_the_fork_server_and_all_workers_are_killed_together(start: Callable[..., Any], runner: Runner) -> None:
    with start(*SAVED, loses_steps=None) as run:
        run.up.wait_for_step(10)
        for _ in range(2):
            runner.kill_fork_server()
            kill_workers(runner, *NODES)
            go_on(run)
        outcome = run.stop()
    assert lost_nodes(runner) == []
    assert nodes_of(outcome) == NODES
    assert len(restored_steps(runner)) == 2


@pytest.mark.slow
def test_workers_that_are_killed_one_after_the_other_begin_again_where_nothing_is_saved(
    start: Callable[..., Any], runner: Runner
) -> None:
    with start(loses_steps=True) as run:
        # Sooner than any of them is back with its layers, which takes a fork and a plan: then nobody holds a layer.
        kill_workers(runner, *NODES, apart_s=0.02)
        run.up.wait_for("from the model's initial values")
        run.up.wait_for_step(8)
        outcome = run.stop()
    assert lost_nodes(runner) == []
    assert nodes_of(outcome) == NODES
    assert restored_steps(runner) == [0]
    assert "begin_again" in [action for _, action, _ in recoveries(outcome)]


@pytest.mark.slow
@pytest.mark.parametrize("apart_s", [0.0, 0.02, 0.2, 0.6])
@pytest.mark.parametrize("saved", [True, False])
def test_all_workers_end_however_far_apart(
    start: Callable[..., Any], runner: Runner, apart_s: float, saved: bool
) -> None:
    """Whether each is back before the next one ends, and then loses nothing, is the machine's affair."""
    with start(*(SAVED if saved else ()), loses_steps=None) as run:
        run.up.wait_for_step(10)
        for _ in range(2):
            kill_workers(runner, *NODES, apart_s=apart_s)
            time.sleep(3.0)
            run.up.wait_for_steps(3)
        outcome = run.stop()
    assert lost_nodes(runner) == []
    assert nodes_of(outcome) == NODES
