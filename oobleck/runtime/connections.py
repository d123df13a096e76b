"""One connection to each node, kept: what comes later needs no new handshake."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress

import trio

from oobleck.job import NodeSpec

from .launchers import Launcher
from .ssh import SSHConnection


class NodeConnections:
    """Connections by the names of their nodes; one that is lost is made again when it is asked for."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._open: dict[str, SSHConnection] = {}
        self._locks: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)

    async def to(self, node: NodeSpec) -> SSHConnection:
        """The connection to a node. Raises NodeUnreachable."""
        async with self._locks[node.name]:
            connection = self._open.get(node.name)
            if connection is None or connection.is_lost:
                connection = self._open[node.name] = await self._launcher.connect(node)
            return connection

    async def has_ended(self, node: NodeSpec) -> bool:
        """Whether a node whose connection has just been lost is gone for sure."""
        return await self._launcher.has_ended(node)

    async def drop(self, node: NodeSpec) -> None:
        """Close a connection on which something went wrong."""
        connection = self._open.pop(node.name, None)
        if connection is not None:
            with suppress(trio.BrokenResourceError):
                await connection.aclose()

    async def release(self, node: NodeSpec) -> None:
        """Give a node back; best effort, raises nothing."""
        await self._launcher.release(node)

    async def aclose(self) -> None:
        for connection in self._open.values():
            await connection.aclose()
        self._open.clear()
