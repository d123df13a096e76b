"""Keeps one connection to each node, so that later commands need no new handshake."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

import trio

from oobleck.job import NodeSpec

from .files import RUN_ENVIRONMENT
from .launchers import Launcher
from .ssh import SSHConnection


class NodeConnections:
    """Connections keyed by node name; a lost one is made again on demand."""

    def __init__(self, launcher: Launcher, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is that of our processes on nodes, on top of what their login shells set."""
        self.launcher = launcher
        self._environment = environment or {}
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

    def with_environment(self, command: str) -> tuple[str, bytes]:
        """Return a POSIX shell's command that begins in our processes' environment, and the first line of its input."""
        if not self._environment:
            return command, b""
        # A command line can be read by all users of a node, and sshd takes variables of a few names alone.
        digest = hashlib.sha256(repr(sorted(self._environment.items())).encode("utf-8", "surrogateescape")).hexdigest()
        variables = {**self._environment, RUN_ENVIRONMENT: digest}
        line = "; ".join(f"export {name}={_quoted(value)}" for name, value in variables.items())
        script = f"n=$(printf '\\nx'); n=${{n%x}}; IFS= read -r line && eval \"$line\"; unset n line; {command}"
        return f"exec /bin/sh -c {shlex.quote(script)}", os.fsencode(f"{line}\n")

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


def _quoted(value: str) -> str:
    """Quote a value for a shell in one line, which `read` ends at; $n is a line's end."""
    return '"$n"'.join(shlex.quote(part) for part in value.split("\n"))
