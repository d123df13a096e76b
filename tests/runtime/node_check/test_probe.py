"""A node on which a run could open nothing is not healthy, and the setting of sshd that forbids it is named."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
import trio

from oobleck.control.node_check import NodeFacts, PairValue
from oobleck.job import NodeSpec
from oobleck.runtime.node_check.probe import RemoteProbe
from oobleck.runtime.ssh.asyncssh_adapter import open_ssh_loop
from oobleck.runtime.ssh.client import SSHOptions
from oobleck.wire import encode_frame
from tests.openssh import needs_openssh, serve_openssh
from tests.runtime.ssh_servers import connections_by

ALPHA = NodeSpec(name="alpha", host="alpha")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a socket in it, whose name is short enough for one."""
    with (
        tempfile.TemporaryDirectory(prefix="oo-", dir="/tmp") as path,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(f"{path}/agent.sock")
        listener.listen()
        yield Path(path)


def probe_without_torch(place: Path) -> str:
    """Make an interpreter that says what a probe says first, and ends with its input."""
    facts = NodeFacts(pid=1, hostname="alpha", clock_s=0.0, versions={}, num_cpus=1, socket=str(place / "agent.sock"))
    (place / "facts").write_bytes(encode_frame(facts))
    python = place / "python"
    python.write_text(f"#!/bin/sh\ncat {place}/facts; exec cat >/dev/null\n")
    python.chmod(0o700)
    return str(python)


async def failure_of(place: Path, settings: str) -> str:
    """What is wrong with a node whose sshd has these settings; empty for nothing."""

    async def pass_on(sender: str, put: PairValue) -> None:
        raise AssertionError(sender)

    python = probe_without_torch(place)
    with serve_openssh(place / "openssh", more_config=settings) as openssh:
        config = place / "config"
        config.write_text(openssh.host_config(["alpha"]))
        async with open_ssh_loop(), connections_by(SSHOptions(config=config)) as connections:
            probe = RemoteProbe(ALPHA, pass_on)
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    await probe.start(connections, nursery, python=python, directory=PurePosixPath(place))
                    found = probe.failure  # before its end is one
                    await probe.aclose()
                    nursery.cancel_scope.cancel()
    return found


@needs_openssh
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("", ""),
        ("MaxSessions 2", ""),
        ("AllowTcpForwarding local", ""),
        ("MaxSessions 1", "MaxSessions"),
        ("AllowTcpForwarding no", "AllowTcpForwarding"),
        ("AllowStreamLocalForwarding no", "AllowStreamLocalForwarding"),
        ("AllowStreamLocalForwarding remote", "AllowStreamLocalForwarding"),
        ("DisableForwarding yes", "DisableForwarding"),
    ],
)
async def test_a_check_opens_what_a_run_opens_and_names_the_setting_that_forbids_it(
    place: Path, settings: str, named: str
) -> None:
    failure = await failure_of(place, settings)
    assert named in failure
    assert bool(failure) == bool(named)
