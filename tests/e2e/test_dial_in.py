"""Nodes that nobody can log in to: `oobleck node` on each dials in, and real workers train."""

from __future__ import annotations

import shlex
import time

import pytest

from .elastic import ENDLESS, PACED, Reference, assert_all_is_right, nodes_of, recoveries, stopped
from .harness import Runner, Up, started_at, worker_pids
from .node_processes import Nodes


def file_for_nodes(up: Up) -> str:
    """What `oobleck up` says that nodes need."""
    return shlex.split(up.wait_for(": oobleck node ").split(": oobleck node ")[1])[0]


@pytest.mark.slow  # test_slurm has nodes that dial in as well, and tests/runtime/launchers without workers
def test_nodes_that_dial_in_train_come_and_go_and_find_the_next_master(
    runner: Runner, endless_reference: Reference, nodes: Nodes
) -> None:
    connect_s = 2.0
    control = (f"control.connect_timeout_s={connect_s}", "control.orphan_timeout_s=250")
    job = ("--job", str(runner.job_file()), *(word for each in control for word in ("--set", each)))
    given = (*job, "--steps", str(ENDLESS), "--no-check")
    where = ("--dial-in", "127.0.0.1:0", "--nodes", "3", PACED)
    with runner.up(*given, nodes=where) as first:
        file = file_for_nodes(first)
        for name in ("alpha", "beta", "gamma"):
            nodes.start(name, file, name)
        first.wait_for_step(5)
        nodes.power_off("gamma")
        first.wait_for_loss("gamma")
        nodes.start("gamma", file, "gamma")
        first.wait_for("gamma taken in; pipelines grow")
        first.wait_for_steps(3)
        nodes.give_notice("beta")
        first.wait_for("beta has left")
        assert nodes.ended("beta") == 0
        first.wait_for_steps(3)
        workers = {node: started_at(pid) for node, pid in worker_pids(runner).items()}
        first.process.kill()
        first.process.wait()
        nodes.suspend("alpha", "gamma")
        with runner.up(*given, nodes=where) as second:
            file_for_nodes(second)
            time.sleep(2 * connect_s)  # of three nodes two are left, and they come late
            nodes.resume("alpha", "gamma")
            second.wait_for_steps(5)
            now = {node: started_at(pid) for node, pid in worker_pids(runner).items()}
            assert all(now[node] == workers[node] is not None for node in ("alpha", "gamma"))
            outcome = stopped(runner, second)
    assert_all_is_right(outcome, endless_reference)
    # A node is known to be lost when its `oobleck node` has ended, and not only when its lease has.
    assert [(cause, lost) for cause, _, lost in recoveries(outcome)] == [
        ("connection_lost", ("gamma",)),
        ("joined", ("gamma",)),
        ("drained", ("beta",)),
    ]
    assert nodes_of(outcome) == ["alpha", "gamma"]
    assert "SIGTERM: the run is asked to let this node go" in nodes.said("beta")
    assert nodes.said("alpha").count("serves the master at") == 2
    nodes.close()
    assert runner.left_over() == []
