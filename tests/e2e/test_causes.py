"""Causes that need more than a signal, each really done to processes, and what `oobleck events` says of it.

The others are in test_events.py; a hang in a computation is in test_hang.py, a bit that flips in test_corruption.py, a
master that is lost in test_master.py, a network that is cut in test_network.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.openssh import needs_openssh, serve_openssh

from .connections import break_connections, silence_connections
from .elastic import nodes_of
from .harness import TAG, Runner, incidents, oobleck, worker_pids
from .test_events import agent_pid, newest

_SICK = """#!/bin/sh
for node in $(ls {directory}); do
    case "$*" in
        *node_probe*$node*) ulimit -f 8192 ;;
    esac
done
exec {python} "$@"
"""
"""An interpreter under which all nodes work; those that have a file in a directory cannot write 16 MiB when tested."""


@pytest.mark.slow
def test_a_killed_node_a_broken_collective_and_a_silent_one_are_told_apart(
    start: Callable[..., Any], runner: Runner
) -> None:
    """Nobody hangs or ends by the second and third, and no packet is lost between the master and a node."""
    with start() as run:
        run.command("kill", "node3")
        killed = newest(runner, "requested", "node3")
        assert killed["remedies"] == ["nothing", "add_node"]
        run.up.wait_for_steps(3)

        os.kill(agent_pid(runner, "node2"), signal.SIGKILL)
        lost = newest(runner, "contact_lost", "node2")
        assert lost["remedies"][-1] == "is_tried_again"
        run.up.wait_for("node2 taken in; ")
        run.up.wait_for_steps(3)

        assert break_connections(worker_pids(runner)["node1"]) > 0
        broken = newest(runner, "peer", None)
        assert broken["root"]["entry"]["cause"] == "peer_failed"
        assert broken["lost"] == []
        run.up.wait_for_steps(3)

        assert silence_connections(worker_pids(runner)["node0"]) > 0
        hung = newest(runner, "hang", None, timeout_s=120.0)
        assert hung["lost"] == []
        run.up.wait_for_steps(3)
        outcome = run.stop()
    assert [each["cause"] for each in outcome.recoveries] == [
        *("connection_lost", "connection_lost", "joined"),
        *("peer_failed", "hang"),
    ]
    assert nodes_of(outcome) == ["node0", "node1", "node2"]


@pytest.mark.slow
@needs_openssh
def test_a_node_that_fails_its_check_is_left_out_and_not_taken_back(
    start: Callable[..., Any], runner: Runner, tmp_path: Path
) -> None:
    """At the start, and after it was lost: it joins once its check has nothing to say against it."""
    sick, python = tmp_path / "sick", tmp_path / "python"
    sick.mkdir()
    python.write_text(_SICK.format(directory=sick, python=sys.executable))
    python.chmod(0o700)
    hostfile, config = tmp_path / "hosts.txt", tmp_path / "ssh_config"
    hostfile.write_text("alpha\nbeta\ngamma\ndelta\n")
    (sick / "delta").touch()
    environment = {"TMPDIR": str(runner.temporary), "HOME": str(runner.directory)}
    with serve_openssh(tmp_path / "ssh", environment=environment) as server:
        config.write_text(server.host_config(["alpha", "beta", "gamma", "delta"]))
        nodes = (str(hostfile), "--ssh-config", str(config), "--python", str(python))
        with start("--set", "control.rejoin_after_s=1", nodes=nodes) as run:
            left_out = incidents(runner)[0]
            assert (left_out["root"]["failure"], left_out["root"]["node"]) == ("unfit_node", "delta")
            assert "File too large" in left_out["root"]["entry"]["fault"]
            assert left_out["remedies"] == ["repair_node", "add_node"]
            (sick / "gamma").touch()
            os.kill(agent_pid(runner, "gamma"), signal.SIGKILL)
            unfit = newest(runner, "unfit_node", "gamma")
            assert "File too large" in unfit["root"]["entry"]["fault"]
            assert unfit["remedies"][-1] == "is_tried_again"
            (sick / "gamma").unlink()
            run.up.wait_for("gamma taken in; ")
            run.up.wait_for_steps(3)
            told = oobleck("events", TAG, "--base-dir", str(runner.base_dir)).stdout
            assert all(node in told for node in ("delta: ", "gamma: "))
            outcome = run.stop()
    assert nodes_of(outcome) == ["alpha", "beta", "gamma"]
