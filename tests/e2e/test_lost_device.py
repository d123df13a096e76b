"""A device whose worker ends each time idles no other: its node trains with those that are left, until it is whole."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from .elastic import ENDLESS, PACED, Reference, assert_all_is_right, stopped
from .harness import Runner, Up, send_signal
from .node_processes import Nodes
from .test_dial_in import file_for_nodes

ENDS = 4
"""After so many, a node is not started again as it is."""


def fail(runner: Runner, up: Up, node: str, worker: str) -> None:
    """Kill a worker as soon as it lives, until its node is tried without it."""
    before = 0
    for number in range(1, ENDS + 1):
        while not (pids := [pid for pid in runner.pids(node, worker) if pid != before]):
            time.sleep(0.05)
        (before,) = pids
        send_signal(before, signal.SIGKILL)
        up.wait_for(f"{node} is tried with 1 of its 2 devices" if number == ENDS else f"worker of {node} ended")


def wait_for_devices(runner: Runner, up: Up, expected: dict[str, int]) -> None:
    """Wait until so many devices of each node train under the newest plan."""
    while _devices(runner) != expected:
        up.wait_for("] step ")
    up.wait_for_steps(3)


def _devices(runner: Runner) -> dict[str, int]:
    *_, newest = (entry for entry in runner.journal() if entry["@type"] == "PlanAdopted")
    found: dict[str, int] = {}
    for pipeline in newest["plan"]["pipelines"]:
        for stage in pipeline["template"]["stages"]:
            node = pipeline["nodes"][stage["node_index"]]
            found[node] = found.get(node, 0) + stage["num_devices"]
    return found


@pytest.mark.slow
def test_a_node_trains_with_its_other_device_and_is_whole_once_it_is_added_again(
    start: Callable[..., Any], runner: Runner
) -> None:
    with start(nodes=("--local", "wide:2x2")) as run:
        run.up.wait_for_step(2)
        fail(runner, run.up, "node1", "worker1")
        wait_for_devices(runner, run.up, {"node0": 2, "node1": 1})
        run.command("drain", "node1")
        run.up.wait_for("node1 has left")
        run.command("add", "node1")
        wait_for_devices(runner, run.up, {"node0": 2, "node1": 2})
        run.stop()


@pytest.mark.slow
def test_a_node_that_dials_in_is_left_a_device_and_the_next_master_knows(
    runner: Runner, endless_reference: Reference, nodes: Nodes
) -> None:
    given = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--no-check")
    where = ("--dial-in", "127.0.0.1:0", "--nodes", "2", PACED)
    with runner.up(*given, nodes=where) as first:
        file = file_for_nodes(first)
        for name in ("alpha", "beta"):
            nodes.start(name, file, f"{name} slots=2")
        first.wait_for_step(2)
        fail(runner, first, "beta", "worker0")
        wait_for_devices(runner, first, {"alpha": 2, "beta": 1})
        first.process.kill()
        first.process.wait()
        with runner.up(*given, nodes=where) as second:
            second.wait_for_steps(3)
            assert _devices(runner) == {"alpha": 2, "beta": 1}
            nodes.power_off("beta")
            second.wait_for_loss("beta")
            nodes.start("beta", file, "beta slots=2")
            wait_for_devices(runner, second, {"alpha": 2, "beta": 2})
            outcome = stopped(runner, second)
    assert_all_is_right(outcome, endless_reference)
    nodes.close()
    assert runner.left_over() == []
