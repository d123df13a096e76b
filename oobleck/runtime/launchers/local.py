"""Virtual nodes of this machine, reached by the SSH server that `oobleck up` itself runs for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import trio

from oobleck.errors import UsageError
from oobleck.job import NodeSpec
from oobleck.runtime.ssh import SSHConnection, SSHOptions, connect

from .launcher import NodeChange


class VirtualNodes:
    """Launcher: a run begins with the first of them; the others can be added."""

    are_virtual = True
    python = sys.executable

    def __init__(self, nodes: Sequence[NodeSpec], options: SSHOptions, *, num_first: int) -> None:
        self.nodes = tuple(nodes)
        self._options = options
        self._num_first = num_first

    async def begin(self, *, waits: bool = True) -> tuple[NodeSpec, ...]:
        """The first ones."""
        return self.nodes[: self._num_first]

    async def connect(self, node: NodeSpec) -> SSHConnection:
        """Connect over SSH. Raises NodeUnreachable."""
        return await connect(node, self._options)

    async def has_ended(self, node: NodeSpec) -> bool:
        """Never known: agents outlive connections."""
        return False

    async def follow(self, changes: trio.MemorySendChannel[NodeChange]) -> None:
        """Nothing changes by itself."""
        await trio.sleep_forever()

    async def release(self, node: NodeSpec) -> None:
        """Nothing: it may be added again."""

    def named(self, text: str) -> NodeSpec:
        """One of the virtual nodes. Raises UsageError."""
        known = {spec.name: spec for spec in self.nodes}
        if text not in known:
            raise UsageError(f"this machine has no virtual node {text!r}; there are {', '.join(known)}")
        return known[text]
