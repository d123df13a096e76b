"""The one seam between a run and the place where its nodes live.

A launcher lists nodes and connects to them: a hostfile with SSH, a command that prints one, or a port that nodes dial
in to. No other part of a run knows which it is.

A launcher never reports a lost node. Schedulers notice a death after seconds, connections and leases in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import trio

from oobleck.job import NodeSpec
from oobleck.runtime.ssh import SSHConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A node has appeared, perhaps after it left or was lost: it may join."""

    node: NodeSpec
    by_itself: bool = False
    """Whether it came without a user's request: something may restart its process whenever it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A node is no longer listed, or will be taken away: drain it if it is still there."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """All processes of a node were killed, because they took more memory than they may."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A text for people to read."""

    level: str
    """`info` or `warning`."""
    text: str


NodeChange = Arrived | Leaving | OutOfMemory | Reported


class Launcher(Protocol):
    """Where the nodes of a run come from, and how to reach them."""

    @property
    def are_virtual(self) -> bool:
        """Whether all nodes are on this machine and share its directories and its faults."""

    @property
    def python(self) -> str:
        """The interpreter on nodes, unless the user names another one."""

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """The nodes that are known now, in the run or not."""

    async def begin(self, *, waits: bool = True) -> tuple[NodeSpec, ...]:
        """Wait for enough nodes to begin with and return them; without `waits`, return the present ones."""

    async def found_again(self, nodes: Sequence[NodeSpec], asked: Set[str]) -> Sequence[NodeSpec]:
        """Return those of an earlier master's nodes that can be reached, without those already asked.

        Waits for one, but no longer than `begin` waits for nodes; returns none once there is none left to wait for.
        """

    async def connect(self, node: NodeSpec) -> SSHConnection:
        """Connect to a node; the caller closes the connection. Raises NodeUnreachable."""

    async def has_ended(self, node: NodeSpec) -> bool:
        """Whether a node whose connection was just lost is certainly gone, with all its processes.

        Returns within a moment; False if the node may be reachable again.
        """

    async def follow(self, changes: trio.MemorySendChannel[NodeChange]) -> None:
        """Report changes after `begin`, until cancelled."""

    async def release(self, node: NodeSpec) -> None:
        """Give back a node that has left the run for good; best effort, raises nothing."""

    def named(self, text: str) -> NodeSpec:
        """Return the node that `text` means to a user who adds it. Raises UserError."""
