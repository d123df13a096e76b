"""What the cluster does with nodes that it knows: who was let go is tested first, and who lives is found again."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import asyncssh
import pytest

from oobleck.control.protocol import PROTOCOL_VERSION, Greeting, Hello
from oobleck.errors import AgentGone, FaultyNode, NodeUnreachable
from oobleck.job import NodeSpec
from oobleck.roles.master_ports import AgentConnection
from oobleck.runtime.cluster import RemotePaths, SSHCluster
from oobleck.runtime.connections import NodeConnections
from oobleck.runtime.ssh import SSHConnection, serve_local_nodes
from oobleck.runtime.ssh.asyncssh_adapter import open_ssh_loop
from oobleck.runtime.ssh.client import SSHOptions
from tests.openssh import needs_openssh, serve_openssh
from tests.runtime.ssh_servers import connections_by

_SICK = """#!/bin/sh
case "$*" in
    *node_probe*) echo "the memory of this machine is broken" >&2; exit 3 ;;
    *) exec {python} "$@" ;;
esac
"""
"""An interpreter under which agents work, and tests of the machine fail."""


async def meet(agent: AgentConnection) -> None:
    """Exchange a few words with an agent, as a master does."""
    await agent.send([Greeting(protocol=PROTOCOL_VERSION, tag="tag")])
    assert isinstance(await agent.receive(), Hello)
    await agent.aclose()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for agents, with a name that is short enough for their sockets."""
    with tempfile.TemporaryDirectory(prefix="oo-", dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(path)


@pytest.mark.parametrize("checks", [True, False])
async def test_a_node_that_is_not_healthy_is_not_taken_in_again(temporary: Path, checks: bool) -> None:
    python = temporary / "python"
    python.write_text(_SICK.format(python=sys.executable))
    python.chmod(0o700)
    base = PurePosixPath(temporary / "base")
    paths = RemotePaths(python=str(python), base_dir=base, cache_dir=base / "cache")
    async with open_ssh_loop(), serve_local_nodes(1) as ((node,), options), connections_by(options) as connections:
        cluster = SSHCluster(
            "tag",
            [node],
            run_id="tag-01234567",
            connections=connections,
            paths=paths,
            checks_returning=checks,
        )
        await meet(await cluster.reach(node, attach=False))  # nothing speaks against it yet
        await cluster.clean(node)
        if checks:
            with pytest.raises(FaultyNode, match="memory"):
                await cluster.reach(node, attach=False)
        else:
            await meet(await cluster.reach(node, attach=False))
        await cluster.clean(node)


async def test_a_living_agent_is_found_without_a_python_there(temporary: Path) -> None:
    python = temporary / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    base = PurePosixPath(temporary / "base")
    paths = RemotePaths(python=str(python), base_dir=base, cache_dir=base / "cache")
    async with open_ssh_loop(), serve_local_nodes(1) as ((node,), options), connections_by(options) as connections:
        cluster = SSHCluster("tag", [node], run_id="tag-01234567", connections=connections, paths=paths)
        with pytest.raises(AgentGone):
            await cluster.reach(node, attach=True)
        await meet(await cluster.reach(node, attach=False))
        python.unlink()
        await meet(await cluster.reach(node, attach=True))
        assert await cluster.kill(node)
        with pytest.raises(AgentGone):
            await cluster.reach(node, attach=True)
        await cluster.clean(node)


async def test_a_node_s_logs_are_listed_and_read_there(temporary: Path) -> None:
    base = PurePosixPath(temporary / "base")
    paths = RemotePaths(python=sys.executable, base_dir=base, cache_dir=base / "cache")
    async with open_ssh_loop(), serve_local_nodes(1) as ((node,), options), connections_by(options) as connections:
        cluster = SSHCluster("tag", [node], run_id="tag-01234567", connections=connections, paths=paths)
        assert await cluster.list_logs(node) == {}
        await meet(await cluster.reach(node, attach=False))
        name = f"agent-{node.name}.log"
        assert list(await cluster.list_logs(node)) == [name]
        await cluster.clean(node)
        (temporary / "base/tag" / name).write_bytes(b"\x00\xffend")
        assert await cluster.read_log(node, name, 1) == b"\xffend"


class _EndsSecond(NodeConnections):
    """The connection ends just when it is taken for the second time."""

    num_taken = 0

    async def to(self, node: NodeSpec) -> SSHConnection:
        connection = await super().to(node)
        self.num_taken += 1
        if self.num_taken == 2:
            connection.disconnect(asyncssh.DISC_BY_APPLICATION, "")
        return connection


async def test_a_connection_that_ends_makes_no_living_agent_a_dead_one(temporary: Path) -> None:
    base = PurePosixPath(temporary / "base")
    paths = RemotePaths(python=sys.executable, base_dir=base, cache_dir=base / "cache")
    async with open_ssh_loop(), serve_local_nodes(1) as ((node,), options), connections_by(options) as connections:
        cluster = SSHCluster("tag", [node], run_id="tag-01234567", connections=connections, paths=paths)
        assert not await cluster.is_alive(node)
        await meet(await cluster.reach(node, attach=False))
        broken = _EndsSecond(connections.launcher)
        assert await SSHCluster("tag", [node], run_id="tag-01234567", connections=broken, paths=paths).is_alive(node)
        await broken.aclose()
        assert broken.num_taken == 3
        await cluster.clean(node)


@needs_openssh
async def test_an_agent_starts_under_a_login_shell_that_greets_and_one_that_does_not_start_says_the_greeting(
    temporary: Path,
) -> None:
    base, node = PurePosixPath(temporary / "base"), NodeSpec(name="alpha", host="alpha")
    environment = {"TMPDIR": str(temporary)}
    with serve_openssh(temporary / "openssh", environment=environment) as openssh:
        (temporary / "openssh" / ".bashrc").write_text(f"echo Welcome to the cluster; cd {temporary}\n")
        for name in ("random.py", "socket.py", "trio.py"):  # in the directory where commands begin
            (temporary / name).write_text("raise SystemExit('not ours')\n")
        config = temporary / "config"
        config.write_text(openssh.host_config(["alpha"]))
        async with open_ssh_loop(), connections_by(SSHOptions(config=config)) as connections:
            for python in (sys.executable, "/bin/false"):
                paths = RemotePaths(python=python, base_dir=base, cache_dir=base / "cache")
                cluster = SSHCluster("tag", [node], run_id="tag-01234567", connections=connections, paths=paths)
                if python == sys.executable:
                    await meet(await cluster.reach(node, attach=False))
                else:
                    with pytest.raises(NodeUnreachable, match="exit status 1; its login shell printed 'Welcome to"):
                        await cluster.reach(node, attach=False)
                await cluster.clean(node)
