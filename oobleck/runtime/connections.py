"""Keeps one connection to each node, so that later commands need no new handshake."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress

import trio

from oobleck.job import NodeSpec

from .launchers import Launcher
from .ssh import SSHConnection


class NodeConnections:
    """Connections keyed by node name; a lost one is made again on demand."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._open: dict[str, SSHConnection] = {}
        # Several tasks may need a node at once, and must share one handshake.
        self._locks: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)

    async def to(self, node: NodeSpec) -> SSHConnection:
        """Return the connection to a node. Raises NodeUnreachable."""
        async with self._locks[node.name]:
            connection = self._open.get(node.name)
            if connection is None or connection.is_lost:
                connection = self._open[node.name] = await self.launcher.connect(node)
            return connection

    async def drop(self, node: NodeSpec) -> None:
        """Close a connection after a failure on it."""
        connection = self._open.pop(node.name, None)
        if connection is not None:
            with suppress(trio.BrokenResourceError):
                await connection.aclose()

    async def aclose(self) -> None:
        for connection in self._open.values():
            await connection.aclose()
        self._open.clear()
