"""Both servers that SSH is tested against: our own for virtual nodes, and OpenSSH's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import trio

from oobleck.job import NodeSpec
from oobleck.runtime.connections import NodeConnections
from oobleck.runtime.launchers import VirtualNodes
from oobleck.runtime.ssh import serve_local_nodes
from oobleck.runtime.ssh.asyncssh_adapter import SSHStream, open_ssh_loop
from oobleck.runtime.ssh.client import SSHConnection, SSHOptions, connect
from tests.openssh import needs_openssh, serve_openssh

_NUMBERS = count()

SERVERS = [pytest.param("embedded"), pytest.param("openssh", marks=needs_openssh)]


@dataclass(frozen=True)
class Reachable:
    """A node, how to reach it, and a connection to it."""

    node: NodeSpec
    options: SSHOptions
    connection: SSHConnection

    async def stream_pair(self, directory: Path) -> tuple[SSHStream, trio.SocketStream]:
        """A forwarded UNIX socket from the client's side, and the socket's owner's side."""
        path = str(directory / f"{next(_NUMBERS)}.sock")
        listener = trio.socket.socket(trio.socket.AF_UNIX)
        with listener:
            await listener.bind(path)
            listener.listen(1)
            stream = await self.connection.open_unix(path)
            accepted, _ = await listener.accept()
        assert isinstance(stream, SSHStream)
        owner = trio.SocketStream(accepted)
        # The client speaks first: asyncssh's forwarder may lose what the owner says before that.
        await stream.send_all(b"!")
        assert await owner.receive_some(1) == b"!"
        return stream, owner

    async def ask_something(self) -> None:
        """Ask the server what costs it nothing, and wait for the answer: all that was sent before has arrived then."""
        with pytest.raises(trio.BrokenResourceError):
            await self.connection.open_unix("/nonexistent/socket")


@asynccontextmanager
async def reach(server: str, directory: Path) -> AsyncIterator[Reachable]:
    """Start a server and connect to it; the connection is closed at the end."""
    async with open_ssh_loop(), _serve(server, directory) as (node, options):
        connection = await connect(node, options)
        try:
            yield Reachable(node, options, connection)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(5):
                await connection.aclose()


@asynccontextmanager
async def connections_by(options: SSHOptions) -> AsyncIterator[NodeConnections]:
    """Connections to any nodes that SSH reaches by these options."""
    connections = NodeConnections(VirtualNodes((), options, num_first=0))
    try:
        yield connections
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(5):
            await connections.aclose()


@asynccontextmanager
async def _serve(server: str, directory: Path) -> AsyncIterator[tuple[NodeSpec, SSHOptions]]:
    if server == "embedded":
        async with serve_local_nodes(1) as ((node,), options):
            yield node, options
    else:
        with serve_openssh(directory / "openssh") as openssh:
            config = directory / "ssh_config"
            config.write_text(openssh.host_config(["alpha"]))
            yield NodeSpec(name="alpha", host="alpha"), SSHOptions(config=config)


async def until(condition: Callable[[], object], *, timeout_s: float = 30.0) -> None:
    """Wait for something that other processes do, and that no event tells of."""
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)
