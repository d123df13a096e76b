"""`oobleck check` on real nodes of which one really is slow."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest

from tests.processes import words_of


def throttle(node: str, share: float, check: subprocess.Popen[str]) -> None:
    """Let the probe of a node run for a share of the time only, as a CPU limit does, until the check ends."""
    period_s, probe = 0.1, None
    while check.poll() is None:
        with suppress(psutil.Error):
            if probe is None or not probe.is_running():
                probe = find_probe(node, check.pid)
            if probe is not None:
                probe.send_signal(signal.SIGSTOP)
                time.sleep(period_s * (1 - share))
                probe.send_signal(signal.SIGCONT)
        time.sleep(period_s * share)


def find_probe(node: str, master: int) -> psutil.Process | None:
    for process in psutil.Process(master).children(recursive=True):
        words = words_of(process)
        if "oobleck.training.process.node_probe" in words and node in words:
            return process
    return None


@pytest.mark.slow  # the probes take their time; tests/runtime has the check, and nodes that dial in
def test_nodes_that_dial_in_are_checked_and_given_back(runner, nodes):
    where = ("--dial-in", "127.0.0.1:0", "--nodes", "2", "--slow-factor", "1000")
    with runner.background("check", *where, "--base-dir", str(runner.base_dir)) as check:
        waiting = check.stdout.readline()
        assert "waiting for 2 nodes: oobleck node " in waiting
        file = shlex.split(waiting.split(": oobleck node ")[1])[0]
        for name in ("alpha", "beta"):
            nodes.start(name, file, name)
        output = check.stdout.read()
        assert check.wait(60) == 0, output
    assert [nodes.ended(name) for name in ("alpha", "beta")] == [0, 0]
    assert "alpha" in output
    assert "healthy" in output


@pytest.mark.slow
@pytest.mark.alone  # on a busy machine, the node that has a part of a core may not answer in time
def test_a_node_under_a_cpu_limit_is_named_and_its_partner_is_not(tmp_path):
    command = [sys.executable, "-m", "oobleck", "check", "--local", "4", "--json", "--slow-factor", "2.5"]
    with subprocess.Popen(
        [*command, "--base-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as check:
        limiting = threading.Thread(target=throttle, args=("node2", 0.15, check))
        limiting.start()
        output, errors = check.communicate(timeout=200)
        limiting.join()
    assert output, errors
    report = json.loads(output)
    health = {node["verdict"]["node"]: node["verdict"]["health"] for node in report["nodes"]}
    assert health == {"node0": "healthy", "node1": "healthy", "node2": "slow", "node3": "healthy"}
    assert report["links"] == []
    assert report["healthy"] is False
    assert report["nodes"][2]["verdict"]["factor"] > 2.5
    assert check.returncode == 1
