"""The node check with real probes over real SSH."""

from __future__ import annotations

import socket
import sys
from pathlib import PurePosixPath

import pytest

from oobleck.control.node_check.rounds import Health
from oobleck.job import NodeSpec
from oobleck.runtime.node_check.check import check_nodes
from oobleck.runtime.ssh import serve_local_nodes
from oobleck.runtime.ssh.asyncssh_adapter import open_ssh_loop
from oobleck.runtime.ssh.client import SSHOptions
from tests.openssh import needs_openssh, serve_openssh
from tests.runtime.ssh_servers import connections_by


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


async def test_nodes_that_work_are_healthy_and_one_that_cannot_be_reached_is_named(tmp_path):
    told: list[str] = []
    gone = NodeSpec(name="gone", host="127.0.0.1", port=closed_port(), user="oobleck")
    async with open_ssh_loop(), serve_local_nodes(2) as (nodes, options), connections_by(options) as connections:
        report = await check_nodes(
            (*nodes, gone),
            connections,
            python=sys.executable,
            directory=PurePosixPath(tmp_path),
            slow_factor=100.0,  # this machine may be busy with anything
            tell=told.append,
        )
    health = {node.verdict.node: node.verdict.health for node in report.nodes}
    assert health == {"node0": Health.HEALTHY, "node1": Health.HEALTHY, "gone": Health.FAULTY}
    assert not report.is_healthy
    assert not report.links
    assert [exchange[:2] for exchange in report.exchanges] == [("node0", "node1")]
    assert told == ["reaching 3 nodes", "round 1: 3 alone", "round 2: 1 pair"]
    first = report.nodes[0]
    assert first.facts is not None
    assert first.facts.versions["python"].startswith("3.")
    assert first.seconds.keys() == {"compute", "memory", "loopback", "disk"}
    assert all(seconds > 0 for seconds in first.seconds.values())
    assert first.clock_offset_s is not None
    assert abs(first.clock_offset_s) < 2.0
    assert not list(tmp_path.iterdir())


async def test_an_interpreter_that_is_not_there_is_named(tmp_path):
    async with open_ssh_loop(), serve_local_nodes(1) as (nodes, options), connections_by(options) as connections:
        report = await check_nodes(
            nodes, connections, python="/no/python", directory=PurePosixPath(tmp_path), slow_factor=2.0
        )
    (node,) = report.nodes
    assert node.verdict.health is Health.FAULTY
    assert "/no/python" in node.verdict.reason


@pytest.mark.slow
@needs_openssh
async def test_a_node_whose_login_shell_greets_is_measured_and_one_whose_runs_no_command_is_named(tmp_path):
    with serve_openssh(tmp_path / "one") as one, serve_openssh(tmp_path / "two") as two:
        (tmp_path / "one" / ".bashrc").write_text("echo Welcome to the cluster\n")
        (tmp_path / "two" / ".bashrc").write_text("echo This account is closed; exit 1\n")
        config = tmp_path / "config"
        config.write_text(one.host_config(["one"]) + two.host_config(["two"]))
        options = SSHOptions(config=config)
        async with open_ssh_loop(), connections_by(options) as connections:
            report = await check_nodes(
                [NodeSpec(name=name, host=name) for name in ("one", "two")],
                connections,
                python=sys.executable,
                directory=PurePosixPath(tmp_path),
                slow_factor=100.0,
            )
    greeted, closed = report.nodes
    assert greeted.seconds.keys() == {"compute", "memory", "loopback", "disk"}
    assert closed.verdict.health is Health.FAULTY
    assert "login shell runs no command" in closed.verdict.reason
    assert "This account is closed" in closed.verdict.reason
